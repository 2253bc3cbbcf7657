"""Sweeps: the grid, the processes and their failures, the cache, the report; and the real thing
from the command line.
"""

import csv
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import unittest.mock

import jax
import numpy as np
import pytest
from PIL import Image
from support.commands import call
from support.settings import QUICK
from support.tiny import flags, tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config, resolve
from jaxunet.profile.report import check_plots
from jaxunet.runtime import subprocesses as processes
from jaxunet.runtime.errors import UserError
from jaxunet.sweep import measure, report, runner, study
from jaxunet.sweep.config_file import config_file
from jaxunet.sweep.folder import config_arguments, load, save
from jaxunet.sweep.points import Axis, Machine, expand, merge, parse_axes, show
from jaxunet.sweep.presets import PRESETS, STUDY, STUDY_PARTS
from jaxunet.sweep.results import Sweep, geometric_mean, worth
from jaxunet.sweep.runner import Options

ORIGIN = {
    'git': 'abc1234',
    'device': 'thing',
    'devices': 4,
    'driver': None,
    'versions': {'jax': '1.2.3'},
}
CPU = Machine('cpu', 1, ORIGIN)
GPU = Machine('gpu', 4, ORIGIN)
TESTS = pathlib.Path(__file__).parents[1]


def grid(*axes, machine=GPU, **changes):
    return expand(tiny_config(**changes), parse_axes(axes), machine)


# The grid


def test_values_are_read_as_the_type_of_their_field():
    axes = parse_axes(
        [
            'data.batch_size=8,16',
            'precision=float32,bfloat16',
            'optimizer.learning_rate=1e-3,2',
            'ema.warmup=true,False',
            'jit=on,off',
            'model.channel_mult=(1,2),(1,),(1, 2, 2)',
            'batch_per_device=4',
        ]
    )
    assert [axis.values for axis in axes] == [
        (8, 16),
        ('float32', 'bfloat16'),
        (1e-3, 2),
        (True, False),
        ('on', 'off'),
        ((1, 2), (1,), (1, 2, 2)),
        (4,),
    ]
    assert show((1,)) == '(1,)'
    assert show([1, 2]) == '(1,2)'


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (
            'data.batch_sise=8',
            '--vary data.batch_sise: unknown field; did you mean "data.batch_size"',
        ),
        ('num_workers=8', '--vary num_workers: unknown field; did you mean data.num_workers?'),
        (
            'zzz=8',
            '--vary zzz: unknown field; expected a field of the config, or jit or batch_per_device',
        ),
        ('data=8', '--vary data: is a section; vary one of its fields, e.g. data.path'),
        ('data.batch_size', '--vary data.batch_size: expected NAME=VALUE,VALUE'),
        ('data.batch_size=', 'expected NAME=VALUE,VALUE'),
        ('data.batch_size=8,many', "--vary data.batch_size: expected int, found 'many'"),
        ('data.batch_size=8,,16', "--vary data.batch_size: expected int, found ''"),
        ('data.batch_size=8.5', "--vary data.batch_size: expected int, found '8.5'"),
        ('data.batch_size=True', "--vary data.batch_size: expected int, found 'True'"),
        ('ema.warmup=maybe', "--vary ema.warmup: expected true or false, found 'maybe'"),
        ('jit=yes', "--vary jit: expected on or off, found 'yes'"),
        (
            'model.channel_mult=1,2',
            "--vary model.channel_mult: expected a tuple such as (1,2) or (8,), found '1'",
        ),
        ('precision=float32,float32', '--vary precision: float32 is given twice'),
    ],
)
def test_mistakes_in_an_axis(text, message):
    with pytest.raises(UserError) as error:
        parse_axes([text])
    assert message in str(error.value)


def test_an_axis_given_twice():
    with pytest.raises(UserError, match='--vary jit: given twice'):
        parse_axes(['jit=on', 'jit=off'])


@pytest.mark.parametrize(
    ('axes', 'message'),
    [
        ([], 'nothing to vary'),
        (
            ['precision=float32,bfloat61'],
            'no point with bfloat61 can run: precision: expected one of float32, bfloat16, float16',
        ),
        (
            ['parallel.devices=1,8'],
            'no point with 8 can run: parallel.devices: 8 asked for, but this machine has 4',
        ),
        (
            ['data.batch_size=8,9', 'parallel.devices=2,4'],
            'no point with 9 can run: data.batch_size: 9 images at a time do not divide',
        ),
        (
            ['jit=on,off', 'parallel.devices=2,4'],
            'no point with off can run: jit=off: runs on one device',
        ),
        (
            ['jit=on,off', 'train.steps_per_call=2', 'train.log_every=2', 'parallel.devices=1'],
            'no point with off can run: jit=off: runs steps one by one, found '
            'train.steps_per_call=2; set it to 0 or 1',
        ),
        (
            ['batch_per_device=4', 'data.batch_size=8'],
            'data.batch_size and batch_per_device set the same field',
        ),
        (
            ['data.num_workers=0,2', 'data.cache=device'],
            'data.num_workers: 2 has no effect, as data.cache=device',
        ),
    ],
)
def test_a_value_with_which_nothing_can_run_is_a_mistake(axes, message):
    with pytest.raises(UserError) as error:
        grid(*axes)
    assert message in str(error.value)


def test_one_impossible_point_is_a_point():
    points, _ = grid('data.batch_size=2,8', 'parallel.devices=1,4')
    assert [p.values for p in points][:2] == [
        {'data.batch_size': 2, 'parallel.devices': n} for n in (1, 4)
    ]
    assert [p.problem for p in points] == [
        '',
        'data.batch_size: 2 images at a time do not divide among 4 devices',
        '',
        '',
    ]
    assert resolve(points[3].raw) == tiny_config(data={'batch_size': 8}, parallel={'devices': 4})


def test_cpu_machines_play_devices_and_others_cannot():
    points, _ = grid('parallel.devices=1,4', machine=CPU)
    assert [p.problem for p in points] == ['', '']
    assert (
        '--xla_force_host_platform_device_count=4'
        in runner.environment(points[1], CPU)['XLA_FLAGS']
    )
    assert runner.environment(points[0], CPU) == dict(os.environ)
    assert runner.environment(points[1], GPU) == dict(os.environ)


def test_batch_per_device():
    points, _ = grid('parallel.devices=1,4,0', 'batch_per_device=8')
    assert [p.raw['data']['batch_size'] for p in points] == [8, 32, 32]


def test_workers_are_varied_where_they_work():
    points, notes = grid('data.num_workers=0,2')
    assert [p.raw['data']['cache'] for p in points] == ['stream', 'stream']
    assert 'stream instead of auto' in notes[0]
    points, notes = grid('data.cache=stream,device', 'data.num_workers=0,2,4')
    assert [p.label for p in points] == [
        *(f'cache=stream num_workers={n}' for n in (0, 2, 4)),
        'cache=device num_workers=0',
    ]
    assert notes == ['2 points left out: data.num_workers changes nothing while data.cache=device']


@pytest.mark.parametrize('name', PRESETS)
def test_presets_are_grids(name):
    points, _ = expand(
        Config().replace(parallel={'devices': 1}), parse_axes(PRESETS[name].axes), GPU
    )
    assert len(points) >= 2
    assert not any(point.problem for point in points)


def test_vary_replaces_the_axes_of_a_preset():
    given = parse_axes(['parallel.devices=1,2', 'backend=xla'])
    assert [
        (a.name, len(a.values)) for a in merge(parse_axes(PRESETS['devices_batch'].axes), given)
    ] == [
        ('parallel.devices', 2),
        ('batch_per_device', 3),
        ('backend', 1),
    ]


def test_a_point_as_a_config_file(tmp_path):
    (point,), _ = grid('model.channel_mult=(1,)', machine=CPU)
    namespace: dict = {}
    exec(config_file(point), namespace)
    assert resolve(namespace['get_config']()) == point.config
    (same,), _ = expand(Config(), [Axis('seed', (0,))], CPU)
    exec(config_file(same), namespace)
    assert resolve(namespace['get_config']()) == Config()


# The processes and the cache


@pytest.fixture
def faults(monkeypatch, tmp_path):
    """Points' processes run tests/support/sweep_faults.py; returns what ran."""
    monkeypatch.setattr(runner, 'MEASURE', 'support.sweep_faults')
    monkeypatch.setenv('PYTHONPATH', str(TESTS))
    monkeypatch.setenv('SWEEP_CALLS', str(tmp_path / 'calls'))
    monkeypatch.setenv('SWEEP_WORKER', str(tmp_path / 'worker'))

    def calls():
        path = tmp_path / 'calls'
        return path.read_text().splitlines() if path.exists() else []

    return calls


def go(directory, *axes, **options):
    points, notes = grid(*axes, parallel={'devices': 1})
    opts = Options(**options)
    said: list[str] = []
    spec = {
        'title': 'T',
        'command': '--config c.py',
        'axes': [dataclasses.asdict(a) for a in parse_axes(axes)],
        'notes': notes,
    }
    save(directory, spec | {'keys': [runner.key(p, opts, GPU) for p in points]})
    runner.run(points, directory, opts, GPU, say=said.append)
    sweep = load(directory)
    return sweep, said


def gone(pid, seconds=10):
    """True if a process ends soon; one that nobody has waited for yet has ended too."""
    stat = pathlib.Path('/proc', pid, 'stat')
    for _ in range(seconds * 10):
        try:
            if ' Z ' in stat.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_whatever_a_process_does_is_a_row(faults, tmp_path):
    sweep, said = go(tmp_path / 's', 'data.batch_size=8,11,12,13,14,15,16,17', timeout=1.5)
    rows = {row['point']['data.batch_size']: row for row in sweep.rows}
    assert {batch: row['status'] for batch, row in rows.items()} == {
        8: 'ok',
        11: 'crash',
        12: 'crash',
        13: 'out of memory',
        14: 'timeout',
        15: 'crash',
        16: 'ok',
        17: 'crash',
    }
    assert 'SIGABRT' in rows[11]['reason']
    assert rows[12]['reason'] == 'exit code 3: ValueError: went wrong'
    assert 'SIGKILL' in rows[13]['reason']
    assert rows[14]['reason'] == 'not done after 1.5 s (--timeout)'
    assert rows[15]['reason'] == 'exit code 0: starting'
    assert rows[17]['reason'] == 'exit code 1: no output'
    log = (tmp_path / 's' / rows[12]['log']).read_text().splitlines()
    assert log[0].startswith(f'{sys.executable} -m support.sweep_faults ')
    assert log[1:] == ['starting', 'ValueError: went wrong']
    assert rows[8]['images_per_s'] == 4000
    assert rows[8]['git'] == 'abc1234'
    assert any('timeout: not done after 1.5 s' in line for line in said)
    assert gone((tmp_path / 'worker').read_text())  # the worker of the point that hung


def test_done_points_are_not_run_again_and_failed_ones_when_asked(faults, tmp_path):
    axes = ['data.batch_size=8,12,16']
    go(tmp_path, *axes)
    assert faults() == ['8 time', '16 time']
    sweep, said = go(tmp_path, *axes)
    assert faults() == ['8 time', '16 time']
    assert said == [
        '3 of 3 points are done (1 of them failed; --retry_failed runs those again): '
        f'{tmp_path / "results.jsonl"}'
    ]
    _, said = go(tmp_path, *axes, retry_failed=True)
    assert [line for line in said if 'crash' in line] == [
        '[2/3] batch_size=12: crash: exit code 3: ValueError: went wrong'
    ]
    assert faults() == ['8 time', '16 time']
    go(tmp_path, 'data.batch_size=8,24')  # a larger grid in the same folder
    assert faults() == ['8 time', '16 time', '24 time']
    go(tmp_path, *axes, steps=7)  # measured otherwise
    assert faults()[3:] == ['8 time', '16 time']
    assert len(sweep.rows) == 3


def test_keys_tell_apart_what_may_differ():
    (point,), _ = grid('data.batch_size=8')
    (eager,), _ = grid('jit=off', parallel={'devices': 1})
    other_version = dataclasses.replace(GPU, provenance=ORIGIN | {'versions': {'jax': '1.2.4'}})
    other_device = dataclasses.replace(GPU, provenance=ORIGIN | {'device': 'other thing'})
    other_code = dataclasses.replace(GPU, provenance=ORIGIN | {'git': 'abc1235'})
    edited = dataclasses.replace(GPU, provenance=ORIGIN | {'git': 'abc1234-dirty'})
    keys = [
        runner.key(point, Options(), m)
        for m in (GPU, other_version, other_device, other_code, edited)
    ]
    keys += [runner.key(eager, Options(), GPU), runner.key(point, Options(warmup=3), GPU)]
    assert len(set(keys)) == len(keys)
    (labelled,), _ = grid('seed=0')  # another axis, but the same config as by data.batch_size=8
    assert runner.key(labelled, Options(timeout=1), GPU) == keys[0]


def test_compile_jobs_compile_before_anything_is_timed(faults, tmp_path):
    go(tmp_path, 'data.batch_size=8,12,16', compile_jobs=2)
    calls = faults()
    assert sorted(calls[:2]) == ['16 compile', '8 compile']
    assert calls[2:] == ['8 time', '16 time']


def test_side_by_side_points_have_gpus_of_their_own(monkeypatch):
    needs = [1, 4, 0, 2, 1, 2, 1]
    lock, busy, order, most = threading.Lock(), set(), [], []

    def work(i, gpus):
        assert len(gpus) == needs[i]
        with lock:
            assert not busy & set(gpus)
            busy.update(gpus)
            order.append(i)
            most.append(len(busy))
        time.sleep(0.05)
        with lock:
            busy.difference_update(gpus)

    processes.share(list(enumerate(needs)), ['0', '1', '2', '3'], work)
    assert sorted(order) == list(range(len(needs)))
    assert order.index(3) < order.index(
        1
    )  # the one that needs all waits for those that fit beside the first
    assert max(most) == 4

    def fail(i, gpus):
        raise ValueError('of a worker')

    with pytest.raises(ValueError, match='of a worker'):
        processes.share([(0, 1), (1, 1)], ['0'], fail)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,5')
    assert runner.gpu_names(Machine('gpu', 2, ORIGIN)) == ['2', '5']
    with pytest.raises(UserError, match='this machine has none'):
        runner.gpu_names(CPU)


def test_side_by_side_from_processes(faults, tmp_path):
    sweep, _ = go(
        tmp_path / 's', 'parallel.devices=1,2,4', 'data.batch_size=8,16', side_by_side=True
    )
    assert [row['status'] for row in sweep.rows] == ['ok'] * 6
    assert all(row['side_by_side'] for row in sweep.rows)
    points, _ = grid('parallel.devices=1,2,4')
    assert runner.environment(points[1], GPU, ['1', '3'])['CUDA_VISIBLE_DEVICES'] == '1,3'
    assert [runner.needed_gpus(p, GPU) for p in points] == [1, 2, 4]


def test_memory_errors_are_told_apart(monkeypatch):
    task = runner.Task({}, True, [], 1, 1, 1.0)
    for error, status in (
        (
            jax.errors.JaxRuntimeError(
                'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore'
            ),
            'out of memory',
        ),
        (MemoryError(), 'out of memory'),
        (ValueError('other'), 'error'),
        (UserError('data.path: wrong'), 'error'),
    ):
        monkeypatch.setattr(measure, 'measure', unittest.mock.Mock(side_effect=error))
        row = measure.outcome(task)
        assert row['status'] == status
        assert row['reason']
        assert '\n' not in row['reason']
    assert row['reason'] == 'data.path: wrong'


# Measuring


def test_statistics_of_steps():
    ends = list(np.cumsum([5.0, *([0.1] * 8), 0.3, 0.1]))
    found = measure.statistics(ends, batch=4)
    assert found['steps'] == 10
    assert found['step_ms']['median'] == pytest.approx(100)
    assert found['images_per_s'] == pytest.approx(40)  # one slow step of five pairs changes nothing
    assert found['images_per_s_range'] == pytest.approx([20, 40])
    together = measure.statistics(ends, batch=4, unit=5)
    assert together['steps'] == 50
    assert together['step_ms']['median'] == pytest.approx(20)
    assert together['images_per_s'] == pytest.approx(200)


@pytest.mark.parametrize(('max_seconds', 'expected'), [(1e9, 12), (0.0, measure.MIN_CALLS)])
def test_the_clock_covers_the_timed_steps_alone(max_seconds, expected):
    """Every step takes a second of a fake clock that moves when a result is waited for; the warm-up
    takes ten.
    """
    now, waited = [0.0], [0]

    class Loss(float):
        def __float__(self):
            waited[0] += 1
            now[0] += 10 if waited[0] <= 3 else 1
            return 0.5

    dispatched = []

    def call(data):
        dispatched.append(data)
        return {'step_loss': [1.0, Loss(0.5)]}

    ends, loss = measure.run(
        call,
        lambda: len(dispatched),
        lambda m: m,
        3,
        12,
        max_seconds,
        clock=lambda: now[0],
    )
    assert np.diff(ends).tolist() == [1.0] * expected
    assert loss == 0.5
    assert len(dispatched) == expected + 3 + measure.IN_FLIGHT


def test_the_eager_step_sees_the_batches_that_training_sees():
    config = tiny_config(parallel={'devices': 1})
    source = measure.open_images(config)
    resident, streaming = (
        measure.Session(config.replace(data={'cache': cache}), source)
        for cache in ('device', 'stream')
    )
    calls = []
    step = measure.eager(lambda state, batch: (calls.append(state.step), ({}, batch))[1], config)
    resident.load(fresh_state(config))
    with streaming:
        streaming.load(fresh_state(config))
        streaming.open_stream(end=3)
        for number in range(3):
            streamed = streaming.next_data()
            state = unittest.mock.Mock(step=jax.numpy.asarray(number, 'int32'))
            for data in (resident.next_data(), streamed):
                _, batch = step(state, data)
                np.testing.assert_array_equal(batch['image'], streamed['image'])
                np.testing.assert_array_equal(batch['label'], streamed['label'])
                np.testing.assert_array_equal(batch['row'], np.arange(8))
        with pytest.raises(StopIteration):
            streaming.next_data()
    assert len(calls) == 6  # Python runs it every time: nothing is compiled as a whole


def test_programs_are_counted_with_their_cache(tmp_path):
    def make(seed):
        return (
            jax.jit(lambda x: jax.numpy.sin(x) * seed)
            .lower(jax.ShapeDtypeStruct((3,), 'float32'))
            .compile()
        )

    fresh = measure.Programs()
    make(time.time())
    assert (fresh.made, fresh.hits, fresh.cached) == (1, 0, False)
    assert measure.Programs().cached  # nothing had to be made: the whole step was kept


# The report


def rows_of(sweep_axes, rate, **extra):
    """Made-up rows: a rate for every cell (None: it failed)."""
    points, _ = expand(tiny_config(), sweep_axes, GPU)
    rows = []
    for point in points:
        value = rate(*point.values.values())
        row = {
            'point': point.values,
            'batch': point.raw['data']['batch_size'],
            'key': point.label,
            'seconds': 1.0,
            **ORIGIN,
        }
        if value is None:
            rows.append(
                row | {'status': 'timeout', 'reason': 'not done\n after 1 s', 'log': 'logs/x.log'}
            )
            continue
        numbers = {
            'images_per_s': value,
            'images_per_s_range': [value * 0.9, value * 1.1],
            'peak_bytes': 2**30,
            'peak_source': 'device',
        }
        timed = {
            'step_ms': {'median': 8e3 / value, 'quartiles': [7e3 / value, 9e3 / value]},
            'lower_s': 1.0,
            'compile_s': 2.0,
        }
        rows.append(
            row
            | {'status': 'ok', 'compile_cached': False, 'loss': 0.5, 'steps': 100}
            | numbers
            | timed
            | extra
        )
    return rows


def made_up():
    axes = parse_axes(['precision=float32,bfloat16', 'parallel.devices=1,2,4'])
    speed = {'float32': 1, 'bfloat16': 3}
    rows = rows_of(
        axes,
        lambda precision, n: (
            None if (precision, n) == ('float32', 4) else speed[precision] * 100 * n**0.5
        ),
    )
    return Sweep(axes, rows, 0, ['a note'], '--config configs/x.py', 'Made up')


def test_what_an_option_is_worth():
    found = {(w.axis.name, w.value): w for w in worth(made_up())}
    assert found['precision', 'bfloat16'].ratios == pytest.approx(
        [3, 3]
    )  # the pair with 4 devices is incomplete
    assert found['parallel.devices', 2].ratio == pytest.approx(2**0.5)
    assert found['parallel.devices', 4].ratios == pytest.approx([2])
    assert found['parallel.devices', 4].efficiency == pytest.approx(0.5)
    assert found['precision', 'bfloat16'].efficiency is None
    assert geometric_mean([1, 4]) == pytest.approx(2)


def test_report_csv_and_plots(tmp_path):
    sweep = made_up()
    paths = report.write(sweep, tmp_path, plot=True)
    assert [p.name for p in paths] == [
        'results.csv',
        'precision.png',
        'parallel.devices.png',
        'report.md',
    ]
    for path in paths[1:3]:
        with Image.open(path) as picture:
            assert len(np.unique(np.asarray(picture.convert('RGB')).reshape(-1, 3), axis=0)) > 10
    text = paths[-1].read_text()
    assert (
        '**precision=bfloat16, parallel.devices=4**: 600.0 images/s, 13.33 ms per step, 6.00× the '
        'slowest.' in text
    )
    best = (
        'python -m jaxunet.train --config configs/x.py --config.precision=bfloat16 '
        '--config.parallel.devices=4'
    )
    assert best in text
    assert '| precision=bfloat16 | float32 | ×3 | ×3 to ×3 | 2 | ×1 |  |' in text
    assert '| parallel.devices=4 | 1 | ×2 | ×2 to ×2 | 1 | ×1 | 50.0% |' in text
    assert (
        '- precision=float32, parallel.devices=4: timeout: not done after 1 s ([log](logs/x.log))'
        in text
    )
    assert 'Note: a note.' in text
    assert '![precision](precision.png)' in text
    with paths[0].open(newline='') as file:
        table = list(csv.DictReader(file))
    assert [row['status'] for row in table] == ['ok', 'ok', 'timeout', 'ok', 'ok', 'ok']
    assert table[5]['images_per_s'] == '600'
    assert table[5]['step_ms_q1'] == '11.6667'
    assert table[0]['speed_of_best'] == '0.166667'
    assert table[2]['images_per_s'] == ''


def test_a_study_is_one_report_of_its_parts(monkeypatch, tmp_path):
    sweep = made_up()
    parts = {'amp': sweep, 'compiled': dataclasses.replace(sweep, rows=[], missing=6)}
    monkeypatch.setattr(study.folder, 'load', lambda directory: parts[directory.name])
    for part in parts:
        (tmp_path / part).mkdir()
    written, paths = study.write(tmp_path, tuple(parts), plot=False)
    assert paths[-1] == tmp_path / 'report.md'
    assert {'amp/report.md', 'compiled/results.csv'} <= {
        str(path.relative_to(tmp_path)) for path in paths
    }
    text = paths[-1].read_text()
    assert text == written
    assert [line for line in text.splitlines() if line.startswith(('# ', '## '))] == [
        '# Study',
        *[f'## {part.title}' for part in parts.values()],
    ]
    assert '| amp | precision=bfloat16, parallel.devices=4 | 600.0 | ×6 |' in text
    assert '| compiled | no point ran to its end | | |' in text
    assert '([log](amp/logs/x.log))' in text
    inside = (tmp_path / 'amp' / 'report.md').read_text()
    assert '([log](logs/x.log))' in inside


def test_an_axis_of_no_part_of_the_study_is_refused():
    study.check_axes(parse_axes(['precision=float32,bfloat16', 'jit=on']), STUDY_PARTS)
    with pytest.raises(UserError, match=r'--vary seed: no part of the study varies it.*precision'):
        study.check_axes(parse_axes(['jit=on', 'seed=1,2']), STUDY_PARTS)


def test_code_in_a_report_stays_as_it_is_in_a_study():
    text = '# Title\n\n```\n# not [a](heading)\n```\n\n[here](a.png), [there](https://b)\n'
    assert study.chapter(text, 'amp') == (
        '## Title\n\n```\n# not [a](heading)\n```\n\n[here](amp/a.png), [there](https://b)\n'
    )


def test_a_sweep_without_any_result_has_a_report(tmp_path):
    axes = parse_axes(['precision=float32,bfloat16'])
    sweep = Sweep(axes, rows_of(axes, lambda precision: None)[:1], 1, [], '--config x', 'None')
    report.write(sweep, tmp_path, plot=True)
    text = (tmp_path / 'report.md').read_text()
    assert 'No point ran to its end' in text
    assert '**1 points have not run yet;**' in text
    assert '| precision=bfloat16 | float32 | not comparable |' in text


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'needs matplotlib.*jaxunet\[plots\].*--noplot'):
        check_plots()


def test_a_folder_without_a_sweep(tmp_path):
    with pytest.raises(UserError, match='holds no sweep'):
        load(tmp_path)
    (tmp_path / 'sweep.json').write_text('{"keys"')
    with pytest.raises(UserError, match=r'sweep\.json: expected a JSON object'):
        load(tmp_path)


def test_config_arguments():
    given = [
        '--vary',
        'jit=on',
        '--config',
        'a.py',
        '--config.seed=1',
        '--steps=3',
        '--noconfig.ema.warmup',
    ]
    assert config_arguments(given) == [
        '--config',
        'a.py',
        '--config.seed=1',
        '--noconfig.ema.warmup',
    ]


# The command line


def sweep(directory, *arguments, code=0):
    variables = {'JAXUNET_GIT_SHA': 'abc1234'}
    arguments = ['jaxunet.sweep', *arguments, f'--output={directory}']
    return call(*arguments, code=code, variables=variables)


def test_from_the_command_line(tmp_path):
    """Two numbers of devices by two inputs, one of which has nothing to do for the workers; then
    again, retried, and plotted.
    """
    given = [
        *flags(),
        '--config.data.batch_size=6',
        '--vary=parallel.devices=1,2',
        '--vary=data.num_workers=0,1',
        '--steps=6',
        '--warmup=1',
    ]
    out = sweep(tmp_path, *given)
    assert 'note: data.cache: stream instead of auto' in out
    found = {tuple(row['point'].values()): row for row in load(tmp_path).rows}
    assert {point: row['status'] for point, row in found.items()} == {
        (1, 0): 'ok',
        (1, 1): 'error',
        (2, 0): 'ok',
        (2, 1): 'error',
    }
    assert (
        'data.num_workers: 1 workers have nothing to do, as digits: lies in memory'
        in found[1, 1]['reason']
    )
    row = found[2, 0]
    assert row['steps'] == 6
    assert row['warmup'] >= 2
    assert row['compile_s'] > 0
    assert row['lower_s'] > 0
    assert (
        row['step_ms']['quartiles'][0] <= row['step_ms']['median'] <= row['step_ms']['quartiles'][1]
    )
    low, high = row['images_per_s_range']
    assert 0 < low <= row['images_per_s'] <= high
    assert row['peak_bytes'] > 2**26
    assert row['config']['data']['cache'] == 'stream'
    assert row['versions']['jax'] == jax.__version__
    losses = [found[n, 0]['loss'] for n in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # the same batches, the same steps
    lines = (tmp_path / 'results.jsonl').read_text().splitlines()
    assert len(lines) == 4

    out = sweep(tmp_path, *given, '--noplot')
    assert '4 of 4 points are done (2 of them failed' in out
    assert (tmp_path / 'results.jsonl').read_text().splitlines() == lines

    out = sweep(tmp_path, *given, '--retry_failed', '--timeout=0.1')
    again = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()[4:]]
    assert [(row['status'], row['point']['data.num_workers']) for row in again] == [
        ('timeout', 1)
    ] * 2

    for name in ('report.md', 'results.csv', 'parallel.devices.png', 'data.num_workers.png'):
        (tmp_path / name).unlink()
    out = sweep(tmp_path, '--plot_only')
    assert '## What each option is worth' in out
    assert '| parallel.devices=2 | 1 | ×' in (tmp_path / 'report.md').read_text()
    assert (tmp_path / 'parallel.devices.png').exists()
    assert (tmp_path / 'data.num_workers.png').exists()


@pytest.mark.long
def test_top_operations_from_the_command_line(tmp_path):
    out = sweep(
        tmp_path,
        *flags(),
        '--preset=top_operations',
        '--vary=backend=xla',
        '--steps=2',
        '--warmup=1',
    )
    assert '## Phases' in out
    assert '## Top 10 device operations' in out
    (row,) = load(tmp_path).rows
    assert row['launches'] > 10
    assert row['images_per_s'] == pytest.approx(8e3 / row['step_ms']['median'])
    assert (tmp_path / row['profile']).is_file()
    assert (tmp_path / 'operations.png').exists()
    assert '![operations](operations.png)' in (tmp_path / 'report.md').read_text()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'error: --vary: nothing to vary'),
        (['--vary=data.batch_sise=8'], 'error: --vary data.batch_sise: unknown field'),
        (
            ['--vary=jit=on', '--config.data.path=nowhere.zip'],
            'error: data.path: nowhere.zip: no such file',
        ),
        (
            ['--preset=ampp'],
            f'value should be one of <{"|".join([*PRESETS, STUDY])}>',
        ),
        (
            ['--preset=top_operations', '--vary=jit=on,off', '--config.parallel.devices=1'],
            'error: --vary jit: --preset top_operations',
        ),
        (['--plot_only'], 'holds no sweep'),
    ],
)
def test_mistakes_end_before_anything_runs(arguments, message, tmp_path):
    assert message in sweep(tmp_path / 'out', *arguments, code=2)
    assert not (tmp_path / 'out').exists()


def test_a_stopped_sweep_takes_its_point_along(tmp_path):
    environment = os.environ | {
        'XLA_FLAGS': QUICK,
        'JAX_PLATFORMS': 'cpu',
        'JAXUNET_GIT_SHA': 'abc1234',
    }
    command = [
        sys.executable,
        '-m',
        'jaxunet.sweep',
        *flags(),
        '--vary=seed=1,2',
        f'--output={tmp_path}',
        '--steps=1000000',
        '--noplot',
    ]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    timer = threading.Timer(60, process.kill)
    timer.start()
    assert process.stdout is not None
    while 'seed=1 ...' not in process.stdout.readline():
        assert process.poll() is None
    children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
    while not (child := children.read_text().strip()):
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate()
    timer.cancel()
    assert process.returncode == 130
    assert 'stopped; the same command goes on from here' in err
    assert gone(child)
    assert not (tmp_path / 'results.jsonl').exists()
