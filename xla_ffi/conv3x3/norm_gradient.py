"""The input gradient of a convolution of a normalised input, as one call.

The convolution's epilogue continues the gradient through SiLU and computes the sums that the norm's
gradient needs, so that the norm's kernel reads x and the gradient once instead of twice. This pays
off for images so large that no block or cluster can hold a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.conv3x3.operands import Parts
from jaxunet.runtime import device
from xla_ffi.call import ffi_call

FEW = 8  # up to this many channels, other kernels run: kFew in dispatch.h
# Smallest images, in pixels, for which the norm's kernel saves more time than this epilogue costs.
# To refit, run `python -m jaxunet.benchmark.kernels --roofline` with this number and with 0, and
# compare the classes.
MIN_PIXELS = 4096
# Limits of the call that computes the rest of the norm's gradient.
MAX_CHANNELS, MAX_SAMPLES = 2048, 65534


class NormGradient(NamedTuple):
    """The gradient of a norm's result before SiLU, z = a · x + b.

    Fields:
      dz: (input gradient of the convolution) · SiLU'(z), of x's type.
      sums: sums over the pixels of dz, and of dz times the normalised x, float32.
    """

    dz: Float[Array, 'batch height width channels']
    sums: Float[Array, 'batch 2 channels']


def takes(parts: Parts, features: int) -> bool:
    """Returns True if `norm_gradient` accepts these parts of x and features of dy, and pays off.

    Only the Hopper kernels for 16-bit types compute it (`takes_norm_gradient` in dispatch.h). They
    read each chunk of 64 channels of x from one part.
    """
    channels = [part.shape[3] for part in parts]
    whole = all(count % 64 == 0 for count in channels[:-1])
    eights = channels[-1] % 8 == features % 8 == 0
    many = FEW < sum(channels) <= MAX_CHANNELS and features > FEW
    batch, height, width = parts[0].shape[:3]
    large = min(height, width) >= 4 and max(height, width) > 4 and height * width >= MIN_PIXELS
    narrow = parts[0].dtype.itemsize == 2
    few = batch <= MAX_SAMPLES
    return whole and eights and many and large and narrow and few and not device.portable()


def norm_gradient(
    dy: Float[Array, 'batch height width features'],
    kernel: Float[Array, '3 3 channels features'],
    parts: Parts,
    affine: tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']],
    mean: Float[Array, 'batch channels'],
    inverse: Float[Array, 'batch channels'],
) -> NormGradient:
    """Returns the gradient of the norm's result before SiLU, given dy, that of the convolution's.

    Args:
      parts: x, the norm's input, which `takes` must accept.
      affine: a and b.
      mean, inverse: mean and 1 / deviation of each channel's group.
    """
    (batch, height, width), channels = dy.shape[:3], kernel.shape[2]
    strips = batch * -(-height // 8) * -(-width // 8)
    shapes = [
        jax.ShapeDtypeStruct((batch, height, width, channels), dy.dtype),
        jax.ShapeDtypeStruct((batch, 2, channels), jnp.float32),
        jax.ShapeDtypeStruct((strips * 2 * channels,), jnp.float32),  # workspace
    ]
    call = ffi_call('jaxunet_conv3x3_norm_gradient', shapes)
    operands = (dy, kernel.astype(dy.dtype), *parts, *affine, mean, inverse)
    dz, sums, _ = call(*operands, parts=np.int64(len(parts)))
    return NormGradient(dz, sums)
