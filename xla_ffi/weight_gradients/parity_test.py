"""Weight gradients in one call against the same gradients in a call each.

`xla_ffi/conv3x3/parity_test.py` and `xla_ffi/linear/parity_test.py` compare the latter with the
float64 oracle.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.parity import draw

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.runtime import device
from xla_ffi.conv3x3.parameter_gradients import parameter_gradients
from xla_ffi.group_norm.vjp import group_norm
from xla_ffi.linear import vjp as linear
from xla_ffi.weight_gradients.grouping import grouped


class Layer(NamedTuple):
    """A convolution; a linear layer if it has no parts; if `alone`, a norm."""

    side: int
    parts: tuple[int, ...]
    features: int
    projected: tuple[int, ...] = ()
    norm: bool = False
    per_sample: bool = False
    alone: bool = False


# Strips of one sample, of two and of four; channels and features that fill tiles or not; first and
# last layers, which have kernels of their own; images for which there is no Hopper kernel.
LAYERS = (
    Layer(8, (64, 64), 128, norm=True),
    Layer(16, (128,), 64, (64, 64), norm=True),
    Layer(16, (), 192, (64,)),
    Layer(4, (64,), 72, (40, 24), per_sample=True),
    Layer(8, (72,), 40, per_sample=True),
    Layer(3, (16,), 24),
    Layer(16, (3,), 64),
    Layer(8, (), 64, (520,)),
    Layer(4, (128,), 128, norm=True),
    Layer(32, (64,), 64),
    Layer(16, (64,), 3),
    Layer(4, (), 24, (8,)),
    Layer(8, (64, 64), 128, alone=True),
    Layer(4, (20,), 20, alone=True),
    Layer(3, (12, 6), 18, alone=True),  # sums that are read one by one
)


def arrays_of(layer: Layer, batch: int, dtype: str):
    """Returns x, dy, the projected images, and the sums of the norm."""

    def image(channels: int):
        shape = (batch, layer.side, layer.side, channels)
        return jnp.asarray(draw(shape, dtype), dtype)

    channels = sum(layer.parts)
    sums = [jnp.asarray(draw((batch, 2, channels), 'float32'))] if layer.norm else []
    return (
        [image(c) for c in layer.parts],
        image(layer.features),
        [image(c) for c in layer.projected],
        sums,
    )


def gradients_of(layer: Layer, arrays, weights: str):
    x, dy, projected, sums = arrays
    if layer.alone:
        rows = [jnp.ones((1, layer.features), weights)] * 2
        _, backward = jax.vjp(lambda *w: group_norm(Activation(tuple(x)), Norm(*w, 2)), *rows)
        return backward(dy)
    if not layer.parts:
        kernel = jnp.zeros((layer.projected[0], layer.features), weights)
        bias = jnp.zeros((1, layer.features), weights)
        _, backward = jax.vjp(lambda k, b: linear.linear(projected[0], k, b), kernel, bias)
        return backward(dy)
    shortcut = jnp.zeros((sum(layer.projected), layer.features), weights)
    conv = Convolution(
        image=Activation(tuple(x)),
        kernel=jnp.zeros((3, 3, sum(layer.parts), layer.features), weights),
        shift=jnp.zeros((dy.shape[0] if layer.per_sample else 1, layer.features), weights),
        residual=Activation(tuple(projected)) if projected else None,
        shortcut=shortcut if projected else None,
    )
    gradients, of_norm = parameter_gradients(conv, dy, *sums)
    of_shortcut = [gradients.shortcut] if projected else []
    return [gradients.kernel, gradients.shift, *of_shortcut, *of_norm]


def both(layers, batch: int, dtype: str, weights: str):
    """Returns the gradients in one call and in a call each, as lists of arrays."""

    def separate(arrays):
        return [
            gradients_of(layer, own, weights) for layer, own in zip(layers, arrays, strict=True)
        ]

    arrays = [arrays_of(layer, batch, dtype) for layer in layers]
    together = jax.jit(grouped(separate))
    lowered = together.lower(arrays).as_text()
    # Only products of 16-bit terms are merged, and portable kernels have none in float32.
    merges = dtype != 'float32' or not device.portable()
    assert lowered.count('@jaxunet_weight_gradients') == merges
    if dtype != 'float32':
        assert '@jaxunet_conv3x3_weight_gradient' not in lowered
    assert ('samples = true' in lowered) == (not merges)
    found = [jax.tree.leaves(together(arrays)) for _ in range(2)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    return found[0], jax.tree.leaves(jax.jit(separate)(arrays))


TYPES = [  # of images, of weights and their gradients
    ('bfloat16', 'float32'),
    ('bfloat16', 'bfloat16'),
    ('float16', 'float32'),
    ('float16', 'float16'),
    pytest.param('float32', 'float32', marks=pytest.mark.gpu),
]

SIZES = [
    pytest.param(3, 1, id='small'),
    pytest.param(3, 7, id='many_layers', marks=pytest.mark.gpu),
    pytest.param(37, 7, id='many_samples', marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(('dtype', 'weights'), TYPES)
@pytest.mark.parametrize(('batch', 'repeats'), SIZES)
def test_one_call_gives_the_gradients_of_a_call_each(batch, repeats, dtype, weights):
    """Repeated, the layers are more than one launch takes. Runs are identical."""
    together, separate = both(LAYERS * repeats, batch, dtype, weights)
    for got, want in zip(together, separate, strict=True):
        assert got.dtype == want.dtype
        exact = np.asarray(want.astype(jnp.float32))
        scale = float(np.sqrt(np.mean(np.square(exact))))
        rounding = 0 if weights == 'float32' else float(jnp.finfo(weights).eps)
        np.testing.assert_allclose(got.astype(jnp.float32), exact, rtol=rounding, atol=1e-4 * scale)
