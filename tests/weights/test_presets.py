"""Published models by name: a preset is what the flags in its program's README say."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.commands import call
from support.published import (
    CHANNEL_MULT,
    CIFAR10_DEFAULTS,
    CIFAR10_RUN,
    DDPM_TORCH,
    FLAGS,
    GUIDED,
    IMPROVED,
    README,
    digest,
    parsed,
)
from support.weight_cases import make, random_params, same, torch_bytes

from configs.cifar10 import get_config
from jaxunet.checkpoint.optimizer import learning_rate_schedule
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import resolve
from jaxunet.diffusion.process import make_betas
from jaxunet.training.ema import ema_decay
from jaxunet.weights import ddpm_torch, guided_diffusion, read_weights
from jaxunet.weights.presets import PRESETS, preset_of
from jaxunet.weights.torch_file import TorchFile

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = np.load(ROOT / 'tests' / 'fixtures' / 'peers_golden.npz')
CONDITIONAL = np.load(ROOT / 'tests' / 'fixtures' / 'conditional_golden.npz')
GUIDED_SMALL = make((16,), num_heads=2, num_head_channels=0)


def test_every_preset_has_its_source() -> None:
    edm = {name for name in PRESETS if name.startswith('edm_')}  # tests/weights/test_edm.py
    assert set(PRESETS) - edm == set(README) | set(DDPM_TORCH)
    files = [name for preset in PRESETS.values() for name in preset.files]
    assert len(set(files)) == len(files)
    assert preset_of('64x64_diffusion.pt') == 'adm_imagenet64'
    assert preset_of('ema_0.9999_200000.pt') is None


@pytest.mark.parametrize('name', README)
def test_a_preset_has_the_flags_of_its_readme(name: str) -> None:
    preset = PRESETS[name]
    config = preset.config()
    d, order = config.diffusion, bool(preset.new_attention_order)
    ours = parsed(guided_diffusion.flags(config, new_attention_order=order))
    # Our flags leave out the other kind of heads, and training.
    heads = {'num_heads': '4', 'num_heads_upsample': '-1', 'num_head_channels': '-1'}
    ours = heads | ours | {'dropout': str(config.model.dropout), 'use_kl': str(d.kl_loss)}
    defaults = IMPROVED if name.startswith('iddpm') else GUIDED
    expected = defaults | parsed(README[name])
    rescaled = expected.pop('rescale_learned_sigmas') == 'True'
    if d.steps != 1000:  # at 1000 both are the same
        assert d.vlb_weight == (1e-3 if rescaled else 1 / d.steps)
    if 'large_size' in expected:  # these scripts have neither flag
        del expected['use_new_attention_order']
        assert config.model.channel_mult == (1, 1, 2, 2, 4, 4)
    elif 'channel_mult' in ours:  # fractions have no flag and follow from the size
        expected['channel_mult'] = CHANNEL_MULT[expected['image_size']]
    else:
        assert config.model.channel_mult == (0.5, 1, 1, 2, 2, 4, 4)
    assert ours == expected


def test_the_docs_have_every_flag() -> None:
    text = (ROOT / 'docs' / 'weights.md').read_text()
    table = text[text.index('| flag of guided-diffusion') :].split('\n\n')[0]
    named = {
        name
        for row in table.splitlines()
        for words in re.findall(r'`([^`]*)`', row.split('|')[1])
        for name in re.findall(r'\w+', words)
    }
    missing = {
        name for name in FLAGS.split() if not {name, name.removeprefix('classifier_')} & named
    }
    assert not missing


@pytest.mark.parametrize('name', DDPM_TORCH)
def test_a_preset_has_the_config_of_ddpm_torch(name: str) -> None:
    config = PRESETS[name].config()
    m = config.model
    found = (m.base_channels, m.channel_mult, config.attention_levels, m.dropout)
    assert (*found, config.data.image_size[0]) == DDPM_TORCH[name]
    process = (config.diffusion.schedule, config.diffusion.steps)
    assert (m.num_res_blocks, *process) == (2, 'linear', 1000)


@pytest.mark.parametrize(
    ('name', 'table'),
    [('iddpm_cifar10_cosine', guided_diffusion.table), ('ddpm_torch_cifar10', ddpm_torch.table)],
)
def test_a_preset_has_the_tensors_of_its_program(name: str, table: Any) -> None:
    """Names and shapes are those of the program's own network, at full size."""
    entries = table(PRESETS[name].config())
    assert digest({entry.name: entry.shape for entry in entries}) == GOLDEN[f'published_{name}']


@pytest.mark.long
@pytest.mark.parametrize(
    'name', ['adm_upsample_64_256', 'adm_upsample_128_512', 'iddpm_upsample_64_256']
)
def test_an_upsampler_has_the_tensors_of_its_program(name: str) -> None:
    entries = guided_diffusion.table(PRESETS[name].config())
    assert (
        digest({entry.name: entry.shape for entry in entries}) == CONDITIONAL[f'published_{name}']
    )


def test_the_cifar10_run_is_that_of_ddpm_torch() -> None:
    """configs/cifar10.json of ddpm-torch, and its train.py."""
    config, theirs = resolve(get_config()), CIFAR10_RUN
    m, o = config.model, config.optimizer
    assert m == PRESETS['ddpm_torch_cifar10'].config().model
    assert {
        'in_channels': m.image_channels,
        'hid_channels': m.base_channels,
        'ch_multipliers': list(m.channel_mult),
        'num_res_blocks': m.num_res_blocks,
        'apply_attn': [level in config.attention_levels for level in range(4)],
        'drop_rate': m.dropout,
    } == theirs['model']

    process, loss = config.diffusion, theirs['diffusion']
    betas = make_betas(process.schedule, process.steps)
    np.testing.assert_allclose(
        betas, np.linspace(loss['beta_start'], loss['beta_end'], loss['timesteps']), rtol=1e-12
    )
    assert (process.objective, loss['model_mean_type']) == ('epsilon', 'eps')
    assert (process.kl_loss, process.learn_sigma, loss['loss_type']) == (False, False, 'mse')
    assert (config.loss.weighting, config.timesteps.sampler) == ('uniform', 'uniform')

    train = theirs['train'] | CIFAR10_DEFAULTS
    assert {
        'lr': o.learning_rate,
        'batch_size': config.data.batch_size,
        'grad_norm': o.clip_norm,
        'warmup': o.warmup_steps,
        'use_ema': True,
        'ema_decay': config.ema.rates[0],
        'beta1': o.betas[0],
        'beta2': o.betas[1],
        'num_accum': o.accumulate_steps,
        'epochs': train['epochs'],
    } == train
    # Its loader leaves out the last batch of an epoch, which is not full.
    assert config.train.steps == train['epochs'] * (50_000 // train['batch_size']) == 795_600
    assert config.train.epochs == 0
    # The defaults of torch.optim.Adam; the rate is constant after the warm-up.
    assert (o.schedule, o.eps, o.weight_decay) == ('constant', 1e-8, 0)
    rates = learning_rate_schedule(config)
    for n in (0, 1, 4998, 4999, 5000, 700_000):
        expected = train['lr'] * min((n + 1) / train['warmup'], 1.0)
        np.testing.assert_allclose(rates(jnp.int32(n)), expected, rtol=1e-3)
    for n in (0, 1, 1000, 10**6):  # as its EMA.update
        expected = min(train['ema_decay'], (1 + n) / (10 + n))
        found = ema_decay(config.ema.rates[0], jnp.int32(n), config.ema.warmup)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert config.data.augment == 'flip'
    assert (config.data.path, config.data.holdout) == ('cifar10:', 0)


# --- the commands


@pytest.fixture(scope='module')
def guided(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A file of guided-diffusion, in the new order."""
    path = tmp_path_factory.mktemp('guided') / 'a.pt'
    state = guided_diffusion.from_tree(
        random_params(GUIDED_SMALL), GUIDED_SMALL, new_attention_order=True
    )
    path.write_bytes(torch_bytes(state))
    return path


def export(source: pathlib.Path, output: pathlib.Path, *flags: str) -> str:
    return call('jaxunet.export', f'--checkpoint={source}', f'--output={output}', *flags)


def test_export_keeps_the_order_of_a_file(guided: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Flags state it in place of a config; the written files state all."""
    path, params = tmp_path / 'b.pt', random_params(GUIDED_SMALL)
    stated = ('--num_heads=2', '--image_size=16', '--schedule=linear', '--diffusion_steps=4000')
    stated += ('--rescale_timesteps', '--objective=epsilon', '--new_attention_order')
    out = export(guided, path, *stated)
    assert f'{path} (' in out
    assert 'guided-diffusion reads it with --image_size 16 ' in out
    assert '--use_new_attention_order True' in out
    assert '--rescale_timesteps True' in out
    weights = read_weights(path)
    assert weights.new_attention_order
    assert weights.config.diffusion.time_scale == 0.25
    same(weights.params, params)
    with (
        open(path, 'rb') as a,
        open(guided, 'rb') as b,
        TorchFile('b.pt', a) as ours,
        TorchFile('a.pt', b) as theirs,
    ):
        for name in theirs.shapes:
            np.testing.assert_array_equal(ours.read(name), theirs.read(name))


def test_fresh_weights(tmp_path: pathlib.Path) -> None:
    """--init of a config, as unet.cu's --init_model_only."""
    flags = [f'--config={ROOT / "configs" / "digits.py"}', *tiny.flags()]
    path = tmp_path / 'a.safetensors'
    out = call('jaxunet.export', '--init', f'--output={path}', *flags, '--config.seed=3')
    assert out.startswith('fresh weights of seed 3 -> ')
    weights = read_weights(path)
    assert weights.config.seed == 3
    same(weights.params, fresh_state(weights.config).params)
    chosen = [f'--config={ROOT / "configs" / "images.py"}', '--config.data.path=digits:']
    call('jaxunet.export', '--init', f'--output={path}', *chosen)
    assert read_weights(path).config.image_shape == (8, 8, 1)
