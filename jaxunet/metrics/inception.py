"""FID's Inception-v3: TensorFlow's `inception-2015-12-05` with pytorch-fid's weights.

Sources: Szegedy et al. 2015 (arXiv 1512.00567); torchvision, `models/inception.py`, for the names;
mseitzer/pytorch-fid, `inception.py`, for the differences between FID's network and torchvision's:
average pools do not count the padding, and the last block (`Mixed_7c`) has a max pool;
openai/guided-diffusion (ADM), `evaluations/evaluator.py`, for the spatial features of sFID.

Parameters are a flat dict by pytorch-fid's names, convolutions as HWIO
(`jaxunet.metrics.inception_weights` converts them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

SIDE = 299  # pixels; every image is resized to SIDE×SIDE
DIMENSION = 2048
CLASSES = 1008
# ADM's spatial features: the first channels of `mixed_6/conv` in TensorFlow's names, at 17×17.
SPATIAL_LAYER = 'Mixed_6d.branch1x1'
SPATIAL_CHANNELS = 7
SPATIAL_DIMENSION = 17 * 17 * SPATIAL_CHANNELS
EPSILON = 1e-3  # added to batch normalization's variance
BATCH_NORM = ('weight', 'bias', 'running_mean', 'running_var')
# Full float32 products: TF32 would change the features by 1e-3.
PRECISION = lax.Precision.HIGHEST

Parameters = dict[str, Array]
Maps = Float[Array, 'images height width channels']
Tap = Callable[[str, Array], None]


class Conv(NamedTuple):
    """A convolution; kernel and padding are (height, width)."""

    channels: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int]


Layer = Callable[[str, Array, Conv], Array]  # (name, maps, convolution) -> maps


def pool3_and_spatial(
    params: Parameters, x: Float[Array, 'images 299 299 3']
) -> Float[Array, 'images 4071']:
    """Returns the pool3 features of prepared images, and after them the 2,023 spatial ones.

    The spatial features are 17×17×7 numbers in the order (height, width, channels), after batch
    normalization and ReLU.
    """
    maps: dict[str, Array] = {}
    pooled = pool3(params, x, maps.__setitem__)
    spatial = maps[SPATIAL_LAYER][..., :SPATIAL_CHANNELS]
    return jnp.concatenate([pooled, spatial.reshape(len(pooled), -1)], axis=1)


def prepare(
    images: UInt8[Array, 'images height width 3'] | UInt8[np.ndarray, 'images height width 3'],
) -> Float[Array, 'images 299 299 3']:
    """Scales pixels to [−1, 1] and resizes them to 299×299.

    Resizing is bilinear with half-pixel centres and no antialiasing (torch's
    `align_corners=False`), as in pytorch-fid.
    """
    x = images.astype(jnp.float32) / 255
    resized = jax.image.resize(
        x, (x.shape[0], SIDE, SIDE, x.shape[3]), 'bilinear', antialias=False, precision=PRECISION
    )
    return 2 * resized - 1


def prepare_as_tensorflow(
    images: UInt8[Array, 'images height width 3'] | UInt8[np.ndarray, 'images height width 3'],
) -> Float[Array, 'images 299 299 3']:
    """Resizes pixels to 299×299 and scales them to (p − 128)/128, as TensorFlow's graph does.

    Output pixel i lies at i · n/299 of the n input pixels, without the half-pixel centres of
    `prepare`. This is `ResizeBilinear` of TensorFlow 1, which ADM's evaluator runs.
    """
    x = images.astype(jnp.float32)
    rows, columns = (_interpolation(n) for n in x.shape[1:3])
    resized = jnp.einsum('ih,jw,nhwc->nijc', rows, columns, x, precision=PRECISION)
    return (resized - 128) / 128


def _interpolation(n: int) -> Float[np.ndarray, '299 n']:
    """Returns the weight of each of n input pixels in each of the 299 output pixels."""
    place = np.arange(SIDE) * (n / SIDE)
    low = np.floor(place).astype(int)
    share = place - low
    weights = np.zeros((SIDE, n), np.float32)
    np.add.at(weights, (np.arange(SIDE), low), 1 - share)
    np.add.at(weights, (np.arange(SIDE), np.minimum(low + 1, n - 1)), share)
    return weights


def pool3(params: Parameters, x: Maps, tap: Tap | None = None) -> Float[Array, 'images 2048']:
    """Returns the pool3 features of prepared images of at least 75×75 pixels.

    Args:
      tap: receives the name and output of every convolution (`Mixed_5b.branch1x1`), block
        (`Mixed_5b`) and outer pool.
    """

    def layer(name: str, x: Array, conv: Conv) -> Array:
        y = _convolution(params, name, x, conv.stride, conv.padding)
        if tap:
            tap(name, y)
        return y

    return _network(layer, x, tap or (lambda name, y: None))


def logits(
    params: Parameters, pooled: Float[Array, 'images 2048'], *, bias: bool = True
) -> Float[Array, 'images 1008']:
    """Returns class scores from pool3 features; the Inception Score leaves the bias out."""
    y = jnp.matmul(pooled, params['fc.weight'], precision=PRECISION)
    return y + params['fc.bias'][None] if bias else y


def torch_shapes() -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the state dict in torch's layouts (OIHW; (out, in))."""
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(name: str, x: Array, conv: Conv) -> Array:
        channels, kernel, stride, padding = conv
        shapes[f'{name}.conv.weight'] = (channels, x.shape[3], *kernel)
        shapes.update({f'{name}.bn.{part}': (channels,) for part in BATCH_NORM})
        height, width = (
            (x.shape[i + 1] + 2 * padding[i] - kernel[i]) // stride + 1 for i in (0, 1)
        )
        return jnp.zeros((x.shape[0], height, width, channels), x.dtype)

    jax.eval_shape(
        lambda x: _network(layer, x, lambda name, y: None),
        jax.ShapeDtypeStruct((1, SIDE, SIDE, 3), jnp.float32),
    )
    return {**shapes, 'fc.weight': (CLASSES, DIMENSION), 'fc.bias': (CLASSES,)}


def _convolution(
    params: Parameters, name: str, x: Array, stride: int, padding: tuple[int, int]
) -> Array:
    """Applies a convolution without bias, batch normalization by stored statistics, and ReLU."""
    y = lax.conv_general_dilated(
        x,
        params[f'{name}.conv.weight'],
        (stride, stride),
        [(p, p) for p in padding],
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        precision=PRECISION,
    )
    weight, bias, mean, variance = (params[f'{name}.bn.{part}'] for part in BATCH_NORM)
    scale = weight / jnp.sqrt(variance + EPSILON)
    return jax.nn.relu(y * scale[None, None, None] + (bias - mean * scale)[None, None, None])


def _max_pool(x: Array, stride: int = 2, padding: int = 0) -> Array:
    pads = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, stride, stride, 1), pads)


def _average_pool(x: Array) -> Array:
    """Averages 3×3 pixels; the padding does not count."""
    pads = [(0, 0), (1, 1), (1, 1), (0, 0)]
    total = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), pads)
    count = lax.reduce_window(
        jnp.ones((1, *x.shape[1:3], 1), x.dtype), 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), pads
    )
    return total / jnp.broadcast_to(count, total.shape)


class _Blocks:
    """The blocks of Inception-v3, for any implementation of its convolution layer.

    Args:
      layer: computes one convolution with its batch normalization and ReLU.
      tap: receives the name and output of every block.
    """

    def __init__(self, layer: Layer, tap: Tap) -> None:
        self._layer, self._tap = layer, tap

    def conv(
        self,
        name: str,
        x: Array,
        channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        *,
        same: bool = False,
    ) -> Array:
        """Applies one convolution, padded to keep the size if `same`."""
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (size[0] // 2, size[1] // 2) if same else (0, 0)
        return self._layer(name, x, Conv(channels, size, stride, padding))

    def chain(self, name: str, x: Array, *convs: tuple[str, int, int | tuple[int, int]]) -> Array:
        """Applies convolutions (name, channels, kernel) in a row, each keeping the size."""
        for suffix, channels, kernel in convs:
            x = self.conv(f'{name}.{suffix}', x, channels, kernel, same=True)
        return x

    def joined(self, name: str, *branches: Array) -> Array:
        """Concatenates the branches along channels."""
        y = jnp.concatenate(branches, axis=3)
        self._tap(name, y)
        return y

    def a(self, name: str, x: Array, pooled: int) -> Array:
        """Branches 1×1, 5×5, double 3×3 and average pool; the pool's has `pooled` channels."""
        chain = self.chain
        three = ('branch3x3dbl_1', 64, 1), ('branch3x3dbl_2', 96, 3), ('branch3x3dbl_3', 96, 3)
        return self.joined(
            name,
            chain(name, x, ('branch1x1', 64, 1)),
            chain(name, x, ('branch5x5_1', 48, 1), ('branch5x5_2', 64, 5)),
            chain(name, x, *three),
            chain(name, _average_pool(x), ('branch_pool', pooled, 1)),
        )

    def b(self, name: str, x: Array) -> Array:
        """Halves the size: branches 3×3, double 3×3 and max pool."""
        double = self.chain(name, x, ('branch3x3dbl_1', 64, 1), ('branch3x3dbl_2', 96, 3))
        return self.joined(
            name,
            self.conv(f'{name}.branch3x3', x, 384, 3, 2),
            self.conv(f'{name}.branch3x3dbl_3', double, 96, 3, 2),
            _max_pool(x),
        )

    def c(self, name: str, x: Array, channels: int) -> Array:
        """Branches 1×1, 7×7 and double 7×7 as pairs of 1×7 and 7×1, and average pool."""
        chain, row, column = self.chain, (1, 7), (7, 1)
        seven = (
            ('branch7x7_1', channels, 1),
            ('branch7x7_2', channels, row),
            ('branch7x7_3', 192, column),
        )
        double = (
            ('branch7x7dbl_1', channels, 1),
            ('branch7x7dbl_2', channels, column),
            ('branch7x7dbl_3', channels, row),
            ('branch7x7dbl_4', channels, column),
            ('branch7x7dbl_5', 192, row),
        )
        return self.joined(
            name,
            chain(name, x, ('branch1x1', 192, 1)),
            chain(name, x, *seven),
            chain(name, x, *double),
            chain(name, _average_pool(x), ('branch_pool', 192, 1)),
        )

    def d(self, name: str, x: Array) -> Array:
        """Halves the size: branches 3×3, 7×7 then 3×3, and max pool."""
        single = self.chain(name, x, ('branch3x3_1', 192, 1))
        seven = self.chain(
            name,
            x,
            ('branch7x7x3_1', 192, 1),
            ('branch7x7x3_2', 192, (1, 7)),
            ('branch7x7x3_3', 192, (7, 1)),
        )
        return self.joined(
            name,
            self.conv(f'{name}.branch3x3_2', single, 320, 3, 2),
            self.conv(f'{name}.branch7x7x3_4', seven, 192, 3, 2),
            _max_pool(x),
        )

    def e(self, name: str, x: Array, pooled: Array) -> Array:
        """Branches 1×1, 3×3 and double 3×3 that end in a 1×3 and a 3×1 each, and `pooled`."""
        chain = self.chain
        single = chain(name, x, ('branch3x3_1', 384, 1))
        double = chain(name, x, ('branch3x3dbl_1', 448, 1), ('branch3x3dbl_2', 384, 3))
        ends = ('a', (1, 3)), ('b', (3, 1))
        return self.joined(
            name,
            chain(name, x, ('branch1x1', 320, 1)),
            *(chain(name, single, (f'branch3x3_2{end}', 384, kernel)) for end, kernel in ends),
            *(chain(name, double, (f'branch3x3dbl_3{end}', 384, kernel)) for end, kernel in ends),
            chain(name, pooled, ('branch_pool', 192, 1)),
        )


def _network(layer: Layer, x: Array, tap: Tap) -> Array:
    blocks = _Blocks(layer, tap)
    x = blocks.conv('Conv2d_1a_3x3', x, 32, 3, 2)
    x = blocks.conv('Conv2d_2a_3x3', x, 32, 3)
    x = blocks.conv('Conv2d_2b_3x3', x, 64, 3, same=True)
    x = _max_pool(x)
    tap('maxpool1', x)
    x = blocks.conv('Conv2d_3b_1x1', x, 80, 1)
    x = blocks.conv('Conv2d_4a_3x3', x, 192, 3)
    x = _max_pool(x)
    tap('maxpool2', x)
    for name, pooled in (('Mixed_5b', 32), ('Mixed_5c', 64), ('Mixed_5d', 64)):
        x = blocks.a(name, x, pooled)
    x = blocks.b('Mixed_6a', x)
    for name, channels in zip(('b', 'c', 'd', 'e'), (128, 160, 160, 192), strict=True):
        x = blocks.c(f'Mixed_6{name}', x, channels)
    x = blocks.d('Mixed_7a', x)
    x = blocks.e('Mixed_7b', x, _average_pool(x))
    x = blocks.e('Mixed_7c', x, _max_pool(x, 1, 1))
    return x.mean((1, 2))
