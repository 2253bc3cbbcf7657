"""Calls without samples: empty images and gradients of zeros, or an error that says why not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxunet.ops import functional as ops
from jaxunet.ops.activation import Activation
from jaxunet.ops.backends import runnable
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from pallas_kernels.attention import vjp as attention
from pallas_kernels.conv3x3 import vjp as conv3x3
from pallas_kernels.group_norm import vjp as group_norm

CHANNELS = 64
BATCHES = (0, 1)  # 1, because a backend that returned zeros for every batch would pass otherwise


def network(x, weights, backend):
    """All ops in a chain, each on the result of the one before."""
    kernel, matrix, packed, row, wide = weights
    y = ops.conv3x3(x, kernel, row, residual=x, shortcut=matrix, backend=backend)
    y = ops.upsample_conv3x3(y, kernel, row, backend=backend)
    y = ops.norm_silu_conv3x3(y, row, row, kernel, row, residual=y, backend=backend)
    y = ops.group_norm(y, row, row, silu=True, backend=backend)
    qkv = ops.linear(y, packed, wide, backend=backend)
    batch, height, width, _ = qkv.shape
    y = ops.attention(
        qkv.reshape(batch, height * width, 3 * CHANNELS), num_heads=2, backend=backend
    )
    return y.reshape(batch, height, width, CHANNELS)


def drawn(dtype):
    """Returns the weights of `network`."""
    shapes = [(3, 3, CHANNELS, CHANNELS), (CHANNELS, CHANNELS), (CHANNELS, 3 * CHANNELS)]
    shapes += [(1, CHANNELS), (1, 3 * CHANNELS)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        0.1 * jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    ]


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('backend', ['xla', pytest.param('cuda', marks=pytest.mark.gpu)])
def test_an_empty_batch(backend, dtype):
    if backend not in ('xla', *(each.name for each in runnable())):
        pytest.skip(f'{backend} does not run here')

    @jax.jit
    def run(x, weights):
        def loss(x, weights):
            y = network(x, weights, backend)
            return jnp.sum(jnp.square(y.astype(jnp.float32))), y

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weights)

    for batch in BATCHES:
        x = jax.random.normal(jax.random.key(1), (batch, 8, 8, CHANNELS), dtype)
        (_, y), (of_x, of_weights) = run(x, drawn(dtype))
        assert y.shape == (batch, 16, 16, CHANNELS)
        assert of_x.shape == x.shape
        for gradient in of_weights:
            assert np.all(np.isfinite(np.asarray(gradient, np.float32)))
            assert np.any(np.asarray(gradient, np.float32)) == (batch > 0)


def test_the_pallas_kernels_refuse_an_empty_batch():
    x, (kernel, _, _, row, _) = jnp.zeros((0, 8, 8, CHANNELS)), drawn('float32')
    image = Activation.of(x)
    norm = Norm(row, row)
    conv = Convolution(image=image, norm=norm, kernel=kernel, shift=row)
    for call in (
        lambda: conv3x3.conv3x3(conv.of(x)),
        lambda: conv3x3.norm_silu_conv3x3(conv),
        lambda: group_norm.group_norm(image, norm),
        lambda: attention.attention(jnp.zeros((0, 64, 3 * CHANNELS)), num_heads=2),
    ):
        with pytest.raises(ValueError, match=r'shape \[0, .*take at least one sample'):
            call()
