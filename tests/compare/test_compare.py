"""`python -m jaxunet.compare`: runs of equal time in processes of their own."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from support.commands import Fork
from support.commands import call as run_command
from support.tiny import flags, tiny_config
from support.untrained_features import write_untrained

from jaxunet.compare import collected, flags_comparison, runner, step_cost
from jaxunet.compare.comparison_file import read_comparison
from jaxunet.compare.flags_comparison import STEP_COSTS, measure_step_costs
from jaxunet.compare.jobs import base_config
from jaxunet.compare.methods import Method, named_fields, parse_methods
from jaxunet.compare.step_times import COSTS
from jaxunet.config import to_dict
from jaxunet.runtime.no_device import NO_DEVICE
from jaxunet.training.logs import read_metrics

TINY = pathlib.Path(__file__).parents[2] / 'docs/results/methods/tiny.toml'
TIMES = (0.75, 1.5)


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
    made = {path.name for path in output.iterdir()}
    assert {flags_comparison.FILE, 'rows.jsonl', 'report.md', 'quality.png'} <= made
    rows = collected.read_rows([output / collected.ROWS])
    assert sorted((row['case'], row['seed'], row['seconds']) for row in rows) == [
        (*run, seconds)
        for run in (('same', 0), ('uniform', 0), ('uniform', 1))
        for seconds in TIMES
    ]
    for row in rows:
        assert row['features'].startswith('classifier-')
        assert row['values']['digits:'].keys() == {'fid', 'recall'}
        assert (row['num_samples'], row['sampler'], row['evaluations']) == (12, 'ddim:2', 2)
        assert row['references'] == {'digits:': 1797}
        assert 0 <= row['training_seconds'] - row['seconds'] < 3
    text = (output / 'report.md').read_text()
    assert text in out
    assert text.count('| uniform | Fréchet distance |') == 3
    assert '| uniform | 0, 1 |' in text
    assert 'Each run trains for the same time (training steps alone: ' in text
    assert 'Comparison file: [compare.toml](compare.toml). Seconds of training: 0.75, 1.5; ' in text
    assert f'cpu, jax {jax.__version__}, jaxlib ' in text
    assert '12 samples, batches of 8; features classifier-' in text
    failed = '- all of `broken`\n- failed: `broken`, seed 0: training stopped at step '
    assert failed in text
    assert 'loss or gradient that is not finite' in text
    shared = '2 runs at a time divided the cores of one CPU, so each did fewer steps in its seconds'
    assert f'note: this machine has no GPU. Note: {shared}' in out
    assert f'\n\nNote: {shared}' in text
    assert 'fid' not in text.split('\n', maxsplit=4)[4].lower()
    assert (output / 'quality.png').stat().st_size > 5000


def test_the_comparison_is_a_file(compared, features):
    """--file reads it, too; methods that are as they are known need no words."""
    output, _ = compared
    comparison = read_comparison(output / flags_comparison.FILE)
    assert comparison.cells == (('uniform', 0), ('same', 0), ('broken', 0), ('uniform', 1))
    assert comparison.own.keys() == {'same', 'broken'}
    assert comparison.own_seconds == {'broken': (30, 60)}
    first = comparison.jobs('', '')[0]
    assert first.load_config().model.base_channels == 8
    assert first.references == {'': ('digits:', ('fid', 'recall'))}


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
    losses = []
    for name in ('uniform_seed0', 'same_seed0', 'uniform_seed1'):
        (path,) = output.glob(f'[0-9]/logs/digits_{name}.csv')
        losses.append([row['loss'] for row in read_metrics(path)])
    count = min(map(len, losses))
    assert count > 3
    assert losses[0][:count] == losses[1][:count] != losses[2][:count]


def test_another_config_leaves_the_comparison_as_it_is(compared, features):
    """The report must go on to describe the runs that the folder holds."""
    output, _ = compared
    before = (output / flags_comparison.FILE).read_text()
    error = call(features, output, *ARGUMENTS, '--config.data.batch_size=16', code=2)
    assert '_seed0: holds a run with another config or other times; choose another' in error
    assert (output / flags_comparison.FILE).read_text() == before


@pytest.mark.long
def test_the_same_command_goes_on(compared, features):
    """Runs that are done are not repeated, and features must be those of before."""
    output, _ = compared
    before = collected.read_rows([output / collected.ROWS])
    out = call(features, output, *ARGUMENTS, code=1)
    assert out.count('is done already') == 6
    assert collected.read_rows([output / collected.ROWS]) == before
    assert '- failed: `broken`, seed 0: ' in call(features, output, '--plot_only')
    with np.load(features) as arrays:
        others = dict(arrays)
    try:
        np.savez(features, **others | {'last.kernel': 2 * others['last.kernel']})
        message = call(features, output, *ARGUMENTS, code=2)
    finally:
        np.savez(features, **others)
    assert f'{output}: was measured with features classifier-' in message
    assert 'choose another --output, or remove it' in message


def test_without_training_the_record_stays(compared):
    """Even of other methods, and without features; step costs, here of before, come into the
    report.
    """
    output, _ = compared
    names = (flags_comparison.FILE, flags_comparison.CONFIG, collected.ROWS)
    kept = {name: (output / name).read_text() for name in names}
    one = {'ms': 1.0, 'ratio': 1.0, 'quartiles': [1.0, 1.0]}
    costs = {
        'costs': {'uniform': one, 'p2': one},
        'rounds': 3,
        'steps': 4,
        'batch': 8,
        'device': 'd',
    }
    (output / COSTS).write_text(json.dumps(costs) + '\n')
    call('nothere.npz', output, '--methods=uniform,p2', '--notrain')
    assert {name: (output / name).read_text() for name in kept} == kept
    text = (output / 'report.md').read_text()
    assert '| uniform | 0, 1 |' in text
    assert '- failed: `broken`, seed 0: ' in text
    assert '| p2 | 1.00 | 1.000 (1.000 to 1.000) |' in text


@pytest.mark.parametrize('arguments', [['--plot_only'], ['--methods=uniform']])
def test_a_folder_of_an_earlier_version_is_refused(arguments, features, tmp_path):
    (tmp_path / 'compare.json').write_text('{}')
    error = call(features, tmp_path, *arguments, '--noplot', code=2)
    assert error.splitlines()[-1] == (
        f'error: --output: {tmp_path} holds a comparison of an earlier version (compare.json), '
        'which commit 5bac3eb9 reads; choose another --output'
    )
    assert 'compare.toml' not in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize('module', [runner.QUEUE, STEP_COSTS])
def test_the_processes_of_a_comparison_end_in_one_line(module, tmp_path):
    config = to_dict(tiny_config())
    (tmp_path / 'configs.json').write_text(json.dumps({'uniform': config}))
    todo = {
        runner.QUEUE: [f'--jobs={TINY}', f'--output={tmp_path}'],
        STEP_COSTS: [tmp_path / 'configs.json'],
    }[module]
    nothing = {'JAX_PLATFORMS': 'none'}
    error = run_command(module, *todo, code=NO_DEVICE, variables=nothing, fresh=True)
    assert error.splitlines()[-1].startswith('error: JAX found no device that it can use')
    assert 'error: ' in run_command(module, code=2)
    assert "'bogus'" in run_command(module, '--bogus', code=2)


def stated(config, methods, seconds, seeds, evaluations, note=''):
    return flags_comparison.FlagsComparison(
        config, parse_methods(methods), seconds, seeds, evaluations, 'c', note
    )


def test_what_flags_state(tmp_path):
    """One time is the same number whatever it is a part of: 0.7 s are a third of 2.1 s, except for
    the last digit.
    """
    config = base_config(
        tiny_config(
            data={'path': str(tmp_path / 'a "b".zip')},
            evaluation={
                'metrics': ('inception_score', 'recall'),
                'guidance_scale': 2.0,
                'skip_schedule': 'log_snr',
                'sampler': 'heun',
                'steps': 3,
            },
            model={'num_classes': 10},
        )
    )
    methods = [
        'uniform',
        'p2',
        'flow',
        'min_snr:loss.min_snr_gamma=4.0',
        'mine:optimizer.name=adam',
    ]
    names = [name.partition(':')[0] for name in methods]
    seconds = dict.fromkeys(names, 2.1) | {'p2': 0.7}
    counts = dict.fromkeys(names, 3) | {'p2': 1}
    seeds = dict.fromkeys(names, 1) | {'flow': 2}
    comparison = flags_comparison.write(
        stated(config, methods, seconds, seeds, counts, 'A note.'), tmp_path
    )
    assert comparison.cells == (*((name, 0) for name in names), ('flow', 1))
    assert [comparison.seconds_of(name) for name in ('uniform', 'p2')] == [(0.7, 1.4, 2.1), (0.7,)]
    assert comparison.own.keys() == {'p2', 'min_snr', 'mine'}
    assert comparison.fields_of('min_snr')['loss.min_snr_gamma'] == 4.0
    assert [metric.title for metric in comparison.distances] == ['Inception Score']
    assert comparison.template.options == {'guidance_scale': 2.0}
    job = next(job for job in comparison.jobs('', '') if job.case == 'flow')
    assert job.samplers == ('heun:3:log_snr',)
    assert job.references == {'': (config.data.path, ('inception_score', 'recall'))}
    assert job.load_config(devices=0) == base_config(
        parse_methods(['flow'])[0].apply(config).replace(train={'keep': 1})
    )
    again = flags_comparison.write(stated(config, methods, seconds, seeds, counts), tmp_path)
    assert again.note == 'A note.'


def test_methods_of_one_objective_have_its_sampler(tmp_path):
    config = base_config(tiny_config(evaluation={'steps': 0}))
    names = ['uniform', 'flow']
    one = dict.fromkeys(names, 1)
    comparison = flags_comparison.write(stated(config, names, one, one, one), tmp_path)
    assert comparison.samplers_of('uniform') == (f'ddim:{config.diffusion.steps}',)
    assert comparison.samplers_of('flow') == ('ddim:50',)


@pytest.mark.long
def test_step_costs_take_turns():
    configs = {
        name: Method(name, named_fields(name, '--methods')).apply(
            tiny_config(parallel={'devices': 1})
        )
        for name in ('uniform', 'policy')
    }
    configs['policy'] = configs['policy'].replace(timesteps={'policy_every': 3})
    rate = {'learning_rate': 0.1, 'schedule': 'linear'}
    configs['of another rate'] = configs['policy'].replace(optimizer=rate)
    assert step_cost.steps_of_a_turn([configs['uniform']], [1]) == 8
    found = step_cost.measure(configs, rounds=2)
    assert found['costs']['uniform']['ratio'] == 1
    assert found['costs']['policy']['ratio'] > 0
    assert found['costs']['of another rate'] == found['costs']['policy']
    assert (found['steps'], found['rounds']) == (9, 2)


def test_step_costs_of_a_comparison_that_began_with_an_unused_field(tmp_path):
    """The command has checked the fields; it is for want of images that this one fails."""
    config = tiny_config(timesteps={'adaptive_bins': 64}, data={'path': 'nowhere.zip'})
    one = {'uniform': 1}
    reason = measure_step_costs(stated(config, ['uniform'], one, one, one), tmp_path, '', 100)
    assert 'nowhere.zip: no such file' in reason
