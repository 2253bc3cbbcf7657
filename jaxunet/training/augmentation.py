"""EDM's non-leaking augmentation: random geometry, which the network gets as an input.

Each image is flipped, scaled, rotated, stretched and shifted at random, and the network gets the
parameters as `AUGMENTATION_INPUTS` numbers beside the time. They are 0 for an unchanged image and
in sampling, so samples do not look augmented.

| transformation | parameters | input of the network |
|---|---|---|
| mirror left and right | a0 = 0 or 1 | a0 |
| mirror up and down | a1 = 0 or 1 | a1 |
| scale by 2^(0.2 a2) | a2 ~ N(0, 1) | a2 |
| rotate by a3 | a3 ~ U(−π, π) | cos a3 − 1, sin a3 |
| stretch by 2^(0.2 a5) along a4 | a4 = 0 or ~ U(−π, π), a5 ~ N(0, 1) | a5 cos a4, a5 sin a4 |
| shift by a6/8 of the width, a7/8 of the height | a6, a7 ~ N(0, 1) | a6, a7 |

Angles are counter-clockwise on the screen. Stretching also shrinks by the same factor across its
direction, which is the x axis for half of the stretched images.

They happen in this order, each with probability `data.augment_probability`, except for the first:
half of all images are mirrored. All of an image's transformations are one bilinear resampling.

Source: Karras et al. 2022, arXiv 2206.00364, appendix F.2 and table 6, and the code of its authors
(NVlabs/edm, training/augment.py), whose network inputs mean the same. That code also filters; at
these scales, bilinear interpolation is enough.

Runs that began before `data.augment_rule` was introduced keep the rule `earlier`: with the same
inputs it turns and stretches the other way (a3 and a4 clockwise), and a4 is never fixed to 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxunet.config.schema import AUGMENTATION_INPUTS

Images = Float[Array, 'batch height width channels']
Labels = Float[Array, 'batch inputs']
Scalars = Float[Array, ' batch']
Matrices = Float[Array, 'batch 2 2']

OCTAVES = 0.2  # log2 of the scale and of the stretch, per unit of a2 and a5
SHIFT = 1 / 8  # of the image's side, per unit of a6 and a7


class Geometry(NamedTuple):
    """The transformations of a batch; an image without any has zeros.

    Fields:
      mirror, flip: a0 and a1, 0 or 1.
      scale, stretch: a2 and a5.
      rotation, direction: a3 and a4, radians, counter-clockwise.
      shift: a6 and a7, along the width and the height.
    """

    mirror: Scalars
    flip: Scalars
    scale: Scalars
    rotation: Scalars
    direction: Scalars
    stretch: Scalars
    shift: Float[Array, 'batch 2']


def augment(
    images: Images, keys: Key[Array, ' batch'], probability: float, rule: str = 'edm'
) -> tuple[Images, Labels]:
    """Returns the augmented images, and the network's inputs that describe the augmentation.

    Args:
      keys: one for each image.
      probability: of each transformation but the first.
      rule: `data.augment_rule`.
    """
    if rule == 'edm':
        geometry = draw(keys, probability)
        return transform(images, geometry), labels(geometry)
    geometry = draw(keys, probability, along_x=0)
    turned = geometry._replace(rotation=-geometry.rotation, direction=-geometry.direction)
    return transform(images, turned), labels(geometry)


def draw(keys: Key[Array, ' batch'], probability: float, along_x: float = 0.5) -> Geometry:
    """Draws the transformations of each image from its key.

    Args:
      along_x: share of the stretched images whose direction is the x axis.
    """

    def one(key: Array) -> tuple[Array, Array]:
        first, second = jax.random.split(key)
        return jax.random.uniform(first, (9,)), jax.random.normal(second, (4,))

    uniform, normal = jax.vmap(one)(keys)
    # The first five uniform numbers choose the transformations that happen.
    flips, scales, rotates, stretches, shifts = (uniform[:, :5] < probability).T
    turns = stretches & (uniform[:, 3] >= along_x * probability)
    angles = jnp.float32(math.pi) * (2 * uniform[:, 5:7] - 1)
    zero = jnp.zeros(uniform.shape[:1], jnp.float32)
    return Geometry(
        mirror=(uniform[:, 7] < 0.5).astype(jnp.float32),
        flip=jnp.where(flips, (uniform[:, 8] < 0.5).astype(jnp.float32), zero),
        scale=jnp.where(scales, normal[:, 0], zero),
        rotation=jnp.where(rotates, angles[:, 0], zero),
        direction=jnp.where(turns, angles[:, 1], zero),
        stretch=jnp.where(stretches, normal[:, 1], zero),
        shift=jnp.where(shifts[:, None], normal[:, 2:], zero[:, None]),
    )


def labels(g: Geometry) -> Labels:
    """Returns the network's inputs of each image, (batch, `AUGMENTATION_INPUTS`)."""
    columns = [
        g.mirror,
        g.flip,
        g.scale,
        jnp.cos(g.rotation) - 1,
        jnp.sin(g.rotation),
        g.stretch * jnp.cos(g.direction),
        g.stretch * jnp.sin(g.direction),
        g.shift[:, 0],
        g.shift[:, 1],
    ]
    assert len(columns) == AUGMENTATION_INPUTS
    return jnp.stack(columns, axis=1)


def transform(images: Images, g: Geometry) -> Images:
    """Transforms each image about its middle; without transformations it does not change.

    Images are reflected at their edges.
    """
    height, width = images.shape[1:3]
    # From a pixel of the result back to its place in the image, so in reverse order.
    *factors, back = (
        _scaling(1 - 2 * g.mirror, 1 - 2 * g.flip),
        _scaling(jnp.exp2(-OCTAVES * g.scale), jnp.exp2(-OCTAVES * g.scale)),
        _turn(g.rotation),
        _turn(-g.direction),
        _scaling(jnp.exp2(-OCTAVES * g.stretch), jnp.exp2(OCTAVES * g.stretch)),
        _turn(g.direction),
    )
    for factor in reversed(factors):
        back = _product(factor, back)
    middle = [(width - 1) / 2, (height - 1) / 2]
    offset = g.shift * (jnp.asarray([width, height], jnp.float32) * SHIFT)[None]
    x = jnp.arange(width, dtype=jnp.float32)[None, None, :] - middle[0] - offset[:, 0, None, None]
    y = jnp.arange(height, dtype=jnp.float32)[None, :, None] - middle[1] - offset[:, 1, None, None]
    at_x, at_y = (
        back[:, i, 0, None, None] * x + back[:, i, 1, None, None] * y + middle[i] for i in (0, 1)
    )
    return resample(images, at_x, at_y)


def resample(
    images: Images,
    x: Float[Array, 'batch rows columns'],
    y: Float[Array, 'batch rows columns'],
) -> Float[Array, 'batch rows columns channels']:
    """Returns the images at these positions, in pixels from the first, by bilinear interpolation.

    Beyond its edges, an image continues as its reflection about the centres of the outermost
    pixels.
    """
    batch, height, width, channels = images.shape
    left, top = jnp.floor(x), jnp.floor(y)
    right_share, lower_share = x - left, y - top
    columns = [_reflected(left + i, width) for i in (0, 1)]
    rows = [_reflected(top + i, height) for i in (0, 1)]
    # One gather fetches the four neighbours of all pixels.
    index = jnp.stack([row * width + column for row in rows for column in columns], axis=-1)
    flat = images.reshape(batch, height * width, channels)
    gathered = jax.vmap(lambda pixels, i: pixels[i])(flat, index)
    weight = jnp.stack(
        [
            vertical * horizontal
            for vertical in (1 - lower_share, lower_share)
            for horizontal in (1 - right_share, right_share)
        ],
        axis=-1,
    )
    return jnp.sum(gathered * weight[..., None], axis=-2)


def _reflected(place: Float[Array, '*shape'], size: int) -> Int[Array, '*shape']:
    """Returns the pixel for a whole-numbered position, inside the image or beyond."""
    period = max(2 * (size - 1), 1)
    rest = jnp.mod(place, period)
    return jnp.minimum(rest, jnp.maximum(period - rest, 0)).astype(jnp.int32)


def _scaling(x: Scalars, y: Scalars) -> Matrices:
    zero = jnp.zeros_like(x)
    return _matrix(x, zero, zero, y)


def _turn(angle: Scalars) -> Matrices:
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    return _matrix(cosine, -sine, sine, cosine)


def _matrix(a: Scalars, b: Scalars, c: Scalars, d: Scalars) -> Matrices:
    return jnp.stack([jnp.stack([a, b], axis=1), jnp.stack([c, d], axis=1)], axis=1)


def _product(a: Matrices, b: Matrices) -> Matrices:
    # As sums rather than a matrix product, which GPUs may round to fewer bits.
    return jnp.sum(a[:, :, :, None] * b[:, None, :, :], axis=2)
