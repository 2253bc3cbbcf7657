"""Fields that have no effect with the chosen timestep sampler, on command lines."""

import json
import pathlib
import shutil

import pytest
from support.commands import call, call_each
from support.tiny import flags, tiny_config

from jaxunet.config import to_dict

ROOT = pathlib.Path(__file__).parents[2]
SAVED = pathlib.Path(__file__).parents[1] / 'fixtures' / 'e54d28d' / 'half'
UNUSED = '--config.timesteps.adaptive_bins=64'
CLASSIFIER = (
    '--config.model.base_channels=64',
    '--config.model.norm_groups=32',
    '--config.model.num_head_channels=64',
    '--config.model.num_classes=10',
)
MESSAGE = (
    'timesteps.adaptive_bins: 64 has no effect: it belongs to timesteps.sampler=adaptive, found '
)


@pytest.mark.parametrize(
    'arguments',
    [
        ['jaxunet.train', '--dry_run'],
        ['jaxunet.training.train_classifier', '--workdir=w', *flags(), *CLASSIFIER],
        ['jaxunet.profile'],
        ['jaxunet.benchmark', '--dry_run'],
        ['jaxunet.sweep', '--vary=precision=float32,bfloat16', '--output=o'],
        ['jaxunet.sweep', '--vary=timesteps.sampler=uniform,policy', '--output=o'],
        ['jaxunet.compare', '--methods=uniform,policy', '--output=o', '--noplot'],
    ],
    ids=lambda arguments: ' '.join(arguments[:2]),
)
def test_commands_refuse_them(arguments, tmp_path):
    ((code, _, errors),) = call_each([[*arguments, UNUSED]], tmp_path)
    assert code == 2
    assert MESSAGE in errors
    assert not list((tmp_path / '0').iterdir())


JOBS = f"""
from jaxunet.compare.jobs import TINY, Job

def get_jobs(part, data):
    fields = {{**TINY, 'timesteps.adaptive_bins': 64}}
    return [Job('mine', 'digits', '{ROOT}/configs/digits.py', fields, (1,), ('ddim:2',))]
"""


@pytest.mark.parametrize('begun', [False, True])
def test_a_queue_of_jobs(begun, tmp_path):
    """A queue that began with them goes on: here to its limit, which leaves its job out."""
    jobs, output = tmp_path / 'jobs.py', tmp_path / 'output'
    jobs.write_text(JOBS)
    command = ['jaxunet.compare.queue', f'--jobs={jobs}', f'--output={output}', '--limit=1']
    if begun:
        output.mkdir()
    ((code, out, errors),) = call_each([command], tmp_path)
    assert code == (1 if begun else 2)
    assert f'{MESSAGE}uniform' in errors
    assert ('digits_mine_seed0: left out' in out) == begun
    if not begun:
        assert f'error: {jobs}: the config is not valid: timesteps.adaptive_bins' in errors
        assert not output.exists()


@pytest.mark.parametrize('kind', ['json', 'py'])
@pytest.mark.parametrize('begun', [False, True])
def test_step_costs(kind, begun, tmp_path):
    """With --begun it gets to its images, which are not there."""
    path, nowhere = tmp_path / f'configs.{kind}', tmp_path / 'nowhere.zip'
    config = tiny_config(timesteps={'adaptive_bins': 64}, data={'path': str(nowhere)})
    fields = f"'data.path': '{nowhere}', **TINY"
    text = {'json': json.dumps({'mine': to_dict(config)}), 'py': JOBS.replace('**TINY', fields)}
    path.write_text(text[kind])
    command = ['jaxunet.compare.step_cost', path, *['--begun'] * begun]
    ((code, _, errors),) = call_each([command], tmp_path)
    assert code == 2
    assert f'{MESSAGE}uniform' in errors
    assert ('nowhere.zip: no such file' in errors) == begun
    assert (f'error: {path}: ' in errors) != begun


def test_a_method_of_a_comparison_with_a_field_of_another(tmp_path):
    methods = '--methods=adaptive,mine:timesteps.sampler=policy+timesteps.adaptive_bins=64'
    errors = call('jaxunet.compare', methods, f'--output={tmp_path}/o', '--noplot', code=2)
    assert f'{MESSAGE}policy' in errors


def test_a_run_that_began_with_them_goes_on(tmp_path):
    shutil.copytree(SAVED, tmp_path / 'run')
    meta = tmp_path / 'run' / 'checkpoints' / '24' / 'meta' / 'metadata'
    saved = json.loads(meta.read_text())
    saved['config']['timesteps']['adaptive_bins'] = 64
    meta.write_text(json.dumps(saved))
    own = tmp_path / 'own.py'
    own.write_text(
        'from ml_collections import ConfigDict\nfrom jaxunet.config import resolve, to_dict\n'
        f'def get_config():\n    return ConfigDict(to_dict(resolve({saved["config"]})))\n'
    )
    command = ['jaxunet.train', '--dry_run', f'--workdir={tmp_path / "run"}', f'--config={own}']
    ((code, out, errors),) = call_each([command], tmp_path)
    assert code == 0
    assert "'adaptive_bins': 64" in out
    assert f'{MESSAGE}loss_second_moment' in errors
