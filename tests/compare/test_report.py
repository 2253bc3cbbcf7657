"""The report of `python -m jaxunet.compare`, from rows of its runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tiny import TINY

from jaxunet.compare import report, results, runner, worker
from jaxunet.compare.methods import METHODS
from jaxunet.compare.statistics import time_to
from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError


def spec_of(config, methods, seconds, seeds, evaluations):
    return runner.Spec(
        'c',
        to_dict(config),
        methods,
        dict.fromkeys(methods, seconds),
        seeds,
        dict.fromkeys(methods, evaluations),
    )


def test_time_to_a_quality():
    seconds = np.array([10.0, 20.0, 30.0])
    falling = np.array([50.0, 30.0, 20.0])
    assert time_to(40, seconds, falling, higher=False) == 15
    assert time_to(20, seconds, falling, higher=False) == 30
    assert time_to(60, seconds, falling, higher=False) == 10
    assert time_to(19, seconds, falling, higher=False) == np.inf
    assert time_to(0.5, seconds, np.array([0.1, 0.3, 0.7]), higher=True) == pytest.approx(25)


def rows_of(
    folder,
    method,
    seed,
    values,
    step_of=lambda i: 100 * (i + 1),
    seconds_of=lambda i: 10.0 * (i + 1),
):
    (folder / 'runs' / f'{method}_seed{seed}').mkdir(parents=True)
    with (folder / 'runs' / f'{method}_seed{seed}' / worker.ROWS).open('w') as file:
        for i, value in enumerate(values):
            row = {
                'milestone': i,
                'method': method,
                'seed': seed,
                'name': 'fid',
                'metric': 'fid',
                'value': value,
                'std': None,
            }
            row |= {
                'training_seconds': seconds_of(i),
                'step': step_of(i),
                'num_samples': 5,
                'sampler': 'ddim',
                'evaluations': 2,
            }
            origin = {
                'git': f'sha{seed}',
                'device': 'D',
                'driver': '1.2',
                'versions': {'jax': '0.10'},
            }
            file.write(
                json.dumps(row | {'reference': 'r', 'features': 'f', 'resize': 'none'} | origin)
                + '\n'
            )


def test_the_table_is_computed_from_the_rows(tmp_path):
    """The faster method comes to the mean of the baseline's final values, 30, halfway between its
    first two points.
    """
    methods = {'uniform': METHODS['uniform'], 'p2': METHODS['p2'], 'speed': METHODS['speed']}
    config = resolve(to_dict(Config().replace(**TINY)))
    spec = spec_of(config, methods, 30.0, {'uniform': 2, 'p2': 1, 'speed': 1}, 3)
    rows_of(tmp_path, 'uniform', 0, [60, 50, 32])
    rows_of(tmp_path, 'uniform', 1, [60, 50, 28])
    rows_of(tmp_path, 'p2', 0, [40, 20, 10], step_of=lambda i: 50 * (i + 1))
    rows_of(tmp_path, 'speed', 0, [90, 80, 70])
    lines = report.markdown(spec, tmp_path, {}).splitlines()
    table = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split('|') for line in lines if line.startswith('| '))
    }
    assert table['uniform'] == ['2', '30 ± 2', '30', '1.00', '300', '1.000']
    assert table['p2'] == ['1', '10', '15', '2.00', '150', '2.000']
    assert table['speed'] == ['1', '70', 'not reached', '< 1.00', '300', '1.000']
    only = tmp_path / 'runs' / 'p2_seed0' / worker.ROWS
    every = only.read_text()
    only.write_text(
        every.splitlines(keepends=True)[-1]
    )  # measured at the end alone: when it was as good as the baseline is not known
    assert '| p2 | 1 | 10 | ≤ 30 | ≥ 1.00 |' in report.markdown(spec, tmp_path, {})
    only.write_text(every)
    cut = tmp_path / 'runs' / 'uniform_seed1' / worker.ROWS
    cut.write_text(
        ''.join(cut.read_text().splitlines(keepends=True)[::2])
    )  # without the second milestone
    assert '| p2 | 1 | 10 | 15 | 2.00 |' in report.markdown(spec, tmp_path, {})
    seconds, values = results.mean_curve(
        results.curves(spec, results.collect(spec, tmp_path), 'fid')['uniform']
    )
    np.testing.assert_array_equal([seconds, values], [[10, 30], [60, 30]])
    (tmp_path / runner.COSTS).write_text(
        json.dumps(
            {
                'costs': {'uniform': {'ms': 1.0, 'ratio': 1.0, 'quartiles': [1.0, 1.0]}},
                'rounds': 3,
                'steps': 4,
                'batch': 8,
                'device': 'd',
            }
        )
    )
    text = report.markdown(spec, tmp_path, {})
    assert f'learning rate constant after {config.optimizer.warmup_steps} steps of warm-up;' in text
    assert 'fid of uniform at 30 s, 30 (mean of 2 seeds).' in text
    assert 'measured times; ± is half the range over seeds.' in text
    assert '| 1.000 (1.000 to 1.000) |' in text
    assert 'Runs on D (driver 1.2); jax 0.10; commit sha0, sha1.' in text
    assert 'Turns: 3 of 4 steps each, batch 8, one d.' in text


def test_runs_of_other_lengths(tmp_path):
    """A shorter one is told beside the baseline of its time, halfway between two of its points; its
    own curve ends there.
    """
    methods = {'uniform': METHODS['uniform'], 'p2': METHODS['p2'], 'speed': METHODS['speed']}
    seconds, seeds = {'uniform': 30.0, 'p2': 15.0, 'speed': 20.0}, dict.fromkeys(methods, 1)
    config = to_dict(resolve(to_dict(Config().replace(**TINY))))
    spec = runner.Spec('c', config, methods, seconds, seeds, {'uniform': 3, 'p2': 1, 'speed': 2})
    rows_of(tmp_path, 'uniform', 0, [60, 50, 30])
    rows_of(tmp_path, 'p2', 0, [20], seconds_of=lambda i: 15.0)
    rows_of(tmp_path, 'speed', 0, [90, 80])
    text = report.markdown(spec, tmp_path, {})
    assert '| method | seeds | s | uniform by then | fid at the end |' in text
    assert '| uniform | 1 | 30 |  | 30 | 30 | 1.00 |' in text
    assert '| p2 | 1 | 15 | 55 | 20 | ≤ 15 | ≥ 2.00 |' in text
    assert '| speed | 1 | 20 | 50 | 80 | not reached | < 1.50 |' in text
    assert 'trains for 30 (p2 15, speed 20) s of wall-clock' in text
    assert 'At 3 (p2 1, speed 2) equally spaced times' in text


def test_rows_of_a_machine_without_the_repository(tmp_path):
    spec = spec_of(resolve(to_dict(Config())), {'uniform': {}}, 10.0, {'uniform': 1}, 1)
    rows_of(tmp_path, 'uniform', 0, [60])
    found = [row | {'git': None} for row in results.collect(spec, tmp_path)]
    assert report.origins(found).endswith('; commit unknown.')


def test_a_metric_that_is_not_measured_yet(tmp_path):
    """A command may be stopped between the rows of two metrics."""
    config = resolve(to_dict(Config().replace(**TINY, evaluation={'metrics': ('fid', 'recall')})))
    spec = spec_of(config, {'uniform': METHODS['uniform']}, 10.0, {'uniform': 1}, 1)
    rows_of(tmp_path, 'uniform', 0, [60])
    written = report.write(spec, tmp_path, {}, plot=True)
    assert (tmp_path / 'quality.png') in written.paths
    assert '| uniform | 1 | 60 |  | 10 | 1.00 |' in written.text


def test_a_short_comparison_of_one_seed(tmp_path):
    """Its seconds have the digits from which their ratio follows, and no spread is explained."""
    methods = {'uniform': METHODS['uniform'], 'p2': METHODS['p2']}
    config = resolve(to_dict(Config().replace(**TINY)))
    spec = spec_of(config, methods, 5.0, dict.fromkeys(methods, 1), 2)
    rows_of(tmp_path, 'uniform', 0, [60, 40], seconds_of=lambda i: 2.5 * (i + 1))
    rows_of(tmp_path, 'p2', 0, [50, 30], seconds_of=lambda i: 2.5 * (i + 1))
    text = report.markdown(spec, tmp_path, {})
    assert '| p2 | 1 | 30 | 3.75 | 1.33 |' in text
    assert 'fid of uniform at 5 s, 40 (one seed).' in text
    assert '±' not in text


@pytest.mark.parametrize(
    'field', ['features', 'reference', 'num_samples', 'sampler', 'evaluations']
)
def test_runs_that_were_measured_in_different_ways_do_not_compare(tmp_path, field):
    spec = spec_of(
        resolve(to_dict(Config())), {'uniform': {}, 'p2': {}}, 30.0, {'uniform': 1, 'p2': 1}, 1
    )
    rows_of(tmp_path, 'uniform', 0, [60])
    rows_of(tmp_path, 'p2', 0, [50])
    results.collect(spec, tmp_path)
    path = tmp_path / 'runs' / 'p2_seed0' / worker.ROWS
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 7}) + '\n')
    with pytest.raises(
        UserError,
        match=rf'measured with different {field} do not compare: .* \(uniform_seed0\), 7 '
        r'\(p2_seed0\)',
    ):
        results.collect(spec, tmp_path)
