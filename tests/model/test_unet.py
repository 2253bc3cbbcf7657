"""The UNet: sizes of published networks, every option, and what must not depend on how a batch is
cut.
"""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from support.configs import CONFIGS, load
from support.tiny import tiny_config

from jaxunet.config import resolve
from jaxunet.model.blocks import Affine
from jaxunet.model.cost import forward_flops, memory, parameter_count
from jaxunet.model.embeddings import label_embedding, timestep_embedding
from jaxunet.model.unet import build_unet, init_params
from jaxunet.ops.backends import choose
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError

STEP_ROWS = pathlib.Path(__file__).parents[2] / 'docs' / 'results' / 'step' / 'rows.jsonl'
PUBLISHED = {
    'elephants64': 20_494_211,  # unet.cu
    'cifar10': 35_746_307,  # DDPM, Ho et al. 2020 (35.7 M)
    # ADM's network, published as 296 M; `jaxunet.benchmark.torch_unet` has exactly as many.
    'imagenet64': 295_904_454,
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_parameter_counts_of_published_networks(name):
    path = next(p for p in CONFIGS if p.stem == name)
    assert parameter_count(resolve(load(path))) == PUBLISHED[name]


OPTIONS = {
    'plain': {},
    'conv_resample': {'conv_resample': True},
    'ddpm': {
        'conv_resample': True,
        'downsample_padding': 'same',
        'time_embedding': 'ddpm',
        'init': 'ddpm',
        'norm_eps': 1e-6,
    },
    'updown': {'resblock_updown': True, 'scale_shift_norm': True},
    'heads': {'num_heads': 2, 'num_heads_upsample': 4, 'num_head_channels': 0},
    'dropout': {'dropout': 0.3},
    'remat': {'remat': True, 'dropout': 0.3},
    'nonzero': {'zero_init': False},
}
# Those that go together, for two networks instead of eight.
TOGETHER = {
    name: {field: value for option in options for field, value in OPTIONS[option].items()}
    for name, options in {
        'ddpm and heads': ('ddpm', 'heads'),
        'updown, remat and nonzero': ('updown', 'remat', 'nonzero'),
    }.items()
}


def build(options=(), learn_sigma=False, **data):
    base = {'channel_mult': (1, 1.5), 'attention_resolutions': (4,), 'num_head_channels': 4}
    config = tiny_config(
        model=base | dict(options),
        diffusion={'learn_sigma': learn_sigma},
        data={'image_size': (12, 8)} | data,
    )
    model = build_unet(config, XLA)
    return config, model


def randomised(model, config):
    """Parameters without zeros, so that every path shows."""
    shapes = jax.eval_shape(lambda: init_params(model, config, jax.random.key(0)))
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jnp.asarray(
            draw.standard_normal(s.shape) / math.sqrt(max(s.size // s.shape[-1], 1)), jnp.float32
        ),
        shapes,
    )


def predict(model, *args):
    return jax.jit(model.predict)(*args)


def inputs(config, batch=4):
    x = jax.random.normal(jax.random.key(1), (batch, *config.image_shape), jnp.float32)
    return (
        x,
        jnp.arange(batch) * 5,
        jnp.arange(batch) - 1,
        jax.random.split(jax.random.key(2), batch),
    )


@pytest.mark.parametrize(
    'name', [*TOGETHER, *(pytest.param(name, marks=pytest.mark.long) for name in OPTIONS)]
)
def test_options_run_and_use_every_parameter(name):
    learn_sigma = name.startswith('updown')
    config, model = build((OPTIONS | TOGETHER)[name], learn_sigma=learn_sigma)
    params, (x, t, labels, keys) = randomised(model, config), inputs(config)

    def energy(params):
        output = model.predict(params, x, t, labels, keys)
        assert output.shape == (4, 12, 8, 2 if learn_sigma else 1)
        assert output.dtype == jnp.float32
        return jnp.mean(jnp.square(output))

    gradients = jax.device_get(jax.jit(jax.grad(energy))(params))
    for path, gradient in jax.tree.leaves_with_path(gradients):
        where = jax.tree_util.keystr(path)
        norm = float(np.linalg.norm(gradient))
        assert math.isfinite(norm), where
        assert norm > 0, where


@pytest.mark.long
def test_zero_init_predicts_zero_and_options_change_the_output():
    config, model = build()
    x, t, labels, _ = inputs(config)
    fresh = jax.jit(lambda: init_params(model, config, jax.random.key(0)))()
    assert not np.any(predict(model, fresh, x, t, labels))
    params = randomised(model, config)
    base = predict(model, params, x, t, labels)
    for options in (
        {'time_embedding': 'ddpm'},
        {'max_period': 100},
        {'norm_eps': 0.1},
        {'num_head_channels': 2},
        {'norm_groups': 2},
    ):
        other = predict(build(options)[1], params, x, t, labels)
        assert float(jnp.abs(other - base).max()) > 1e-4, options
    padding = [
        build({'conv_resample': True, 'downsample_padding': p})[1] for p in ('symmetric', 'same')
    ]
    params = randomised(padding[0], config)
    assert (
        float(
            jnp.abs(
                predict(padding[0], params, x, t, labels)
                - predict(padding[1], params, x, t, labels)
            ).max()
        )
        > 1e-3
    )


def test_samples_do_not_see_each_other():
    """Also with dropout: sample i draws from its own key, so a batch may be cut anywhere."""
    config, model = build({'dropout': 0.3})
    params, (x, t, labels, keys) = randomised(model, config), inputs(config)
    run = jax.jit(model.predict)
    whole = run(params, x, t, labels, keys)
    parts = [
        run(params, x[i : i + 2], t[i : i + 2], labels[i : i + 2], keys[i : i + 2]) for i in (0, 2)
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-5)
    assert (
        float(jnp.abs(whole - run(params, x, t, labels, None)).max()) > 1e-2
    )  # without keys, no dropout


@pytest.mark.long
def test_remat_changes_memory_not_values():
    config, model = build({'dropout': 0.3})
    again = build({'dropout': 0.3, 'remat': True})[1]
    params, args = randomised(model, config), inputs(config)
    loss = [
        jax.jit(jax.value_and_grad(lambda p, m=m: jnp.mean(jnp.square(m.predict(p, *args)))))(
            params
        )
        for m in (model, again)
    ]
    for a, b in zip(*map(jax.tree.leaves, loss), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert (
        memory_of(config.replace(model={'remat': True}))['activations']
        < 0.5 * memory_of(config)['activations']
    )


def memory_of(config):
    return memory(config, choose(config.backend, config.precision, here=False))


@pytest.mark.parametrize('overlap', [False, True])
def test_the_memory_estimate_covers_what_the_kernels_took(overlap):
    rows = [
        row
        for row in map(json.loads, STEP_ROWS.read_text().splitlines())
        if (row['config'], row['backend'], row['batch_size'], row['direction'])
        == ('elephants64', 'cuda', 32, 'step')
        and bool(row.get('concurrent_kernels')) == overlap
    ]
    config = resolve(load(next(p for p in CONFIGS if p.stem == 'elephants64'))).replace(
        backend='cuda',
        data={'batch_size': 32},
        parallel={'devices': 1, 'concurrent_kernels': overlap},
    )
    estimate = sum(memory_of(config).values())
    taken = max(rows, key=lambda r: r['time'])['peak_bytes']
    assert taken <= estimate <= 1.25 * taken


def test_the_memory_estimate_is_of_this_machine():
    found = [memory_of(tiny_config(backend=name))['activations'] for name in ('xla', 'auto')]
    assert found[0] == found[1]


def test_labels():
    config, model = build()
    params, (x, t, _, _) = randomised(model, config), inputs(config)
    dropped = predict(model, params, x, t, jnp.full(4, -1))
    np.testing.assert_array_equal(dropped, predict(model, params, x, t, None))
    assert float(jnp.abs(dropped - predict(model, params, x, t, jnp.full(4, 3))).max()) > 1e-3
    with pytest.raises(UserError, match='the model is unconditional'):
        build({'num_classes': 0, 'label_dropout': 0.0})[1].predict(
            params, x, t, jnp.zeros(4, jnp.int32)
        )


def test_label_embedding_adds_in_a_fixed_order():
    table, labels = jax.random.normal(jax.random.key(0), (3, 5)), jnp.array([2, 0, -1, 2])
    rows, pull = jax.vjp(lambda table: label_embedding(table, labels), table)
    np.testing.assert_array_equal(rows, [table[2], table[0], np.zeros(5), table[2]])
    gradient = jnp.arange(20.0).reshape(4, 5)
    (found,) = pull(gradient)
    np.testing.assert_array_equal(found, [gradient[1], np.zeros(5), gradient[0] + gradient[3]])
    # On a GPU a scatter adds in varying order.
    config, model = build()
    params, (x, t, labels, _) = randomised(model, config), inputs(config)
    loss = jax.jit(jax.grad(lambda params: jnp.sum(model.predict(params, x, t, labels))))
    assert 'scatter' not in loss.lower(params).as_text()


def test_low_precision_is_close_to_float32():
    config, model = build()
    params, (x, t, labels, _) = randomised(model, config), inputs(config)
    want = predict(model, params, x, t, labels)
    for precision, tolerance in (('bfloat16', 0.1), ('float16', 0.02)):
        got = predict(build_unet(config.replace(precision=precision), XLA), params, x, t, labels)
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        assert 1e-5 < error < tolerance


def test_a_parameter_of_another_shape_is_refused():
    right, wrong = {'scale': jnp.ones(8), 'bias': jnp.ones(8)}, {'scale': jnp.ones(4)}
    assert [x.shape for x in Affine(8).apply({'params': right})] == [(1, 8), (1, 8)]
    with pytest.raises(ScopeParamShapeError, match='scale'):
        Affine(8).apply({'params': right | wrong})


def test_timestep_embedding():
    t = jnp.array([0, 3, 977])
    adm = timestep_embedding(t, 64, max_period=1000)
    angles = np.array([0, 3, 977])[:, None] * np.exp(-math.log(1000) * np.arange(32) / 32)
    np.testing.assert_allclose(adm, np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=2e-4)
    angles = np.array([0, 3, 977])[:, None] * np.exp(-math.log(10000) * np.arange(32) / 31)
    ddpm = timestep_embedding(t, 65, order='ddpm')
    np.testing.assert_allclose(
        ddpm, np.concatenate([np.sin(angles), np.cos(angles), np.zeros((3, 1))], 1), atol=2e-4
    )


def test_flops_of_one_convolution_dominate_as_they_should():
    config = tiny_config(
        model={'base_channels': 64, 'num_res_blocks': 1, 'norm_groups': 32},
        data={'image_size': (16,)},
    )
    convolutions = (
        2 * 9 * 16 * 16 * 64 * (64 * 8 + 128 * 2 + 2)
    )  # down, middle (2), up (2 blocks, joined inputs), in and out
    shortcuts = 2 * 16 * 16 * 128 * 64 * 2
    attention = 2 * 256 * 64 * 64 * 4 + 2 * 2 * 256 * 256 * 64
    assert 0.99 < (convolutions + shortcuts + attention) / forward_flops(config) < 1.01


@pytest.mark.long
def test_augmentation_is_told_without_a_bias():
    """Zeros and nothing are the same, numbers are not; and all parameters have a gradient."""
    config, model = build(augment='edm')
    params, (x, t, labels, _) = randomised(model, config), inputs(config)
    told = jax.random.normal(jax.random.key(5), (4, 9), jnp.float32)
    assert params['time_embed_augmentation'].keys() == {'kernel'}
    plain, zeros, numbers = (
        predict(model, params, x, t, labels, None, a) for a in (None, jnp.zeros((4, 9)), told)
    )
    np.testing.assert_allclose(plain, zeros, rtol=1e-6, atol=1e-6)
    assert float(jnp.abs(plain - numbers).max()) > 1e-3
    _, without = build()
    rest = {name: layer for name, layer in params.items() if name != 'time_embed_augmentation'}
    np.testing.assert_array_equal(predict(without, rest, x, t, labels), plain)

    def energy(params):
        return jnp.mean(jnp.square(model.predict(params, x, t, labels, None, told)))

    gradient = jax.jit(jax.grad(energy))(params)['time_embed_augmentation']['kernel']
    assert float(jnp.linalg.norm(gradient)) > 0


def test_augmentation_starts_at_zero():
    config, model = build(augment='edm')
    fresh = jax.jit(lambda: init_params(model, config, jax.random.key(0)))()
    kernel = fresh['time_embed_augmentation']['kernel']
    assert kernel.shape == (9, config.model.base_channels)
    assert not np.any(kernel)
