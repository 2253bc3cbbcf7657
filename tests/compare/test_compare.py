"""`python -m jaxunet.compare`: runs of equal time in processes of their own."""

from __future__ import annotations

import csv
import json

import jax
import numpy as np
import pytest
from support.commands import Fork
from support.commands import call as run_command
from support.tiny import flags, tiny_config
from support.untrained_features import write_untrained

from jaxunet.compare import runner, step_cost, worker
from jaxunet.compare.methods import (
    METHODS,
    Method,
    named_fields,
)
from jaxunet.config import to_dict
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.no_device import NO_DEVICE
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
    f'--methods=uniform,same:loss.weighting=uniform,{BROKEN}',
    '--seeds=1,uniform=2',
    # Long enough for a slow machine to log four losses, and to diverge.
    '--seconds=1.5,broken=60',
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
        assert 0 <= float(row['training_seconds']) - 0.75 * (1 + int(row['milestone'])) < 3
    (failed,) = (row for row in rows if row['status'] == 'failed')
    assert failed['method'] == 'broken'
    assert 'loss or gradient that is not finite' in failed['reason']
    text = (output / 'report.md').read_text()
    assert text in out
    assert text.count('| uniform | Fréchet distance |') == 3
    assert '| uniform | 0, 1 |' in text
    protocol = (
        '12 samples by ddim with 2 evaluations of the network, compared with digits: '
        "(1797 images); recall: k=3; by the run's seed; "
    )
    assert f'{protocol}features classifier-' in text
    assert f'cpu, jax {jax.__version__}, jaxlib ' in text
    assert '- all of `broken`\n- failed: `broken`, seed 0: crash: ' in text
    shared = '2 runs at a time divided the cores of one CPU, so each did fewer steps in its seconds'
    assert f'note: this machine has no GPU: {shared}' in out
    assert f'Note: {shared}' in text
    assert 'fid' not in text.split('\n', maxsplit=4)[4].lower()
    assert (output / 'quality.png').stat().st_size > 5000


def test_flags_are_checked_before_features_are_read(tmp_path):
    """Features may be a download; a wrong flag must not wait for it."""
    for flag, message in (
        ('--seeds=0', '--seeds: expected COUNT'),
        ('--methods=uniform,x:timesteps.sampler=foo', '--methods x: the config is not valid: '),
    ):
        assert message in call('nothere.npz', tmp_path / 'out', flag, code=2)


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


def test_another_config_leaves_the_comparison_as_it_is(compared, features):
    """The report must go on to describe the runs that the folder holds."""
    output, _ = compared
    before = (output / runner.SPEC).read_text()
    error = call(features, output, *ARGUMENTS, '--config.data.batch_size=16', code=2)
    assert '_seed0: holds a run with another config or other times; choose another' in error
    assert (output / runner.SPEC).read_text() == before


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
    assert '- failed: `broken`, seed 0: ' in out
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
    text = (output / 'report.md').read_text()
    assert '| uniform | 0, 1 |' in text
    assert 'Turns: 3 of 4 steps each' in text
    assert '| p2 | 1.00 | 1.000 (1.000 to 1.000) |' in text


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


@pytest.mark.parametrize('module', [runner.WORKER, runner.STEP_COST])
def test_the_processes_of_a_comparison_end_in_one_line(module, tmp_path):
    config = to_dict(tiny_config())
    worker.save_task(worker.Task('uniform', 0, config, [1.0]), tmp_path)
    (tmp_path / 'configs.json').write_text(json.dumps({'uniform': config}))
    todo = {runner.WORKER: tmp_path, runner.STEP_COST: tmp_path / 'configs.json'}[module]
    nothing = {'JAX_PLATFORMS': 'none'}
    error = run_command(module, todo, code=NO_DEVICE, variables=nothing, fresh=True)
    assert error.splitlines()[-1].startswith('error: JAX found no device that it can use')
    assert run_command(module, code=2).startswith('error: expected ')
    assert "'bogus'" in run_command(module, '--bogus', code=2)


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
    methods = {name: METHODS[name] for name in ('uniform', 'p2')}
    seconds, evaluations = dict.fromkeys(methods, 30.0), dict.fromkeys(methods, 3)
    seeds = {'uniform': 2, 'p2': 1}
    spec = runner.Spec('c', to_dict(tiny_config()), methods, seconds, seeds, evaluations)
    runner.save(spec, tmp_path)
    new = runner.load(tmp_path)
    assert (new.seconds, new.seeds, new.evaluations) == (spec.seconds, spec.seeds, spec.evaluations)
    path = tmp_path / runner.SPEC
    path.write_text(json.dumps(json.loads(path.read_text()) | {'seconds': 30.0, 'evaluations': 3}))
    assert runner.load(tmp_path) == new
    older = json.loads(path.read_text())
    del older['processes']
    path.write_text(json.dumps(older))
    assert runner.load(tmp_path).processes == 1


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


def test_step_costs_of_a_comparison_that_began_with_an_unused_field(tmp_path):
    """The command has checked the fields; it is for want of images that this one fails."""
    config = tiny_config(timesteps={'adaptive_bins': 64}, data={'path': 'nowhere.zip'})
    config = config.replace(parallel={'devices': 1})
    methods = {'uniform': named_fields('uniform')}
    spec = runner.Spec('', to_dict(config), methods, {}, {}, {})
    reason = runner.measure_step_costs(spec, config, tmp_path, '', 100, lambda line: None)
    assert 'nowhere.zip: no such file' in reason


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
