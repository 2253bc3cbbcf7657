"""Weights of other programs: networks, samples and losses are those of their own code.

`fixtures/peers_golden.npz` holds what that code computed, on weights of a formula; the files here
are made of the same weights.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peers_golden import SIDE, STEPS, T
from support.peer_values import FIXTURES, LINEAR, QUICK, close, pictures, state_of
from support.weight_cases import NETWORK, UNETCU_SMALL, random_params, same, torch_bytes

from jaxunet.checkpoint.load import load_initial
from jaxunet.config import Config, resolve, to_dict
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import make_diffusion, q_sample
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import State, make_sampler, run, sample_keys
from jaxunet.weights import guided_diffusion, read_weights, unetcu, write_weights
from jaxunet.weights.fields import diffusion_fields, network_fields
from jaxunet.weights.names import from_tree
from jaxunet.weights.torch_file import TorchFile

GOLDEN = np.load(FIXTURES / 'peers_golden.npz')
COSINE = LINEAR | {'schedule': 'cosine', 'diffusion_steps': STEPS, 'num_heads': 2}
ADM = NETWORK | {'scale_shift_norm': True}


def config(model: dict[str, Any], **diffusion: Any) -> Config:
    return Config().replace(model=ADM | model, diffusion=diffusion, data={'image_size': (SIDE,)})


GUIDED = config({'num_head_channels': 16, 'resblock_updown': True})
IMPROVED = config(
    {'num_heads': 2, 'num_head_channels': 0, 'conv_resample': True},
    learn_sigma=True,
    steps=STEPS,
    schedule='cosine',
    rescale_timesteps=True,
)


def nhwc(name: str) -> np.ndarray:
    return GOLDEN[name].transpose(0, 2, 3, 1)


@functools.cache
def network(model: Config) -> Any:
    return jax.jit(build_unet(model, XLA).predict, compiler_options=QUICK)


def output(weights: Any, t: tuple[int, ...] = T) -> np.ndarray:
    return np.asarray(network(weights.config)(weights.params, pictures(0.37), jnp.array(t)))


@pytest.mark.parametrize('order', ['legacy', 'new'])
def test_guided_diffusion(file: Any, order: str) -> None:
    """Both orders of qkv's rows; written again, a file has the order that it had."""
    path, new = file(state_of(guided_diffusion.table(GUIDED))), order == 'new'
    weights = read_weights(path, new_attention_order=new, num_head_channels=16, **LINEAR)
    assert weights.new_attention_order is new
    close(output(weights), nhwc(f'guided_{order}'))


def test_an_unstated_order_is_asked_for(file: Any) -> None:
    path = file(state_of(guided_diffusion.table(GUIDED)))
    with pytest.raises(UserError, match=r'--new_attention_order or --nonew_attention_order$'):
        read_weights(path, num_head_channels=16, **LINEAR)
    with pytest.raises(UserError, match=r'does not state the order .* --nonew_attention_order$'):
        read_weights(path, GUIDED)
    run = GUIDED.replace(init_from=str(path))
    with pytest.raises(UserError, match=r'does not state the order .* set init_from_order=new or'):
        load_initial(run)
    with pytest.raises(UserError, match=r'init_from_order: .* has one order'):
        load_initial(run.replace(init_from='model.bin', init_from_order='new'))
    # With one head both orders are the same.
    one = read_weights(path, num_heads=1, **LINEAR)
    assert one.new_attention_order is None


def test_what_a_file_leaves_open_is_asked_for(file: Any) -> None:
    """The error is one line, with the published name if the file has one."""
    path = file(state_of(guided_diffusion.table(GUIDED)), '64x64_diffusion.pt')
    with pytest.raises(UserError) as error:
        read_weights(path)
    assert str(error.value) == (
        f'{path}: a file of guided-diffusion does not say all about its model, and a guess could '
        'give wrong pictures: give --preset=adm_imagenet64, --config, or --num_heads or '
        '--num_head_channels, --image_size, --schedule, --diffusion_steps, --objective, '
        '--rescale_timesteps or --norescale_timesteps (unless --diffusion_steps=1000), '
        '--new_attention_order or --nonew_attention_order'
    )
    stated = LINEAR | {'num_heads': 2, 'diffusion_steps': 4000}
    with pytest.raises(UserError, match='--config, or --rescale_timesteps or --norescale_times'):
        read_weights(path, new_attention_order=False, **stated)


@pytest.mark.parametrize('doubled', ['conv_in', 'variance'])
def test_super_resolution_is_not_taken_for_a_plain_network(file: Any, doubled: str) -> None:
    model = GUIDED if doubled == 'conv_in' else IMPROVED
    state = state_of(guided_diffusion.table(model))
    state['input_blocks.0.0.weight'] = np.ones((32, 6, 3, 3), np.float32)
    path = file(state)
    for options in ({'config': model}, {'like': model}):
        with pytest.raises(UserError, match='is a super-resolution network: its first') as error:
            read_weights(path, new_attention_order=False, **options)
        assert '\n' not in str(error.value)
    with pytest.raises(UserError, match=r'give --preset .*, --config, or --low_res_size$'):
        read_weights(path, new_attention_order=False, num_heads=2, **LINEAR)


def test_six_image_channels_are_read_with_a_config(file: Any) -> None:
    six = GUIDED.replace(model={'image_channels': 6})
    path = file(state_of(guided_diffusion.table(six)))
    assert read_weights(path, six, new_attention_order=False).config == six
    with pytest.raises(UserError, match=r'--config, or --low_res_size$'):
        read_weights(path, new_attention_order=False, num_heads=2, **LINEAR)


# --- improved-diffusion: T = 4000, rescaled


@pytest.fixture(scope='module')
def improved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp('improved') / 'a.pt'
    path.write_bytes(torch_bytes(state_of(guided_diffusion.table(IMPROVED))))
    return {
        rescale: read_weights(path, new_attention_order=False, rescale_timesteps=rescale, **COSINE)
        for rescale in (False, True)
    }


def test_rescaled_timesteps(improved: Any) -> None:
    assert improved[True].config.diffusion == IMPROVED.diffusion
    steps = tuple(4 * t for t in T)
    close(output(improved[True], steps), nhwc('improved_output'))
    # The plain network at a real time is the same.
    np.testing.assert_array_equal(output(improved[False]), output(improved[True], steps))


def test_samples_of_rescaled_timesteps(improved: Any) -> None:
    """Timesteps left out by respacing are rescaled by the T of training."""
    weights = improved[True]
    sampler = make_sampler(
        SamplerConfig(name='ddim', respacing='ddim8'), make_diffusion(weights.config.diffusion)
    )
    predict, keys = build_unet(weights.config, XLA).predict, sample_keys(0, [0, 1])

    def draw(params: Any, x: jax.Array) -> jax.Array:
        return run(functools.partial(predict, params), State(x), keys, sampler).x

    found = np.asarray(jax.jit(draw, compiler_options=QUICK)(weights.params, pictures(0.53)))
    close(found, nhwc('improved_rescaled_ddim8'), 1e-4)
    assert np.abs(found - nhwc('improved_plain_ddim8')).max() > 0.01


@pytest.mark.parametrize(
    ('kind', 'fields'),
    [('mse', {'vlb_weight': 1 / STEPS}), ('rescaled_mse', {}), ('kl', {'kl_loss': True})],
)
def test_losses(improved: Any, kind: str, fields: dict[str, Any]) -> None:
    weights = improved[True]
    diffusion = make_diffusion(IMPROVED.replace(diffusion=fields).diffusion)
    x0, noise, t = pictures(0.37), pictures(0.71), 4 * jnp.array(T)
    xt = q_sample(diffusion, x0, t, noise)
    predicted = network(weights.config)(weights.params, xt, t)
    found = per_sample_loss(diffusion, predicted, x0, xt, t, noise)
    np.testing.assert_allclose(found, GOLDEN[f'improved_{kind}'], rtol=1e-5)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'objective': 'edm', 'kl_loss': True}, 'diffusion.kl_loss: needs the timesteps of eps'),
        ({'objective': 'flow', 'rescale_timesteps': True}, 'diffusion.rescale_timesteps: flow has'),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(to_dict(Config().replace(diffusion=fields)))


def test_a_bin_cannot_say_that_timesteps_are_rescaled(tmp_path: pathlib.Path) -> None:
    config = UNETCU_SMALL.replace(diffusion={'steps': 500, 'rescale_timesteps': True})
    with pytest.raises(
        UserError, match=r'diffusion\.rescale_timesteps: expected False, found True'
    ):
        write_weights(tmp_path / 'a.bin', {}, config)


# --- unet.cu


def unetcu_state() -> dict[str, np.ndarray]:
    """The weights of a .bin, under the names that unet.cu's own code gives them."""
    names = json.loads((FIXTURES / 'unetcu_parameters.json').read_text())
    table = unetcu.table(UNETCU_SMALL)
    assert [entry.name for entry in table] == [name for name, _ in names]
    return from_tree(random_params(UNETCU_SMALL), table)


def test_unetcu(file: Any, tmp_path: pathlib.Path) -> None:
    """Its PyTorch network's file, plain and compiled, is the .bin's network."""
    state = unetcu_state()
    compiled = file({f'_orig_mod.{name}': value for name, value in state.items()}, 'compiled.pt')
    write_weights(tmp_path / 'a.bin', random_params(UNETCU_SMALL), UNETCU_SMALL)
    expected = read_weights(tmp_path / 'a.bin')
    for path in (file(state), compiled):
        weights = read_weights(path, image_size=(16,))
        assert network_fields(weights.config) == network_fields(expected.config)
        assert diffusion_fields(weights.config) == diffusion_fields(expected.config)
        same(weights.params, expected.params)
        assert 'unet.cu names' in weights.note
    assert read_weights(compiled).config.image_shape == (64, 64, 3)  # a constant of its code


def test_unetcu_is_written(tmp_path: pathlib.Path) -> None:
    params = random_params(UNETCU_SMALL)
    write_weights(tmp_path / 'a.pt', params, UNETCU_SMALL, program='unet.cu')
    with open(tmp_path / 'a.pt', 'rb') as file, TorchFile('a.pt', file) as state:
        expected = unetcu_state()
        assert list(state.shapes) == list(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(state.read(name), value)
    again = read_weights(tmp_path / 'a.pt')
    assert again.config == UNETCU_SMALL
    same(again.params, params)
    for name, options, message in (
        ('b.pt', {'new_attention_order': True}, 'unet.cu has one order only'),
        ('b.safetensors', {}, 'only a .pt has the names of a program'),
    ):
        with pytest.raises(UserError, match=message):
            write_weights(tmp_path / name, params, UNETCU_SMALL, program='unet.cu', **options)
    with pytest.raises(UserError, match=r'(?s)unet\.cu has no such model.*num_res_blocks'):
        write_weights(tmp_path / 'b.pt', {}, GUIDED, program='unet.cu')


# --- what wrappers and trainers add


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', '_orig_mod.module.'])
def test_prefixes_are_taken_off(file: Any, prefix: str) -> None:
    state = state_of(guided_diffusion.table(GUIDED))
    options = {'config': GUIDED, 'new_attention_order': False}
    plain = read_weights(file(state), **options)
    wrapped = {prefix + name: value for name, value in state.items()}
    inner = 'middle_block.0._orig_mod.in_layers.0.weight'
    wrapped[prefix + inner] = wrapped.pop(prefix + inner.replace('._orig_mod', ''))
    found = read_weights(file(wrapped), **options)
    same(found.params, plain.params)
    with pytest.raises(UserError, match=r'are both out\.2\.bias without the prefixes'):
        read_weights(file(wrapped | {'out.2.bias': state['out.2.bias']}), **options)
