"""Fields that have no effect with the chosen timestep sampler, on command lines."""

import json
import pathlib
import shutil

import pytest
from support.commands import call, call_each
from support.tiny import flags

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
    command = ['jaxunet.train', '--dry_run', f'--workdir={tmp_path / "run"}', UNUSED]
    ((code, out, errors),) = call_each([command], tmp_path)
    assert code == 0
    assert "'adaptive_bins': 64" in out
    assert f'{MESSAGE}uniform' in errors
