"""`python -m jaxunet.compare`: methods, runs of equal time in processes of their own, and the
report.
"""

from __future__ import annotations

import csv
import json

import jax
import numpy as np
import pytest
from support.commands import Fork
from support.tiny import TINY, flags, tiny_config
from support.untrained_features import write_untrained

from jaxunet.compare import report, results, runner, step_cost, worker
from jaxunet.compare.methods import (
    METHODS,
    Method,
    named_fields,
    parse_counts,
    parse_methods,
    parse_seconds,
)
from jaxunet.compare.statistics import time_to
from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.samplers import evaluation_sampler
from jaxunet.runtime.errors import UserError
from jaxunet.training.logs import read_metrics


@pytest.fixture(scope='module')
def features(tmp_path_factory):
    return write_untrained(tmp_path_factory.mktemp('features'))


def call(features, output, *arguments, code=0):
    own = [
        '--config.evaluation.samples=12',
        '--config.evaluation.steps=2',
        "--config.evaluation.metrics=('fid','recall')",
    ]
    own += [
        f'--config.evaluation.features={features}',
        f'--output={output}',
        '--seconds=0.4',
        '--evaluations=2',
        '--config.parallel.devices=1',
    ]
    process = Fork(['jaxunet.compare', *flags(), *own, *arguments])
    out, error = process.communicate()
    assert process.returncode == code, out + error
    assert 'Traceback' not in error
    return out if code in (0, 1) else error


BROKEN = 'broken:optimizer.learning_rate=1e30+optimizer.clip_norm=0.0+optimizer.warmup_steps=0'
ARGUMENTS = [
    f'--methods=uniform,same:loss.p2_k=2.0,{BROKEN}',
    '--seeds=1,uniform=2',
    '--devices=0,1',
    '--config.train.max_bad_steps=3',
]


@pytest.fixture(scope='module')
def compared(features, tmp_path_factory):
    output = tmp_path_factory.mktemp('compare') / 'out'
    return output, call(features, output, *ARGUMENTS, code=1)


def test_a_comparison_from_end_to_end(compared):
    output, out = compared
    assert {'compare.csv', 'report.md', 'quality.png', 'runs'} <= {p.name for p in output.iterdir()}
    with (output / 'compare.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    fine = [row for row in rows if row['status'] == 'ok']
    expected = [('uniform', 0), ('uniform', 1), ('same', 0)]
    assert [
        (r['method'], int(r['seed']), int(r['milestone']), r['metric'].split('[')[0]) for r in fine
    ] == [
        (*run, milestone, metric)
        for run in expected
        for milestone in (0, 1)
        for metric in ('frechet_distance', 'recall')
    ]
    assert all(
        '[features=classifier-' in row['metric'] and row['num_samples'] == '12' for row in fine
    )
    for row in fine:
        assert 0 <= float(row['training_seconds']) - 0.2 * (1 + int(row['milestone'])) < 3
    (failed,) = (row for row in rows if row['status'] == 'failed')
    assert failed['method'] == 'broken'
    assert 'loss or gradient that is not finite' in failed['reason']
    text = (output / 'report.md').read_text()
    assert text in out
    assert '| uniform | 2 |' in text
    protocol = (
        '12 samples by ddim with 2 evaluations of the network, compared with digits: '
        "(1797 images); recall: k=3; by the run's seed; "
    )
    assert f'{protocol}features classifier-' in text
    assert f'Runs on cpu; jax {jax.__version__}; commit ' in text
    assert 'Failed: broken_seed0: crash' in text
    assert 'fid' not in text.split('\n', maxsplit=4)[4].lower()
    assert (output / 'quality.png').stat().st_size > 5000


def test_runs_of_a_seed_start_alike(compared):
    """They share weights, batches and noise: equal methods have equal losses, another seed has
    others.
    """
    output, _ = compared
    losses = [
        [row['loss'] for row in read_metrics(output / 'runs' / name / 'training' / 'metrics.csv')]
        for name in ('uniform_seed0', 'same_seed0', 'uniform_seed1')
    ]
    count = min(map(len, losses))
    assert count > 3
    assert losses[0][:count] == losses[1][:count] != losses[2][:count]


def test_milestones_are_measured_in_the_order_of_what_their_curve_would_miss():
    assert [worker.most_telling(n) for n in (1, 2, 4, 5)] == [
        [0],
        [1, 0],
        [3, 1, 0, 2],
        [4, 1, 2, 0, 3],
    ]


@pytest.mark.long
def test_the_same_command_goes_on(compared, features):
    """Weights that are kept are not trained again; rows that are kept are not measured again."""
    output, _ = compared
    before = {p: p.stat().st_mtime_ns for p in output.rglob('snapshots/*.npz')}
    assert len(before) == 6
    lost = output / 'runs' / 'same_seed0' / worker.ROWS
    rows = {(row['milestone'], row['name']): row for row in worker.finished(lost.parent)}
    lost.write_text(
        ''.join(json.dumps(row) + '\n' for row in rows.values() if row['milestone'] == 1)
    )
    out = call(features, output, *ARGUMENTS, code=1)
    assert '2 of 4 runs are done already' in out
    assert {p: p.stat().st_mtime_ns for p in before} == before
    again = {(row['milestone'], row['name']): row for row in worker.finished(lost.parent)}
    assert again.keys() == rows.keys()
    for key, row in again.items():
        assert row['value'] == pytest.approx(rows[key]['value'], rel=1e-3, abs=1e-3)
    out = call(features, output, '--plot_only')
    assert 'Failed: broken_seed0' in out
    assert 'holds a run with another config' in call(
        features, output, *ARGUMENTS, '--config.data.batch_size=16', code=2
    )
    # A file of the same name with other weights: told before anything is trained or measured with
    # it.
    with np.load(features) as arrays:
        others = dict(arrays)
    try:
        np.savez(features, **others | {'last.kernel': 2 * others['last.kernel']})
        message = call(features, output, *ARGUMENTS, code=2)
    finally:
        np.savez(features, **others)
    assert 'nothere: no such file' in call(
        features, output, *ARGUMENTS, '--config.evaluation.reference=nothere', code=2
    )
    assert 'uniform_seed0: was measured with features classifier-' in message
    assert 'choose another --output, or remove it' in message


def test_without_training_the_record_stays(compared):
    """Even of other methods, and without features; step costs, here of before, come into the
    report.
    """
    output, _ = compared
    kept = {name: (output / name).read_text() for name in (runner.SPEC, 'compare.csv')}
    failures = runner.load_failures(output)
    assert failures
    one = {'ms': 1.0, 'ratio': 1.0, 'quartiles': [1.0, 1.0]}
    costs = {
        'costs': {'uniform': one, 'p2': one},
        'rounds': 3,
        'steps': 4,
        'batch': 8,
        'device': 'd',
    }
    (output / runner.COSTS).write_text(json.dumps(costs) + '\n')
    call('nothere.npz', output, '--methods=uniform,p2', '--notrain', code=1)
    assert {name: (output / name).read_text() for name in kept} == kept
    assert runner.load_failures(output) == failures
    assert '| uniform | 2 |' in (output / 'report.md').read_text()
    assert 'Turns: 3 of 4 steps each' in (output / 'report.md').read_text()


def test_a_milestone_wants_a_row_of_every_metric(tmp_path):
    config = tiny_config(evaluation={'metrics': ('fid', 'recall')})
    task = worker.Task('uniform', 0, to_dict(config), [1.0, 2.0])
    (tmp_path / worker.ROWS).write_text(
        ''.join(
            json.dumps({'milestone': m, 'name': n}) + '\n'
            for m, n in ((0, 'fid'), (0, 'fid'), (1, 'fid'))
        )
    )
    assert worker.missing(task, tmp_path) == [0, 1]
    with (tmp_path / worker.ROWS).open('a') as file:
        file.write(json.dumps({'milestone': 1, 'name': 'recall'}) + '\n')
    assert worker.missing(task, tmp_path) == [0]


def test_all_methods_have_one_sampler():
    """Whatever their objectives: DDIM, or that of the config."""
    base = runner.base_config(Config())
    for method in parse_methods(['uniform', 'flow', 'v_cosine']):
        assert evaluation_sampler(method.apply(base)) == ('ddim', 50)
    given = tiny_config(evaluation={'sampler': 'heun', 'steps': 9})
    assert evaluation_sampler(runner.base_config(given)) == ('heun', 9)


def test_every_method_fits_every_config():
    for values in (to_dict(Config()), to_dict(tiny_config())):
        for method in parse_methods(list(METHODS)):
            applied = method.apply(resolve(values))
            assert {
                path: getattr(getattr(applied, path.split('.')[0]), path.split('.')[1])
                for path in method.fields
            } == method.fields
    assert parse_methods(['mine:timesteps.sampler=adaptive+timesteps.adaptive_bins=8']) == [
        Method(
            'mine',
            {
                'loss.weighting': 'uniform',
                'timesteps.sampler': 'adaptive',
                'timesteps.adaptive_bins': 8,
            },
        )
    ]


def test_methods_go_together():
    flow = {'diffusion.objective': 'flow', 'diffusion.schedule': 'linear'}
    (found, changed) = parse_methods(['flow+adaptive+min_snr', 'flow+muon:loss.weighting=p2'])
    assert found.fields == {**flow, 'loss.weighting': 'min_snr', 'timesteps.sampler': 'adaptive'}
    assert changed.fields == {
        **flow,
        'optimizer.name': 'muon',
        'loss.weighting': 'p2',
        'timesteps.sampler': 'uniform',
    }
    assert found.apply(Config()).diffusion.objective == 'flow'
    with pytest.raises(UserError, match=r'--methods edm\+policy: .*\n.* policy is defined by the'):
        parse_methods(['edm+policy'])[0].apply(Config())


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('min_snt', '\'min_snt\' is not one of uniform, .*did you mean "min_snr"'),
        ('a b:loss.p2_k=1.0', 'expected NAME, NAME.NAME or NAME:field=value'),
        ('p2:p2_k', "NAME:field=value.field=value, found 'p2_k'"),
        ('p2:loss.p2_q=1', r'--methods p2: loss\.p2_q: unknown field'),
        ('p2:loss.p2_k=x', r"--methods p2: loss\.p2_k: expected float, found 'x'"),
        ('p2:train.steps=5', r'train\.steps must be the same for all methods'),
        ('p2:seed=5', 'seed must be the same for all methods'),
        ('flow+', 'expected NAME, '),
        ('flow+muom', '\'muom\' is not one of uniform, .*did you mean "muon"'),
        (
            'min_snr+muon+p2',
            'min_snr and p2 do not go together: loss.weighting is min_snr in one and p2 in the',
        ),
    ],
)
def test_methods_that_are_none(text, message):
    with pytest.raises(UserError, match=message):
        parse_methods(['uniform', text])
    with pytest.raises(UserError, match='uniform is given twice'):
        parse_methods(['uniform', 'uniform'])
    with pytest.raises(
        UserError,
        match=r'--methods p2: the config is not valid:\n.*loss\.p2_k: expected more than 0',
    ):
        Method('p2', {'loss.p2_k': -1.0}).apply(Config())


def test_numbers_by_method():
    assert parse_counts('--seeds', ['b=3'], ['a', 'b'], 1) == {'a': 1, 'b': 3}
    assert parse_counts('--seeds', ['2', 'b=3'], ['a', 'b'], 1) == {'a': 2, 'b': 3}
    assert parse_seconds('--seconds', ['b=0.5'], ['a', 'b'], 300) == {'a': 300, 'b': 0.5}
    assert parse_counts('--seeds', ['b=3', '2'], ['a', 'b'], 1) == {'a': 2, 'b': 3}
    for twice, where in ((['2', '3'], 'all methods, 2 and 3'), (['b=2', '1', 'b=4'], 'b, 2 and 4')):
        with pytest.raises(UserError, match=f'--seeds: there are two numbers for {where}'):
            parse_counts('--seeds', twice, ['a', 'b'], 1)
    for wrong in ('0', 'c=1', 'b=', 'x', '1.5'):
        with pytest.raises(UserError, match='--seeds: expected COUNT or NAME=COUNT'):
            parse_counts('--seeds', [wrong], ['a', 'b'], 1)
    for wrong in ('0', 'c=1', 'b=', 'x', '-1', 'nan', 'inf'):
        with pytest.raises(UserError, match='--seconds: expected SECONDS or NAME=SECONDS'):
            parse_seconds('--seconds', [wrong], ['a', 'b'], 1.0)


def spec_of(config, methods, seconds, seeds, evaluations):
    return runner.Spec(
        'c',
        to_dict(config),
        methods,
        dict.fromkeys(methods, seconds),
        seeds,
        dict.fromkeys(methods, evaluations),
    )


def test_long_runs_go_first():
    names = ['uniform', 'p2', 'speed', 'policy']
    spec = runner.Spec(
        'c',
        {},
        {name: named_fields(name) for name in names},
        seconds={'uniform': 30.0, 'p2': 15.0, 'speed': 30.0, 'policy': 15.0},
        seeds={'uniform': 2, 'p2': 1, 'speed': 1, 'policy': 2},
        evaluations={'uniform': 3, 'p2': 1, 'speed': 2, 'policy': 1},
    )
    found = [(task.folder, task.seconds) for task in runner.tasks(spec, tiny_config())]
    assert found == [
        ('uniform_seed0', [10, 20, 30]),
        ('speed_seed0', [15, 30]),
        ('uniform_seed1', [10, 20, 30]),
        ('p2_seed0', [15]),
        ('policy_seed0', [15]),
        ('policy_seed1', [15]),
    ]


def test_a_comparison_of_before_numbers_were_by_method(tmp_path):
    spec = spec_of(
        tiny_config(),
        {'uniform': METHODS['uniform'], 'p2': METHODS['p2']},
        30.0,
        {'uniform': 2, 'p2': 1},
        3,
    )
    runner.save(spec, tmp_path)
    new = runner.load(tmp_path)
    assert (new.seconds, new.seeds, new.evaluations) == (spec.seconds, spec.seeds, spec.evaluations)
    path = tmp_path / runner.SPEC
    path.write_text(json.dumps(json.loads(path.read_text()) | {'seconds': 30.0, 'evaluations': 3}))
    assert runner.load(tmp_path) == new


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


@pytest.mark.long
def test_step_costs_take_turns():
    configs = {
        name: Method(name, named_fields(name)).apply(tiny_config(parallel={'devices': 1}))
        for name in ('uniform', 'policy')
    }
    configs['policy'] = configs['policy'].replace(timesteps={'policy_every': 3})
    assert step_cost.steps_of_a_turn([configs['uniform']], [1]) == 8
    found = step_cost.measure(configs, rounds=2)
    assert found['costs']['uniform']['ratio'] == 1
    assert found['costs']['policy']['ratio'] > 0
    assert (found['steps'], found['rounds']) == (9, 2)


def test_snapshots_come_back(tmp_path):
    params = {'a': np.arange(3.0, dtype=np.float32), 'b': {'c': np.ones((2, 2), np.float32)}}
    worker.save_snapshot(tmp_path / 's' / '0.npz', params, 7, 1.5)
    found, step, seconds = worker.load_snapshot(tmp_path / 's' / '0.npz', params)
    assert (step, seconds) == (7, 1.5)
    np.testing.assert_array_equal(found['b']['c'], params['b']['c'])
    with pytest.raises(UserError, match='weights of another model'):
        worker.load_snapshot(
            tmp_path / 's' / '0.npz', {'a': np.zeros(4), 'b': {'c': np.ones((2, 2))}}
        )
