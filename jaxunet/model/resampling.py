"""Changes of resolution without learned weights: each pixel is a weighted mean of its neighbours.

`model.resample_filter` holds the weights along one axis; those of both axes multiply. (1, 1) is the
average pool and the nearest neighbour, (1, 3, 3, 1) the FIR filter of NCSN++. Beyond its edges, an
image is zero.

Source: Karras et al. 2022, arXiv 2206.00364 (NVlabs/edm, `Conv2d` of training/networks.py); Song et
al. 2021, arXiv 2011.13456, appendix H.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import at_least_float32
from jaxunet.ops.conv3x3.upsampling import nearest

BOX = (1, 1)
ROWS, COLUMNS = 1, 2  # axes of images


def average_pool(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, 'batch height/2 width/2 channels']:
    """Averages blocks of 2×2 pixels, in float32."""
    batch, height, width, channels = x.shape
    wide = at_least_float32(x.dtype)
    blocks = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return jnp.mean(blocks, axis=(2, 4), dtype=wide).astype(x.dtype)


def halved(
    x: Float[Array, 'batch height width channels'], weights: tuple[int, ...]
) -> Float[Array, 'batch height/2 width/2 channels']:
    """Returns images of half the height and width, filtered in float32."""
    if weights == BOX:
        return average_pool(x)
    border = len(weights) // 2 - 1
    return halved_inside(jnp.pad(x, [(0, 0), (border, border), (border, border), (0, 0)]), weights)


def halved_inside(
    x: Float[Array, 'batch height width channels'], weights: tuple[int, ...]
) -> Float[Array, 'batch rows columns channels']:
    """Returns every second position of the filter, where it lies inside the image entirely.

    (height − len(weights)) / 2 + 1 rows, and as many columns of the width.
    """
    y = x.astype(at_least_float32(x.dtype))
    for axis in (ROWS, COLUMNS):
        last = y.shape[axis] - len(weights)
        taps = (
            jax.lax.slice_in_dim(y, i, i + last + 1, 2, axis) * (weight / sum(weights))
            for i, weight in enumerate(weights)
        )
        y = sum(taps, start=jnp.zeros((), y.dtype))
    return y.astype(x.dtype)


def doubled(
    x: Float[Array, 'batch height width channels'], weights: tuple[int, ...]
) -> Float[Array, 'batch 2*height 2*width channels']:
    """Returns images of twice the height and width, filtered in float32: the transpose of `halved`.

    It is scaled so that a uniform image keeps its values, apart from its edges.
    """
    if weights == BOX:
        return nearest(x)
    y = x.astype(at_least_float32(x.dtype))
    for axis in (ROWS, COLUMNS):
        y = _doubled_along(y, weights, axis)
    return y.astype(x.dtype)


def _doubled_along(x: Array, weights: tuple[int, ...], axis: int) -> Array:
    """Pixel j of x adds to the pixels 2j + i − border of the result, with weight i."""
    size, border = x.shape[axis], len(weights) // 2 - 1
    reach = len(weights) // 2
    padding = [(reach, reach) if i == axis else (0, 0) for i in range(x.ndim)]
    padded = jnp.pad(x, padding)
    phases = []
    for phase in (0, 1):
        # Pixel 2n + phase of the result gets weight i from pixel n + (phase + border − i)/2.
        taps = (
            jax.lax.slice_in_dim(padded, start, start + size, 1, axis) * (2 * weight / sum(weights))
            for i, weight in enumerate(weights)
            if (phase + border - i) % 2 == 0
            for start in [reach + (phase + border - i) // 2]
        )
        phases.append(sum(taps, start=jnp.zeros((), x.dtype)))
    shape = (*x.shape[:axis], 2 * size, *x.shape[axis + 1 :])
    return jnp.stack(phases, axis=axis + 1).reshape(shape)
