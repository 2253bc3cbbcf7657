"""Makes and enlarges the pictures that a network for super-resolution or colouring sees.

As guided-diffusion does by PyTorch's `F.interpolate` (super_res_train.py and SuperResModel).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError

BRIGHTNESS = (0.299, 0.587, 0.114)  # of red, green and blue, as Pillow converts (ITU-R BT.601)


def low_res_of(
    config: Config, images: Float[Array, 'batch height width channels']
) -> Float[Array, 'batch low_height low_width channels'] | None:
    """Returns the pictures of images that `data.condition` names, of size `model.low_res_size`.

    None for a network that sees no pictures.

    As `F.interpolate(mode='area')`: each pixel is the mean of all pixels that it covers, wholly or
    in part. If the sizes do not divide, neighbours share rows or columns.
    """
    shape = config.low_res_shape
    if shape is None:
        return None
    if config.data.condition == 'grey':
        images = grey(images)
    rows, columns = (
        area_weights(*sizes) for sizes in zip(images.shape[1:3], shape[:2], strict=True)
    )
    return jnp.einsum(
        'ih,bhwc,jw->bijc', rows, images, columns, precision=jax.lax.Precision.HIGHEST
    )


def grey(images: Float[Array, 'batch height width 3']) -> Float[Array, 'batch height width 3']:
    """Returns the brightness of images, in all three channels."""
    weights = jnp.asarray(BRIGHTNESS, images.dtype)
    brightness = jnp.einsum('bhwc,c->bhw', images, weights, precision=jax.lax.Precision.HIGHEST)
    return jnp.broadcast_to(brightness[..., None], images.shape)


def check_condition(config: Config) -> None:
    """Checks that images hold more than the pictures that the network sees beside them.

    Raises:
      UserError: each picture would be the image itself.
    """
    shape = config.low_res_shape
    if shape == config.image_shape and config.data.condition == 'image':
        raise UserError(
            f'model.low_res_size: {shape[0]}x{shape[1]} is data.image_size, so the network would '
            'see the image that it should draw; expected a smaller size, or data.condition=grey'
        )


def area_weights(size: int, small: int) -> Float[np.ndarray, 'small size']:
    """Returns the matrix that shrinks one side of `size` pixels to `small` of them."""
    place, pixel = np.arange(small)[:, None], np.arange(size)[None]
    first, end = place * size // small, -(-(place + 1) * size // small)
    covered = (first <= pixel) & (pixel < end)
    return (covered / covered.sum(axis=1, keepdims=True)).astype(np.float32)


def enlarged(
    low_res: Float[Array, 'batch low_height low_width channels'], shape: tuple[int, ...]
) -> Float[Array, 'batch height width channels']:
    """Returns pictures at the size of images of this shape, by bilinear interpolation.

    As `F.interpolate(mode='bilinear')`: centres of pixels lie at halves, and beyond the outermost
    ones their value is kept.
    """
    return jax.image.resize(
        low_res, (*low_res.shape[:1], *shape[1:3], *low_res.shape[3:]), 'bilinear', antialias=False
    )
