"""Loads images with classes into memory, for `jaxunet.metrics.classifier_training`."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from jaxunet.data.pipeline import images_bytes, load_all
from jaxunet.data.source import Source
from jaxunet.metrics.image_sets import open_images
from jaxunet.runtime.errors import UserError

MAX_BYTES = 8 * 2**30  # bytes of pixels, which are kept on the device
HELD_OUT = 10  # one image in ten is held out


class Images(NamedTuple):
    """Images and their labels, in host memory."""

    images: UInt8[np.ndarray, 'images height width 3']
    labels: Int[np.ndarray, ' images']


def load(flag: str, path: str) -> tuple[Images, tuple[str, ...]]:
    """Loads all images with their labels, and the names of the classes.

    Args:
      flag: the option that gave the path, for messages.

    Raises:
      UserError: no classes, images smaller than 4 pixels, or more than `MAX_BYTES` of pixels.
    """
    with open_images(path) as source:
        _check(flag, path, source)
        images, labels = load_all(source, progress=True)
        return Images(np.asarray(images), np.asarray(labels)), source.class_names


def _check(flag: str, path: str, source: Source) -> None:
    if len(source.class_names) < 2 or (source.labels < 0).any():
        why = f', as {source.unlabelled_by}' if source.unlabelled_by else ''
        raise UserError(
            f'{flag}: {path}: expected images of two classes or more, '
            f'found {len(source.class_names) or "none"}{why}; '
            'put each class into its own folder'
        )
    if min(source.image_shape[:2]) < 4:
        raise UserError(
            f'{flag}: {path}: expected images of 4 pixels a side or more, '
            f'found {source.image_shape[0]}x{source.image_shape[1]}'
        )
    if (size := images_bytes(source)) > MAX_BYTES:
        raise UserError(
            f'{flag}: {path}: {size / 2**30:.1f} GiB of pixels, more than the '
            f'{MAX_BYTES / 2**30:g} accepted; reduce the images with python -m jaxunet.prepare_data'
        )


def split(images: Images, seed: int) -> tuple[Images, Images]:
    """Splits the images at random into nine tenths and one tenth.

    Raises:
      UserError: fewer than 20 images.
    """
    count = len(images.images)
    if count < 2 * HELD_OUT:
        raise UserError(f'--reference: {count} images are too few to hold some out; give --test')
    order = np.random.default_rng(seed).permutation(count)
    held, rest = np.sort(order[: count // HELD_OUT]), np.sort(order[count // HELD_OUT :])
    return Images(images.images[rest], images.labels[rest]), Images(
        images.images[held], images.labels[held]
    )


def fingerprint(images: Images) -> str:
    """Returns the SHA-256 of the pixels and labels, hexadecimal."""
    digest = hashlib.sha256(np.ascontiguousarray(images.images).data)
    digest.update(np.ascontiguousarray(images.labels, '<i4').data)
    return digest.hexdigest()
