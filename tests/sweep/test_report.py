"""The folder of a sweep, and the report, table and plots of its results."""

import csv
import dataclasses
import pathlib

import numpy as np
import pytest
from PIL import Image
from support.full_disk import full_disk
from support.sweeps import GPU, ORIGIN
from support.tiny import tiny_config

from jaxunet.profile.report import write_csv
from jaxunet.profile.summary import Row
from jaxunet.runtime.errors import UserError
from jaxunet.sweep import parts, plots, report
from jaxunet.sweep.folder import config_arguments, load, save
from jaxunet.sweep.points import expand, parse_axes
from jaxunet.sweep.presets import STUDY_PARTS
from jaxunet.sweep.results import Sweep, effects


def rows_of(sweep_axes, rate):
    """Made-up rows: a rate for every cell (None: it failed)."""
    points, _ = expand(tiny_config(), sweep_axes, GPU)
    rows = []
    for point in points:
        value = rate(*point.values.values())
        if value is None:
            result = {'status': 'timeout', 'reason': 'not done\n after 1 s', 'log': 'logs/x.log'}
        else:
            result = {
                'status': 'ok', 'compile_cached': False, 'loss': 0.5, 'steps': 100,
                'images_per_s': value, 'images_per_s_range': [value * 0.9, value * 1.1],
                'peak_bytes': 2**30, 'peak_source': 'device', 'lower_s': 1.0, 'compile_s': 2.0,
                'step_ms': {'median': 8e3 / value, 'quartiles': [7e3 / value, 9e3 / value]},
            }  # fmt: skip
        batch = point.raw['data']['batch_size']
        origin = {'point': point.values, 'batch': batch, 'key': point.label, 'seconds': 1.0}
        rows.append(ORIGIN | origin | result)
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
    found = {(w.axis.name, w.value): w for w in effects(made_up())}
    assert found['precision', 'bfloat16'].ratios == pytest.approx(
        [3, 3]
    )  # the pair with 4 devices is incomplete
    assert found['parallel.devices', 2].ratio == pytest.approx(2**0.5)
    assert found['parallel.devices', 4].ratios == pytest.approx([2])
    assert found['parallel.devices', 4].efficiency == pytest.approx(0.5)
    assert found['precision', 'bfloat16'].efficiency is None


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
    assert f'measured. {ORIGIN["devices"]} x {ORIGIN["device"]}, ' in text
    assert 'Note: a note.' in text
    assert '![precision](precision.png)' in text
    with paths[0].open(newline='') as file:
        table = list(csv.DictReader(file))
    assert [row['status'] for row in table] == ['ok', 'ok', 'timeout', 'ok', 'ok', 'ok']
    assert table[5]['images_per_s'] == '600'
    assert table[5]['step_ms_q1'] == '11.6667'
    assert table[0]['speed_of_best'] == '0.166667'
    assert table[2]['images_per_s'] == ''


def test_numbers_of_a_cpu_that_mean_nothing_are_left_out(tmp_path):
    """Peaks of processes are not compared, and devices that share cores are named as such."""
    made = made_up()
    for row in made.done:
        row |= {'device': 'cpu', 'peak_source': 'process'}
    assert not any(w.memory for w in effects(made))
    *_, plot, page = report.write(made, tmp_path, plot=True)
    text = page.read_text()
    assert '| option | against | images/s | range | pairs | efficiency |' in text
    assert 'These devices share the cores of one CPU' in text
    assert 'so peaks are not compared' in text
    assert '5 points measured. cpu, ' in text
    with Image.open(plot) as alone:
        wide = report.write(made_up(), tmp_path, plot=True)[-2]
        with Image.open(wide) as both:
            assert alone.width < both.width  # one panel


def test_a_full_disk_leaves_the_files_of_before(tmp_path):
    """No table or picture is cut under its name."""
    sweep, operations = made_up(), [Row('device', 'gemm', 'x' * 40, '', '', 1, 2.0, 1.0, '', '')]
    writers = (
        lambda: write_csv(tmp_path / 'xla.csv', operations),
        lambda: report.write(sweep, tmp_path, plot=False),
        lambda: plots.plot(sweep, tmp_path),
        lambda: save(tmp_path, {'title': 'x' * 100}),
    )
    for write in writers:
        write()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 6
    for write in writers:
        with full_disk(60), pytest.raises(UserError, match=r'--output: .*: cannot be written: '):
            write()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_study_is_one_report_of_its_parts(monkeypatch, tmp_path):
    sweep = made_up()
    sweeps = {'amp': sweep, 'compiled': dataclasses.replace(sweep, rows=[], missing=6)}
    monkeypatch.setattr(parts.folder, 'load', lambda directory: sweeps[directory.name])
    for part in sweeps:
        (tmp_path / part).mkdir()
    written, paths = parts.write(tmp_path, tuple(sweeps), plot=False)
    assert paths[-1] == tmp_path / 'report.md'
    assert {'amp/report.md', 'compiled/results.csv'} <= {
        str(path.relative_to(tmp_path)) for path in paths
    }
    text = paths[-1].read_text()
    assert text == written
    assert [line for line in text.splitlines() if line.startswith(('# ', '## '))] == [
        '# Study',
        *[f'## {part.title}' for part in sweeps.values()],
    ]
    assert '| amp | precision=bfloat16, parallel.devices=4 | 600.0 | ×6 |' in text
    assert '| compiled | no point ran to its end |  |  |' in text
    assert '([log](amp/logs/x.log))' in text
    inside = (tmp_path / 'amp' / 'report.md').read_text()
    assert '([log](logs/x.log))' in inside


def test_an_axis_of_no_part_of_the_study_is_refused():
    parts.check_axes(parse_axes(['precision=float32,bfloat16', 'jit=on']), STUDY_PARTS)
    with pytest.raises(UserError, match=r'--vary seed: no part of the study varies it.*precision'):
        parts.check_axes(parse_axes(['jit=on', 'seed=1,2']), STUDY_PARTS)


def test_code_in_a_report_stays_as_it_is_in_a_study():
    text = '# Title\n\n```\n# not [a](heading)\n```\n\n[here](a.png), [there](https://b)\n'
    assert parts.chapter(text, 'amp') == (
        '## Title\n\n```\n# not [a](heading)\n```\n\n[here](amp/a.png), [there](https://b)\n'
    )


def test_a_sweep_without_any_result_has_a_report(tmp_path):
    axes = parse_axes(['precision=float32,bfloat16'])
    sweep = Sweep(axes, rows_of(axes, lambda precision: None)[:1], 1, [], '--config x', 'None')
    report.write(sweep, tmp_path, plot=True)
    text = (tmp_path / 'report.md').read_text()
    assert 'No point ran to its end' in text
    assert '**1 point has not run yet;**' in text
    assert '| precision=bfloat16 | float32 | not comparable |' in text


def test_rows_of_a_machine_without_the_repository():
    sweep = made_up()
    for row in sweep.rows:
        row['git'] = None
    assert ', jax 1.2.3, commit unknown\n' in report.markdown(sweep, [], pathlib.Path())


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
        '--config.data.batch_size',
        '6',
        '--preset',
        'amp',
        '--config.model.remat',
        '--noconfig.ema.warmup',
    ]
    assert config_arguments(given) == [
        '--config',
        'a.py',
        '--config.seed=1',
        '--config.data.batch_size',
        '6',
        '--config.model.remat',
        '--noconfig.ema.warmup',
    ]
