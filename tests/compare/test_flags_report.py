"""The report of a comparison that flags state, from rows of its runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tiny import TINY

from jaxunet.compare import flags_report, runner, worker
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


def tables_of(spec, folder, failures=None):
    """The text of the report, and the cells of its tables by heading and first cell."""
    text, _ = flags_report.write(spec, folder, failures or {}, plot=False)
    found = {}
    for section in text.split('\n## '):
        lines = [line for line in section.splitlines() if line.startswith('| ')]
        cells = [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines]
        found[section.splitlines()[0]] = {line[0]: line[1:] for line in cells}
    return text, found


TITLE = '# Methods at equal training wall-clock'
SOONER = 'Seconds to the quality of uniform at its end'
DIFFERENCES = 'Differences to uniform, with the same seeds'
BEST = 'Differences to the best other method'
END = 'At the last time'
COST = {'ms': 1.0, 'ratio': 1.0, 'quartiles': [1.0, 1.0]}


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
    **changes,
):
    (folder / 'runs' / f'{method}_seed{seed}').mkdir(parents=True, exist_ok=True)
    with (folder / 'runs' / f'{method}_seed{seed}' / worker.ROWS).open('a') as file:
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
            made = {'reference': 'r', 'features': 'f', 'resize': 'none'}
            file.write(json.dumps(row | made | origin | changes) + '\n')


def test_the_tables_are_computed_from_the_rows(tmp_path):
    """The faster method gets to the final values of the baseline, 32 and 28, by seed: halfway
    between its first two points, and a little later.
    """
    methods = {'uniform': METHODS['uniform'], 'p2': METHODS['p2'], 'speed': METHODS['speed']}
    config = resolve(to_dict(Config().replace(**TINY)))
    spec = spec_of(config, methods, 30.0, {'uniform': 2, 'p2': 2, 'speed': 1}, 3)
    rows_of(tmp_path, 'uniform', 0, [60, 50, 32])
    rows_of(tmp_path, 'uniform', 1, [60, 50, 28])
    rows_of(tmp_path, 'p2', 0, [44, 20, 10], step_of=lambda i: 50 * (i + 1))
    rows_of(tmp_path, 'p2', 1, [38, 18, 11], step_of=lambda i: 50 * (i + 1))
    rows_of(tmp_path, 'speed', 0, [90, 80, 70])
    text, found = tables_of(spec, tmp_path)
    assert found[TITLE] == {
        'method': ['distance', '10 s', '20 s', '30 s'],
        '---': ['---', '---', '---', '---'],
        'uniform': ['Fréchet distance', '60 ± 0 (2)', '50 ± 0 (2)', '30 ± 2 (2)'],
        'p2': ['Fréchet distance', '41 ± 3 (2)', '19 ± 1 (2)', '10.5 ± 0.5 (2)'],
        'speed': ['Fréchet distance', '90 (1)', '80 (1)', '70 (1)'],
    }
    assert found[DIFFERENCES]['p2'][1:3] == ['−19 ± 3 (2), p 0.1', '**−31 ± 1 (2), p 0.021**']
    assert found[DIFFERENCES]['speed'][3] == '+38 (1)'
    assert found[BEST]['speed'][3] == 'p2: +60 (1)'
    share = '15 ± 0 (2)', '0.5 ± 0 (2)'
    assert found[SOONER]['p2'] == ['Fréchet distance', '15, 15', *share]
    assert found[SOONER]['uniform'][1:] == ['30, 30', '30 ± 0 (2)', '1 ± 0 (2)']
    assert found[SOONER]['speed'][1:] == ['not reached', '', '']
    assert found[END]['p2'] == ['0, 1', 'ddim', '150', '200.00']
    warmup = config.optimizer.warmup_steps
    assert f'learning rate constant after {warmup} steps of warm-up;' in text
    assert '5 samples by ddim with 2 evaluations of the network, compared with r;' in text
    assert 'D (driver 1.2), jax 0.10, commit sha0, sha1; 5 samples, batches of 8; feat' in text
    assert 'Methods beside the baseline: p2: loss.weighting=p2; speed: ' in text
    assert text.endswith('## Missing cells\n\nNone.\n')


def test_runs_with_gaps(tmp_path):
    """A run that is measured at its end alone has a bound; one without a milestone is straight
    between its neighbours.
    """
    methods = {'uniform': METHODS['uniform'], 'p2': METHODS['p2']}
    config = resolve(to_dict(Config().replace(**TINY)))
    spec = spec_of(config, methods, 30.0, dict.fromkeys(methods, 1), 3)
    rows_of(tmp_path, 'uniform', 0, [60, 50, 30])
    rows_of(tmp_path, 'p2', 0, [50, 40, 10])
    path = tmp_path / 'runs' / 'p2_seed0' / worker.ROWS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(''.join(lines[::2]))
    text, found = tables_of(spec, tmp_path)
    assert found[SOONER]['p2'][1:] == ['20', '20 (1)', '0.6667 (1)']
    assert '- `p2`: seed 0 at 20 s' in text
    path.write_text(lines[-1])
    _, found = tables_of(spec, tmp_path)
    assert found[SOONER]['p2'][1:] == ['≤ 30', '≤ 30 (1)', '≤ 1 (1)']
    path.unlink()
    reason = 'timeout: no\nanswer'
    text, found = tables_of(spec, tmp_path, {'p2_seed0': reason, 'step_cost': 'crash: x'})
    assert 'p2' not in found[SOONER]
    assert '- all of `p2`\n- failed: `p2`, seed 0: timeout: no answer\n' in text
    assert '\nFailed: step_cost: crash: x\n' in text


def test_steps_that_were_timed(tmp_path):
    """Only the last row counts; it may be of other methods."""
    spec = spec_of(
        resolve(to_dict(Config())), {'uniform': METHODS['uniform']}, 10.0, {'uniform': 1}, 1
    )
    rows_of(tmp_path, 'uniform', 0, [60])
    text, _ = tables_of(spec, tmp_path)
    assert 'in turns' not in text
    row = {'rounds': 3, 'steps': 4, 'batch': 8, 'device': 'd'}
    costs = [{'p2': COST}, {'uniform': COST, 'speed': COST | {'ms': 2.0, 'ratio': 2.0}}]
    lines = (json.dumps({'costs': one, **row}) for one in costs)
    (tmp_path / runner.COSTS).write_text('\n'.join(lines) + '\n')
    text, found = tables_of(spec, tmp_path)
    assert found['Steps, measured in turns'] == {
        'method': ['ms per step', 'of uniform (quartiles)'],
        '---': ['---', '---'],
        'uniform': ['1.00', '1.000 (1.000 to 1.000)'],
        'speed': ['2.00', '2.000 (1.000 to 1.000)'],
    }
    assert 'Turns: 3 of 4 steps each, batch 8, one d.' in text


def test_runs_of_other_lengths(tmp_path):
    """A shorter one is compared with the baseline at its time, halfway between two of its points;
    its own curve ends there.
    """
    methods = {'uniform': METHODS['uniform'], 'p2': METHODS['p2'], 'speed': METHODS['speed']}
    seconds, seeds = {'uniform': 30.0, 'p2': 15.0, 'speed': 20.0}, dict.fromkeys(methods, 1)
    config = to_dict(resolve(to_dict(Config().replace(**TINY))))
    spec = runner.Spec('c', config, methods, seconds, seeds, {'uniform': 3, 'p2': 1, 'speed': 2})
    rows_of(tmp_path, 'uniform', 0, [60, 50, 30])
    rows_of(tmp_path, 'p2', 0, [20], seconds_of=lambda i: 15.0)
    rows_of(tmp_path, 'speed', 0, [90, 80])
    text, found = tables_of(spec, tmp_path)
    assert found[TITLE]['p2'] == ['Fréchet distance', '', '20 (1)', '', '']
    assert found[DIFFERENCES]['p2'] == ['Fréchet distance', '', '−35 (1)', '', '']
    assert found[DIFFERENCES]['speed'][1:] == ['+30 (1)', '', '+30 (1)', '']
    assert found[SOONER]['p2'][1:] == ['≤ 15', '≤ 15 (1)', '≤ 0.5 (1)']
    assert found[SOONER]['speed'][1] == 'not reached'
    assert [found[END][name][1] for name in ('method', *methods)] == ['s', '30', '15', '20']
    assert 'trains for 30 (p2 15, speed 20) s of wall-clock' in text
    assert 'At 3 (p2 1, speed 2) equally spaced times' in text
    assert text.endswith('None.\n')


def test_one_time_of_two_lengths(tmp_path):
    """0.7 s are a third of 2.1 s, except for the last digit."""
    methods = {'uniform': METHODS['uniform'], 'p2': METHODS['p2']}
    config = to_dict(resolve(to_dict(Config().replace(**TINY))))
    seconds, counts = {'uniform': 2.1, 'p2': 0.7}, {'uniform': 3, 'p2': 1}
    spec = runner.Spec('c', config, methods, seconds, dict.fromkeys(methods, 1), counts)
    assert spec.milestones('uniform')[0] != spec.milestones('p2')[0]
    rows_of(tmp_path, 'uniform', 0, [60])
    rows_of(tmp_path, 'p2', 0, [40])
    assert tables_of(spec, tmp_path)[1][DIFFERENCES]['p2'] == ['Fréchet distance', '−20 (1)']


def test_rows_of_a_machine_without_the_repository(tmp_path):
    spec = spec_of(resolve(to_dict(Config())), {'uniform': {}}, 10.0, {'uniform': 1}, 1)
    rows_of(tmp_path, 'uniform', 0, [60], git=None)
    assert ', commit unknown; 5 samples' in tables_of(spec, tmp_path)[0]


def test_a_comparison_that_has_measured_nothing(tmp_path):
    spec = spec_of(resolve(to_dict(Config())), {'uniform': {}}, 10.0, {'uniform': 1}, 1)
    text, paths = flags_report.write(spec, tmp_path, {'uniform_seed0': 'crash: no'}, plot=True)
    assert [path.name for path in paths] == ['compare.csv', 'report.md']
    assert ' draws 500 samples. Nothing is measured yet.' in text
    assert '- all of `uniform`\n- failed: `uniform`, seed 0: crash: no\n' in text


def test_a_metric_that_is_not_measured_yet(tmp_path):
    """A command may be stopped between the rows of two metrics."""
    config = resolve(to_dict(Config().replace(**TINY, evaluation={'metrics': ('fid', 'recall')})))
    spec = spec_of(config, {'uniform': METHODS['uniform']}, 10.0, {'uniform': 1}, 1)
    rows_of(tmp_path, 'uniform', 0, [60])
    _, paths = flags_report.write(spec, tmp_path, {}, plot=True)
    assert (tmp_path / 'quality.png') in paths
    assert tables_of(spec, tmp_path)[1][END]['uniform'] == ['0', 'ddim', '', '100', '100.00']


def test_a_metric_without_a_distance(tmp_path):
    """Higher recalls are better; the Inception Score has no reference."""
    names = ('inception_score', 'recall')
    methods = {'uniform': METHODS['uniform'], 'p2': METHODS['p2'], 'speed': METHODS['speed']}
    config = resolve(to_dict(Config().replace(**TINY, evaluation={'metrics': names})))
    spec = spec_of(config, methods, 20.0, dict.fromkeys(methods, 2), 2)
    for name, reference in (('inception_score', None), ('recall', 'r')):
        for seed in (0, 1):
            changes = {'name': name, 'metric': name, 'reference': reference}
            rows_of(tmp_path, 'uniform', seed, [4, 5 + seed / 2], **changes)
            rows_of(tmp_path, 'p2', seed, [5, 7 + seed / 2], **changes)
            rows_of(tmp_path, 'speed', seed, [3, 4], **changes)
    text, found = tables_of(spec, tmp_path)
    assert found[TITLE]['p2'] == ['Inception Score', '5 ± 0 (2)', '7.25 ± 0.25 (2)']
    assert found[DIFFERENCES]['p2'][2] == '**+2 ± 0 (2), p 0**'
    assert found[DIFFERENCES]['speed'][1] == '−1 ± 0 (2), p 0'
    assert found[BEST]['uniform'][1] == 'p2: −1 ± 0 (2), p 0'
    assert found[SOONER]['p2'][1:3] == ['≤ 10, 12', '≤ 11 ± 1 (2)']
    assert found[SOONER]['speed'][1] == 'not reached, not reached'
    assert found[END]['method'][2] == 'recall'
    assert 'compared with r;' in text


@pytest.mark.parametrize(
    'field', ['features', 'reference', 'num_samples', 'sampler', 'evaluations']
)
def test_runs_that_were_measured_in_different_ways_do_not_compare(tmp_path, field):
    spec = spec_of(
        resolve(to_dict(Config())), {'uniform': {}, 'p2': {}}, 30.0, {'uniform': 1, 'p2': 1}, 1
    )
    rows_of(tmp_path, 'uniform', 0, [60])
    rows_of(tmp_path, 'p2', 0, [50])
    flags_report.collect(spec, tmp_path)
    path = tmp_path / 'runs' / 'p2_seed0' / worker.ROWS
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 7}) + '\n')
    with pytest.raises(
        UserError,
        match=rf'measured with different {field} do not compare: .* \(uniform_seed0\), 7 '
        r'\(p2_seed0\)',
    ):
        flags_report.collect(spec, tmp_path)
