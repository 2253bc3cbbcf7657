"""Makes and enlarges the pictures that a network sees beside the noisy images.

They are made of the images, or with `data.condition=folder:PATH` are those of another set, whose
channels follow those of the images in what a run loads. Their size changes by PyTorch's
`F.interpolate`, as in guided-diffusion (super_res_train.py and SuperResModel).
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
    config: Config, loaded: Float[Array, 'batch height width channels']
) -> Float[Array, 'batch low_height low_width low_channels'] | None:
    """Returns the pictures of images that `data.condition` names, of size `model.low_res_size`.

    None for a network that sees no pictures.

    Args:
      loaded: images, followed by their own pictures if they have any.
    """
    shape = config.low_res_shape
    if shape is None:
        return None
    images = loaded
    if config.data.condition == 'grey':
        images = grey(images)
    elif config.picture_path:
        images = loaded[..., config.model.image_channels :]
        if images.shape[1:] == shape:
            return images
    return shrunk(images, shape)


def shrunk(
    images: Float[Array, 'batch height width channels'], shape: tuple[int, ...]
) -> Float[Array, 'batch low_height low_width channels']:
    """Returns images at the size of this shape, at most their own.

    As `F.interpolate(mode='area')`: each pixel is the mean of all pixels that it covers, wholly or
    in part. If the sizes do not divide, neighbours share rows or columns.
    """
    rows, columns = (
        area_weights(*sizes) for sizes in zip(images.shape[1:3], shape[:2], strict=True)
    )
    return jnp.einsum(
        'ih,bhwc,jw->bijc', rows, images, columns, precision=jax.lax.Precision.HIGHEST
    )


def images_of(
    config: Config, loaded: Float[Array, 'batch height width channels']
) -> Float[Array, 'batch height width image_channels']:
    """Returns loaded images without the pictures that follow them."""
    return loaded[..., : config.model.image_channels] if config.picture_path else loaded


def grey(images: Float[Array, 'batch height width 3']) -> Float[Array, 'batch height width 3']:
    """Returns the brightness of images, in all three channels."""
    weights = jnp.asarray(BRIGHTNESS, images.dtype)
    brightness = jnp.einsum('bhwc,c->bhw', images, weights, precision=jax.lax.Precision.HIGHEST)
    return jnp.broadcast_to(brightness[..., None], images.shape)


def check_condition(config: Config) -> None:
    """Checks that a network sees pictures, if there are any, that are not the images themselves.

    Raises:
      UserError: each picture would be the image itself, or the network has no place for it.
    """
    shape = config.low_res_shape
    if config.picture_path and shape is None:
        raise UserError(
            f'model.low_res_size: missing beside data.condition={config.data.condition}; expected '
            'the size of the pictures that the network sees, at most data.image_size, and '
            'model.condition_channels'
        )
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
