"""The UNet with backend=cuda: which products a training step of elephants64 leaves to XLA, and a
comparison of a small UNet with XLA's.
"""

from __future__ import annotations

import collections
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from support import kernel_names
from support.tiny import tiny_config

from jaxunet import config
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import choose
from jaxunet.ops.references import XLA
from jaxunet.ops.vocabulary import Ops

BATCH = 2
CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'elephants64.py'

pytestmark = pytest.mark.extension


def products(operation: ir.Operation, found: collections.Counter[str]) -> collections.Counter[str]:
    """Counts the matrix products by layer, the name of a scope without numbers."""
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                if child.operation.name == 'stablehlo.dot_general':
                    scope = str(child.operation.location).split('"')[1].split('/')
                    found[scope[-2].rstrip('0123456789')] += 1
                products(child.operation, found)
    return found


def test_what_is_left_to_xla() -> None:
    resolved = config.resolve(runpy.run_path(str(CONFIG))['get_config']())
    x, t = (
        jax.ShapeDtypeStruct((BATCH, *resolved.image_shape), 'float32'),
        jax.ShapeDtypeStruct((BATCH,), 'int32'),
    )
    parameters = jax.eval_shape(
        lambda x, t: build_unet(resolved, XLA).init(jax.random.key(0), x, t)['params'], x, t
    )
    shortcuts = sum('shortcut' in block for block in parameters.values())
    blocks = sum('conv_1' in block for block in parameters.values())
    attentions = sum('qkv' in block for block in parameters.values())
    model = build_unet(resolved, choose('cuda', here=False).ops)

    def loss(parameters: Params, x: jax.Array, t: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.predict(parameters, x, t)))

    lowered = jax.jit(jax.value_and_grad(loss)).lower(parameters, x, t)
    kernels = kernel_names.count(lowered)
    assert (shortcuts, blocks, attentions) == (15, 22, 11)
    assert kernels['jaxunet_linear'] == kernels['jaxunet_linear_weight_gradient'] == 2 * attentions
    assert kernels['jaxunet_conv3x3_shortcut_gradient'] == shortcuts
    assert (
        kernels['jaxunet_conv3x3_weight_gradient'] == 2 * blocks + 2
    )  # with those of the first and the last convolution
    found = products(lowered.compiler_ir('stablehlo').operation, collections.Counter())
    linear = [found.pop(name) for name in list(found) if 'attention' in name]
    assert sum(linear) == 2 * attentions, linear
    # Forward, and the gradients by input and weights, except that the time itself needs no
    # gradient. All blocks share one call for the projections of the embedding.
    assert found == {'time_embed_': 5}, found
    assert kernels['jaxunet_projections'] == kernels['jaxunet_projection_gradients'] == 1
    # If a convolution follows the norm, its weight gradient also sums the gradients of scale and
    # offset.
    text = lowered.as_text()
    fused = 2 * blocks + 1
    assert len(re.findall('jaxunet_conv3x3_weight_gradient.*?norm = true', text)) == fused
    samples = collections.Counter(
        re.findall(r'jaxunet_group_norm_gradient.*?samples = (\w+)', text)
    )
    assert samples == {'false': fused, 'true': attentions}
    # Only before a convolution is the gradient of a norm's result rounded when it arrives.
    rounded = collections.Counter(
        re.findall(r'jaxunet_group_norm_gradient.*?rounded = (\w+)', text)
    )
    assert rounded == {'true': fused, 'false': attentions}
    # A norm's gradient kernel also adds the gradients of a residual and a skip connection. XLA adds
    # them if the image is halved next.
    halved = len(resolved.model.channel_mult) - 1
    added = collections.Counter(re.findall(r'jaxunet_group_norm_gradient.*?added = (\d)', text))
    down = resolved.model.num_res_blocks * (halved + 1) + 1  # including the first in the middle
    assert added == {'2': down, '1': blocks - down + attentions, '0': blocks + 1}
    assert len(re.findall(rf'stablehlo.add .*: tensor<{BATCH}x\d+x\d+x\d+xbf16>', text)) == halved


def test_dropout_is_inside_of_the_norms() -> None:
    """Counts the launches of configs/cifar10.py: one forward and one backward per block."""
    resolved = config.resolve(runpy.run_path(str(CONFIG.with_name('cifar10.py')))['get_config']())
    model = build_unet(resolved, choose('cuda', here=False).ops)
    x, t = (
        jax.ShapeDtypeStruct((BATCH, *resolved.image_shape), 'float32'),
        jax.ShapeDtypeStruct((BATCH,), 'int32'),
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))
    parameters = jax.eval_shape(lambda *a: model.init(jax.random.key(0), *a)['params'], x, t)
    blocks = sum('conv_1' in block for block in parameters.values())
    assert blocks == 22

    def loss(p: Params, x: jax.Array, t: jax.Array, keys: jax.Array) -> jax.Array:
        return jnp.sum(model.predict(p, x, t, None, keys))

    kernels = kernel_names.count(jax.jit(jax.grad(loss)).lower(parameters, x, t, keys))
    for direction in ('forward', 'gradient'):
        assert kernels[f'jaxunet_group_norm_dropout_{direction}'] == blocks


@pytest.mark.parametrize('rate', [0.0, 0.2])
def test_a_small_unet_is_that_of_xla(rate: float) -> None:
    """Prediction and gradients in float32, on the CPU handlers: with shortcuts, and with attention
    whose last layer is not zero. With dropout, both drop the same elements.
    """
    small = {'channel_mult': (1, 2), 'attention_resolutions': (8, 4), 'zero_init': False}
    resolved = tiny_config(model=small | {'dropout': rate})
    cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(cpu):
        x = jax.random.normal(jax.random.key(1), (2, *resolved.image_shape))
        t, labels = jnp.array([3, 30]), jnp.array([1, 2])
        keys = jax.random.split(jax.random.key(2))
        parameters = jax.jit(build_unet(resolved, XLA).init)(jax.random.key(0), x, t, labels)[
            'params'
        ]
        assert parameters['middle_attention']['qkv']['kernel'].shape == (16, 48)
        assert parameters['middle_attention']['proj']['bias'].shape == (16,)

        def pull(ops: Ops) -> tuple[jax.Array, Params]:
            model = build_unet(resolved, ops)
            return jax.jit(
                jax.value_and_grad(lambda p: jnp.sum(jnp.sin(model.predict(p, x, t, labels, keys))))
            )(parameters)

        value, gradients = pull(choose('cuda', here=False).ops)
        exact, wanted = pull(XLA)
    np.testing.assert_allclose(value, exact, rtol=1e-4)
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * largest),
        gradients,
        wanted,
    )
