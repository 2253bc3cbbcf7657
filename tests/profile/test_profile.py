"""The profiler: arithmetic on made-up traces, tables and files, and the command line."""

import csv
import dataclasses
import gzip
import itertools
import json

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from support.commands import call
from support.profile_traces import PROGRAM, gpu_events, gpu_trace
from support.tiny import flags, tiny_config

from jaxunet.data.sources import open_images
from jaxunet.profile import intervals, report
from jaxunet.profile.capture import HOST_DATA, HOST_WAIT, capture, check
from jaxunet.profile.chrome import phase_spans, write_trace
from jaxunet.profile.events import COLLECTIVE, COPY, KERNEL, Event, build_trace
from jaxunet.profile.phases import ALL_REDUCE, BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES
from jaxunet.profile.summary import DEVICE, HOST, summarise
from jaxunet.runtime.errors import UserError

# Arithmetic


def test_intervals_agree_with_counting():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sets = [
            np.sort(rng.integers(0, 30, (rng.integers(0, 6), 2)), axis=1).astype(float)
            for _ in range(2)
        ]
        covered = [
            {x for start, end in spans for x in range(int(start), int(end))} for spans in sets
        ]
        assert intervals.length(sets[0]) == len(covered[0])
        assert intervals.overlap(*sets) == len(covered[0] & covered[1])
        joined = intervals.union(sets[0])
        assert (joined[:, 0] < joined[:, 1]).all()
        assert (joined[1:, 0] > joined[:-1, 1]).all()


def test_trace_of_a_gpu():
    trace = gpu_trace(devices=1)
    assert trace.platform == 'gpu'
    seen = {op.name: (op.kind, op.phase, op.backend) for op in trace.ops}
    assert seen == {
        'sm90_xmma_fprop': (KERNEL, FORWARD, 'xla'),
        'jaxunet_conv3x3_dx': (KERNEL, BACKWARD, 'pallas'),
        'add_fusion_3': (KERNEL, OPTIMIZER, 'xla'),
        'MemcpyD2H': (COPY, DATA, 'xla'),
        'ncclDevKernel_AllReduce_Sum_f32_RING_LL': (COLLECTIVE, ALL_REDUCE, 'xla'),
    }
    assert [(e.name, e.own) for e in trace.host] == [
        ('step', 40.0),
        ('dispatch', 20.0),
        ('launch', 30.0),
        ('launch', 10.0),
        ('after', 5.0),
    ]


def test_operations_of_another_program_get_no_scope():
    events = [
        Event('add_fusion_3', 0.0, 5.0, {'hlo_op': 'add_fusion.3', 'hlo_module': 'jit_other'})
    ]
    [op] = build_trace([('/device:GPU:0', [('Stream #1', events)])], PROGRAM, 1).ops
    assert (op.path, op.phase) == ('', OTHER)


def test_a_batch_on_its_way_is_data():
    [op] = build_trace(
        [('/device:GPU:0', [('Stream #15(MemcpyH2D)', [Event('MemcpyH2D', 0.0, 5.0, {})])])],
        PROGRAM,
        1,
    ).ops
    assert (op.kind, op.phase) == (COPY, DATA)


@pytest.mark.parametrize('devices', [1, 2])
def test_summary(devices):
    s = summarise(gpu_trace(devices), steps=2)  # as if the same had been two steps
    assert (s.devices, s.launches, s.copies) == (devices, 2.0, 0.5)
    assert s.window_ms == pytest.approx(51e-3 / 2)
    assert s.busy_ms == pytest.approx(47e-3 / 2)
    assert s.idle_share == pytest.approx(4 / 51)
    assert s.collective_ms == pytest.approx(20e-3 / 2)
    assert s.overlapped_share == pytest.approx(0.5)  # 20-30 of 20-40
    assert {k: v * 2e3 for k, v in s.phase_ms.items()} == pytest.approx(
        {DATA: 1, FORWARD: 10, BACKWARD: 20, ALL_REDUCE: 20, OPTIMIZER: 6, OTHER: 0}
    )
    [first, *_] = s.side(DEVICE)
    assert dataclasses.astuple(first) == (
        DEVICE,
        KERNEL,
        'jaxunet_conv3x3_dx',
        BACKWARD,
        'pallas',
        0.5,
        pytest.approx(0.01),
        pytest.approx(20 / 57),
        'UNet/middle_res_0',
        first.kernel,
    )
    assert sum(row.share for row in s.side(DEVICE)) == pytest.approx(1)
    assert {row.operation: row.ms * 2e6 for row in s.side(HOST)} == pytest.approx(
        {'step': 40, 'launch': 40, 'dispatch': 20, 'after': 5}
    )


def test_no_collectives_no_overlap():
    trace = build_trace([('/device:GPU:0', gpu_events()[:1])], PROGRAM, 1)
    s = summarise(trace, 1)
    assert (s.collective_ms, s.overlapped_share) == (0, None)
    assert 'collectives' not in report.text('a', s, step_ms=1, traced_step_ms=1, top=3)


def test_cpu_operations_last_until_their_end_event():
    thread = [
        Event('while.3', 0.0, 90.0, {'hlo_op': 'while.3', 'device_ordinal': '1'}),
        Event('dot.4', 0.0, 1.0, {'hlo_op': 'dot.4', 'device_ordinal': '1', '_p': '77'}),
        Event('copy.5', 1.0, 4.0, {'hlo_op': 'copy.5', 'device_ordinal': '1', '_p': '78'}),
        Event('ThunkExecutor::Execute', 0.0, 95.0, {}),
    ]
    other = [
        Event('end: dot.4', 50.0, 0.0, {'_c': '77'}),
        Event('ThreadpoolListener::Region', 1.0, 49.0, {}),
    ]
    trace = build_trace(
        [('/host:CPU', [('tf_XLAEigen/1', thread), ('tf_XLAEigen/2', other)])], PROGRAM, 1
    )
    assert trace.platform == 'cpu'
    assert [(op.name, op.duration, op.device) for op in trace.ops] == [
        ('dot.4', 50.0, 1),
        ('copy.5', 4.0, 1),
    ]  # not the loop around them
    assert trace.host == []


# Files and tables


def test_trace_file_gets_tracks_of_phases(tmp_path):
    source = tmp_path / 'a.trace.json.gz'
    with gzip.open(source, 'wt') as file:
        json.dump(
            {
                'displayTimeUnit': 'ns',
                'traceEvents': [
                    {'ph': 'X', 'pid': 7, 'tid': 1, 'ts': 0, 'dur': 9, 'name': 'x'},
                    {},
                ],
            },
            file,
        )
    write_trace(source, gpu_trace(), tmp_path / 'b.json.gz')
    with gzip.open(tmp_path / 'b.json.gz', 'rt') as file:
        content = json.load(file)
    events = content['traceEvents']
    assert content['displayTimeUnit'] == 'ns'
    assert events[0]['name'] == 'x'
    [process] = [e['pid'] for e in events if e.get('args') == {'name': 'phases'}]
    assert process == 8
    spans = [
        (e['tid'], e['name'], e['ts'], e['dur'])
        for e in events
        if e['pid'] == process and e['ph'] == 'X'
    ]
    assert spans[:5] == [
        (0, FORWARD, 0, 10),
        (0, BACKWARD, 10, 10),
        (0, ALL_REDUCE, 20, 20),
        (0, OPTIMIZER, 44, 6),
        (0, DATA, 50, 1),
    ]
    assert [s[1] for s in spans[5:]] == [s[1] for s in spans[:5]]


def test_phase_spans_do_not_overlap():
    for device in (0, 1):
        spans = list(phase_spans([op for op in gpu_trace().ops if op.device == device]))
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_csv_round_trip(tmp_path):
    rows = summarise(gpu_trace(), 1).rows
    report.write_csv(tmp_path / 'a.csv', rows)
    assert report.read_csv(tmp_path / 'a.csv') == rows


def test_csv_mistakes(tmp_path):
    with pytest.raises(UserError, match=r'none\.csv: cannot be read: No such file or directory$'):
        report.read_csv(tmp_path / 'none.csv')
    path = tmp_path / 'a.csv'
    path.write_text('a,b\n1,2\n')
    with pytest.raises(UserError, match=r"expected the columns side, kind.*found \['a', 'b'\]"):
        report.read_csv(path)
    report.write_csv(path, summarise(gpu_trace(), 1).rows)
    path.write_text(path.read_text().rstrip().rsplit(',', 3)[0] + '\n')
    with pytest.raises(UserError, match='a row is damaged'):
        report.read_csv(path)


def test_tables():
    s = summarise(gpu_trace(), 1)
    text = report.text('xla', s, step_ms=0.050, traced_step_ms=1.75, top=2)
    assert (
        '0.05 ms per step, device busy 0.05 ms of it, idle 6.0%; 4 kernel launches and 1 copies '
        'per step' in text
    )
    assert 'while traced: 1.75 ms per step, idle 7.8%' in text
    assert 'collectives: 0.020 ms per step, 50.0% of it while the device computes' in text
    assert 'jaxunet_conv3x3_dx' in text
    assert 'conv  ' not in text  # the third
    both = report.side_by_side([('before', s.rows[:1]), ('after', s.rows)], top=4).splitlines()
    assert len(both) == 5
    assert both[0].startswith('before: 0.02 ms, 1 launches')
    assert 'after: 0.06 ms, 4 launches' in both[0]
    assert len({line.index('|') for line in both}) == 1
    assert report.shorten('x' * 30 + 'end', 11) == 'xxxx…xxxend'


def chart(label):
    s = summarise(gpu_trace(), 1)
    return report.Chart(label, s.busy_ms, s.launches, s.phase_ms, s.rows)


def test_plot(tmp_path):
    report.plot(tmp_path / 'a.png', [chart('xla'), chart('pallas')], top=3)
    with Image.open(tmp_path / 'a.png') as picture:
        colours = np.unique(np.asarray(picture.convert('RGB')).reshape(-1, 3), axis=0)
    for phase in (FORWARD, BACKWARD, ALL_REDUCE):
        assert (
            (colours == np.array([int(report.COLOURS[phase][i : i + 2], 16) for i in (1, 3, 5)]))
            .all(axis=1)
            .any()
        ), phase


@pytest.mark.parametrize(
    ('busy_ms', 'label'),
    [
        (2.0, ''),
        (1.6, 'operations that run at the same time are added up: 2.00 ms of them in 1.60 ms'),
    ],
)
def test_a_plot_explains_phases_that_add_up_to_more_than_the_busy_time(
    tmp_path, monkeypatch, busy_ms, label
):
    figures = []

    def keep(figure, path, **_):
        figures.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, 'savefig', keep)
    phases = {'forward': 0.5, 'backward': 1.5}
    report.plot(tmp_path / 'a.png', [chart('xla')._replace(busy_ms=busy_ms, phase_ms=phases)], 3)
    (figure,) = figures
    assert figure.axes[0].get_title().startswith(f'xla: device busy {busy_ms:.2f} ms, ')
    assert figure.axes[0].get_xlabel() == label


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'pip install "jaxunet\[plots\]"'):
        report.plot(tmp_path / 'a.png', [chart('xla')], top=3)


# The whole way


@pytest.mark.long
def test_capture_on_several_devices(tmp_path):
    config = tiny_config(parallel={'devices': 2}, data={'cache': 'stream'})
    captured = capture(config, open_images(config), tmp_path, steps=2, warmup=1)
    s = summarise(captured.trace, captured.steps)
    assert (s.platform, s.devices, s.steps) == ('cpu', 2, 2)
    assert s.collective_ms > 0
    assert 0 <= s.overlapped_share <= 1
    assert 0 <= s.idle_share < 1
    assert min(s.phase_ms[p] for p in PHASES if p != OTHER) > 0
    assert s.phase_ms[OTHER] < 0.2 * sum(s.phase_ms.values())
    host = {row.operation: row for row in s.side(HOST)}
    assert host[HOST_DATA].count == 1
    # On a CPU one step is queued: the second waits for the first, and the end for the second.
    assert host[HOST_WAIT].count == 1
    assert captured.step_ms > 0


def test_an_empty_trace_is_told(tmp_path):
    with pytest.raises(UserError, match='no operations of the cpu device'):
        check(build_trace([], PROGRAM, 1), tmp_path)


def test_command_line(tmp_path):
    out = call(
        'jaxunet.profile',
        *flags(),
        '--backends=xla,auto',
        '--steps=2',
        '--warmup=1',
        '--top=4',
        f'--output={tmp_path}',
    )
    assert {p.name for p in tmp_path.iterdir()} == {
        'profile.jsonl',
        'profile.png',
        *(f'{b}.{end}' for b in ('xla', 'auto') for end in ('csv', 'trace.json.gz', 'xplane.pb')),
    }
    assert 'device = CPU' in out
    assert any('xla: ' in line and 'auto: ' in line and ' | ' in line for line in out.splitlines())
    rows = [json.loads(line) for line in (tmp_path / 'profile.jsonl').read_text().splitlines()]
    assert [row['backend'] for row in rows] == ['xla', 'auto']
    for row in rows:
        assert {
            'git',
            'device',
            'versions',
            'launches',
            'idle_share',
            'traced_idle_share',
            'phase_ms',
            'overlapped_share',
            'step_ms',
        } <= set(row)
        assert row['config']['backend'] == row['backend']
        assert row['config']['data']['batch_size'] == 8
        assert sum(row['phase_ms'].values()) > 0
    with (tmp_path / 'xla.csv').open(newline='') as file:
        table = list(csv.DictReader(file))
    assert {row['side'] for row in table} == {DEVICE, HOST}
    assert {row['phase'] for row in table if row['side'] == DEVICE} >= {
        DATA,
        FORWARD,
        BACKWARD,
        OPTIMIZER,
    }
    with gzip.open(tmp_path / 'xla.trace.json.gz', 'rt') as file:
        events = json.load(file)['traceEvents']
    assert {DATA, FORWARD, BACKWARD, OPTIMIZER} <= {e['name'] for e in events if e['ph'] == 'X'}
    with Image.open(tmp_path / 'profile.png') as picture:
        assert picture.format == 'PNG'
    assert (
        jax.profiler.ProfileData.from_file(str(tmp_path / 'xla.xplane.pb')).find_plane_with_name(
            '/host:CPU'
        )
        is not None
    )


def test_command_line_mistakes(tmp_path):
    assert 'backend: expected one of' in call(
        'jaxunet.profile', *flags(), '--backends=xla,cudnn', code=2
    )
    (tmp_path / 'file').touch()
    assert f'--output: {tmp_path}/file/x: cannot be made: {tmp_path}/file is a file' in call(
        'jaxunet.profile', *flags(), f'--output={tmp_path}/file/x', code=2
    )
    (tmp_path / 'profile.jsonl').mkdir()
    assert f'--output: {tmp_path}/profile.jsonl: cannot be written' in call(
        'jaxunet.profile', *flags(), f'--output={tmp_path}', code=2
    )
    assert not list(tmp_path.glob('*.csv'))
