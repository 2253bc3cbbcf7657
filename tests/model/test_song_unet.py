"""The options of DDPM++ and NCSN++. `tests/weights/test_edm.py` compares them with NVlabs' code."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.peer_values import QUICK
from support.tiny import tiny_config
from support.weight_cases import random_params

from jaxunet.config import Config, resolve, to_dict
from jaxunet.model.cost import forward_flops, memory, parameter_count
from jaxunet.model.resampling import doubled, halved, halved_inside
from jaxunet.model.unet import UNet, build_unet, init_params
from jaxunet.ops import backends
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError
from jaxunet.weights import read_weights, write_weights

FIR = (1, 3, 3, 1)
NCSNPP: dict[str, object] = {
    'channel_mult': (1, 1.5),
    'attention_resolutions': (8,),
    'num_head_channels': 4,
    'skip_scale': 0.5**0.5,
    'conv_in_channels': 4,
    'resblock_updown': True,
    'resample_filter': FIR,
    'resample_proj': True,
    'encoder_type': 'residual',
    'decoder_attention': 'last',
    'time_embedding': 'fourier',
    'channel_mult_noise': 2,
    'label_position': 'input',
    'norm_group_channels': 2,
    'init': 'edm',
}
EDM = {'objective': 'edm', 'edm_time_scale': 1.0}


def config_with(**model: object) -> Config:
    return tiny_config(model=NCSNPP | model, diffusion=EDM, data={'augment': 'edm'})


def test_every_parameter_but_the_frequencies_learns() -> None:
    config = config_with()
    unet, params = build_unet(config, XLA), random_params(config)
    x = jax.random.normal(jax.random.key(1), (2, *config.image_shape), jnp.float32)

    def energy(params: Any) -> jax.Array:
        told = jnp.ones((2, 9), jnp.float32)
        output = unet.predict(params, x, jnp.arange(2) * 60, jnp.arange(2), None, told)
        return jnp.mean(jnp.square(output))

    gradients = jax.jit(jax.grad(energy), compiler_options=QUICK)(params)
    for path, gradient in jax.tree.leaves_with_path(gradients):
        norm = float(np.linalg.norm(gradient))
        fixed = path[0].key == 'time_embed_fourier'
        assert math.isfinite(norm), path
        assert (norm == 0) == fixed, path


@pytest.mark.long
@pytest.mark.extension
def test_kernels_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA kernels' CPU handlers."""
    monkeypatch.setattr(backends, '_unavailable', lambda name: None)
    config = config_with()
    params, told = random_params(config), jnp.ones((2, 9), jnp.float32)
    x = jax.random.normal(jax.random.key(1), (2, *config.image_shape), jnp.float32)
    results = []
    for ops in (XLA, backends.choose('cuda', 'float32').ops):
        unet = build_unet(config, ops)

        def energy(params: Any, unet: UNet = unet) -> jax.Array:
            output = unet.predict(params, x, jnp.arange(2) * 60, jnp.arange(2), None, told)
            return jnp.mean(jnp.square(output))

        results.append(jax.jit(jax.value_and_grad(energy))(params))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * float(jnp.abs(a).max()))


def test_initial_weights_are_those_of_nvlabs() -> None:
    """xavier_uniform, times √0.2 for qkv and 1e-5 for the last layers."""
    config = config_with(base_channels=32, conv_in_channels=32)
    fresh = jax.jit(lambda: init_params(build_unet(config, XLA), config, jax.random.key(0)))()
    block, attention = fresh['middle_res_0'], fresh['middle_attention']
    for layer, factor in (
        (block['conv_1'], 1),
        (block['conv_2'], 1e-5),
        (attention['qkv'], 0.2**0.5),
        (attention['proj'], 1e-5),
        (fresh['conv_out'], 1e-5),
        (fresh['time_embed_augmentation'], 1),
    ):
        shape = layer['kernel'].shape
        spatial = math.prod(shape[:-2])
        limit = factor * math.sqrt(6 / (spatial * (shape[-1] + shape[-2])))
        assert 0.95 * limit < float(jnp.abs(layer['kernel']).max()) <= limit * 1.000001
    assert 10 < float(jnp.std(fresh['time_embed_fourier']['frequencies'])) < 22


@pytest.mark.parametrize('weights', [(1, 1), FIR])
def test_resampling(weights: tuple[int, ...]) -> None:
    x = jax.random.normal(jax.random.key(0), (1, 8, 6, 3), jnp.float32)
    small = jax.random.normal(jax.random.key(1), (1, 4, 3, 3), jnp.float32)
    # ⟨halved(x), y⟩ = ⟨x, doubled(y)⟩ / 4: one is the other's transpose.
    np.testing.assert_allclose(
        jnp.sum(halved(x, weights) * small), jnp.sum(x * doubled(small, weights)) / 4, rtol=1e-4
    )
    ones = jnp.ones((1, 8, 8, 1), jnp.float32)
    np.testing.assert_allclose(halved_inside(ones, weights), 1, rtol=1e-6)
    np.testing.assert_allclose(doubled(ones, weights)[:, 1:-1, 1:-1], 1, rtol=1e-6)


def test_the_fir_filter_by_hand() -> None:
    row = jnp.arange(1.0, 5.0)[None, None, :, None] * jnp.ones((1, 2, 1, 1))
    inner = (1 * 1 + 3 * 2 + 3 * 3 + 1 * 4) / 8
    found = halved(jnp.tile(row, (1, 2, 1, 1)), FIR)[0, 0, :, 0]
    edge = 7 / 8  # of the rows inside the image
    np.testing.assert_allclose(found, edge * np.array([(3 + 6 + 3) / 8, (2 + 9 + 12) / 8]))
    np.testing.assert_allclose(halved_inside(row[:, :, :, :], (1, 1))[0, 0, :, 0], [1.5, 3.5])
    np.testing.assert_allclose(halved_inside(jnp.tile(row, (1, 2, 1, 1)), FIR)[0, 0, :, 0], [inner])


def test_the_cost_counts_all_parts() -> None:
    plain = tiny_config(model={'channel_mult': (1, 1), 'norm_groups': 4}, data={'image_size': (8,)})

    def cost(**model: object) -> tuple[int, float, int]:
        config = plain.replace(model={'resblock_updown': True} | model)
        kept = memory(config, backends.choose('xla', 'float32', here=False))['activations']
        return parameter_count(config), forward_flops(config), kept

    count, flops, activations = cost()
    more = cost(encoder_type='residual', resample_proj=True)
    assert more[0] - count == (9 * 1 * 8 + 8) + 2 * (8 * 8 + 8)
    convolution, shortcuts = 2 * 9 * 8 * 8 * 8, 2 * 8 * 8 * (4 * 4 + 8 * 8)
    assert more[1] - flops == convolution + shortcuts
    assert more[2] > activations


def test_a_safetensors_holds_every_option(tmp_path: Any) -> None:
    config = config_with()
    params = random_params(config)
    write_weights(tmp_path / 'a.safetensors', params, config)
    found = read_weights(tmp_path / 'a.safetensors')
    assert found.config == config
    jax.tree.map(np.testing.assert_array_equal, found.params, params)


@pytest.mark.parametrize(
    ('model', 'other', 'message'),
    [
        ({'resample_filter': (1, 2, 1)}, {}, r'model.resample_filter: expected \(1, 1\) or'),
        (
            {'resblock_updown': False, 'resample_proj': False, 'conv_resample': True},
            {},
            r'model.resample_filter: \(1, 3, 3, 1\) has no effect on the convolutions',
        ),
        ({'resblock_updown': False}, {}, 'model.resample_proj: True needs model.resblock_updown'),
        (
            {},
            {'diffusion': {'objective': 'flow', 'edm_time_scale': 1000.0}},
            'model.time_embedding: fourier embeds ln σ, so it needs diffusion.objective=edm',
        ),
        (
            {},
            {'optimizer': {'weight_decay': 0.1}},
            'optimizer.weight_decay: 0.1 would shrink the fixed frequencies',
        ),
        (
            {'conv_in_channels': 6, 'norm_group_channels': 1},
            {},
            r'model.conv_in_channels: 6 is not a multiple of model.norm_groups \(4\)',
        ),
        (
            {'conv_in_channels': 10},
            {},
            'model.norm_group_channels: a GroupNorm of 10 channels would have 4 groups',
        ),
    ],
)
def test_what_does_not_go_together(
    model: dict[str, object], other: dict[str, Any], message: str
) -> None:
    changed = config_with().replace(model=model).replace(**other)
    with pytest.raises(UserError, match=message) as error:
        resolve(to_dict(changed))
    assert len(str(error.value).splitlines()) == 1
