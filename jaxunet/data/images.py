"""Turns the model's output into pixels, grids and files.

Pixels are uint8, or uint16 if `data.bits=16`. Where `data.background=keep`, models see and draw
colours multiplied by the opacity in the fourth channel; files have plain colours.

Every file or folder takes its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from pathlib import Path

import numpy as np
from jaxtyping import ArrayLike, Float32, Integer, Shaped, UInt, UInt8
from PIL import Image

from jaxunet.data.png16 import write_png16
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import check_local, expanded, is_remote
from jaxunet.runtime.upload import check_uploadable, uploaded
from jaxunet.runtime.whole_files import written

GAP = 2  # pixels between the images of a grid
TINY = 32  # pixels; a grid enlarges images with a shorter side than this
ENLARGED = 48  # pixels; least shorter side of an enlarged image

SUFFIXES = ('.png', '.npz', '.npy')  # one grid, arrays

MAX_CLASS_COLUMNS = 20  # classes, for a grid whose columns have one class each

# uint8 or uint16; `_check_pixels` reports other types.
Pixels = Shaped[np.ndarray, '...']
Labels = Integer[np.ndarray, ' labels']


def to_pixels(
    images: ArrayLike, dtype: np.dtype, *, truncate: bool = False
) -> UInt[np.ndarray, '*shape']:
    """Converts images in [−1, 1] to pixels: round((x + 1) · top / 2), clipped to 0..top.

    Args:
      dtype: uint8 or uint16, whose largest number is top.
      truncate: cut the fraction off instead of rounding.

    Raises:
      UserError: there is a NaN.
    """
    values = np.asarray(images).astype(np.float32)
    if np.isnan(values).any():
        raise UserError(
            f'images: {np.isnan(values).mean():.2%} of the pixels are NaN; '
            'the weights are damaged or training has diverged'
        )
    top = np.iinfo(dtype).max
    scaled = (values + 1) * np.float32(top / 2)
    whole = np.trunc(scaled) if truncate else np.rint(scaled)
    return np.clip(whole, 0, top).astype(dtype)


def from_pixels(pixels: UInt[np.ndarray, '*shape']) -> Float32[np.ndarray, '*shape']:
    """Converts pixels to [−1, 1], as the training step does."""
    return pixels.astype(np.float32) / np.float32(np.iinfo(pixels.dtype).max / 2) - np.float32(1)


def plain_colours(pixels: UInt[np.ndarray, '*shape 4']) -> UInt[np.ndarray, '*shape 4']:
    """Divides colours by the opacity in the fourth channel; those that are hidden become black.

    Reading the result again gives the same pixels, where no colour exceeds the opacity.
    """
    top = np.iinfo(pixels.dtype).max
    opacity = pixels[..., 3:].astype(np.float64)
    colours = np.minimum(pixels[..., :3], pixels[..., 3:]) * (top / np.maximum(opacity, 1))
    return np.concatenate([np.rint(colours).astype(pixels.dtype), pixels[..., 3:]], axis=-1)


def for_eyes(pixels: Pixels) -> UInt8[np.ndarray, '*shape channels']:
    """Returns pixels with 8 bits, and on white if they have an opacity."""
    if pixels.dtype == np.uint16:
        pixels = ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if pixels.shape[-1] != 4:
        return pixels
    opacity = pixels[..., 3:].astype(np.float32) / 255
    return np.rint(pixels[..., :3] * opacity + 255 * (1 - opacity)).astype(np.uint8)


def class_columns(classes: int, count: int) -> int | None:
    """Returns the columns of a grid of `count` samples of all classes in turn, for `grid`.

    Each column has one class. With few classes, several columns have the same one, so that the grid
    is about a square. Returns None for one class, none or too many; `grid` then makes a square.
    """
    if not 1 < classes <= MAX_CLASS_COLUMNS:
        return None
    return classes * max(round(math.sqrt(count) / classes), 1)


def grid(
    images: Pixels, columns: int | None = None
) -> UInt8[np.ndarray, 'grid_height grid_width channels']:
    """Arranges images in a grid with small white gaps; tiny images are enlarged by a whole factor.

    Args:
      images: pixels (N, height, width, channels), shown with 8 bits and on white (`for_eyes`).
      columns: images per row; None = about a square.

    Raises:
      UserError: no images, or fewer than one column.
    """
    _check_pixels(images)
    if len(images) == 0:
        raise UserError('images: expected at least one for a grid, found none')
    columns = math.ceil(math.sqrt(len(images))) if columns is None else columns
    if columns < 1:
        raise UserError(f'columns: expected 1 or more, found {columns}')
    images = for_eyes(images)
    side = min(images.shape[1:3])
    factor = math.ceil(ENLARGED / side) if side < TINY else 1
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    count, height, width, channels = images.shape
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    canvas = np.full(
        (rows * (height + GAP) + GAP, columns * (width + GAP) + GAP, channels), 255, np.uint8
    )
    for i, image in enumerate(images):
        top, left = GAP + i // columns * (height + GAP), GAP + i % columns * (width + GAP)
        canvas[top : top + height, left : left + width] = image
    return canvas


def save_png(path: str | os.PathLike[str], array: Pixels) -> None:
    """Writes a grey (H, W) or (H, W, 1), an RGB or an RGBA array as PNG; creates its folder.

    Raises:
      UserError: another number of channels, or the file cannot be written.
    """
    with _written(Path(path)) as partial:
        partial.write_bytes(_png(array))


def save_images(
    path: str | os.PathLike[str],
    images: Pixels,
    labels: Labels | None = None,
    *,
    columns: int | None = None,
    reading: Reading = PLAIN,
) -> None:
    """Saves pixels (N, H, W, C) in the form that the path's suffix names.

    - `X.png`: one grid (`columns` as in `grid`), without the labels.
    - `X.npz`: arrays `images` and, if given, `labels` (int32), which `data.path` reads.
    - `X.npy`: the images, without the labels.
    - no suffix, a / at the end, or another empty folder: a folder of `000000.png`, ... or, with
      labels, `000000_class7.png`, ...

    Raises:
      UserError: see `check_output`, channels that PNG lacks, or a failed write.
      ValueError: labels that do not fit the images, or images that are no pixels.
    """
    check_output(path)
    path = expanded(path)
    if is_remote(path):
        with uploaded(path) as copy:
            output = f'{copy}/' if _names_folder(path) else copy
            save_images(output, images, labels, columns=columns, reading=reading)
        return
    folder, path = _names_folder(path), Path(path)
    _check_pixels(images)
    if labels is not None and labels.shape != images.shape[:1]:
        raise ValueError(f'labels: expected shape {images.shape[:1]}, found {labels.shape}')
    if folder:
        _save_folder(path, reading.stored(images), labels)
    elif path.suffix.lower() == '.png':
        save_png(path, grid(images, columns))
    else:
        values = reading.stored(images)
        with _written(path) as partial, partial.open('wb') as file:
            if path.suffix.lower() == '.npy':
                np.save(file, values)
            elif labels is None:
                np.savez(file, images=values)
            else:
                np.savez(file, images=values, labels=labels.astype(np.int32))


def check_output(
    path: str | os.PathLike[str], channels: int | None = None, reading: Reading = PLAIN
) -> None:
    """Checks that `save_images` accepts this path, so that a command fails before its work.

    Args:
      channels: of the images; None if they are not known yet.
      reading: that of the model's images.

    Raises:
      UserError: an unknown suffix, a folder with files in it, a folder with the name of a .png or
        .npz, a file with the name of a folder, or channels that PNG lacks.
    """
    path = expanded(path)
    if is_remote(path):
        check_uploadable(path)
    else:
        check_local(path, '')
    folder, path = _names_folder(path), Path(path)
    if path.is_dir():
        if not folder:
            raise UserError(
                f'{path}: is a folder; name a file, or put a / at the end to write one PNG an '
                'image into it'
            )
        if any(path.iterdir()):
            raise UserError(
                f'{path}: expected a new or empty folder, found files in it, which would mix with '
                'these images; choose another'
            )
    elif folder and path.exists():
        raise UserError(
            f'{path}: is a file; name a folder (one PNG an image), .png (one grid), .npz or .npy '
            '(arrays)'
        )
    elif not folder and path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f'{path}: expected a name that ends in .png (one grid), .npz or .npy (arrays), '
            f'or a folder (one PNG an image), found {path.suffix!r}; a / at the end makes it a '
            'folder'
        )
    if channels is not None and (folder or path.suffix.lower() == '.png'):
        _check_channels(f'{path}: PNG', channels, reading)
    if channels is not None and folder and reading.bits == 16 and not reading.is_whole:
        raise UserError(
            f'{path}: PNG: expected a data.range of whole numbers from 0 to 65535, found '
            f'{reading.range[0]:g},{reading.range[1]:g}; save as .npz or .npy'
        )


def _names_folder(path: str | os.PathLike[str]) -> bool:
    """Returns True for a name without a suffix, one that ends in a slash, and an existing folder.

    `Path` drops the slash, without which samples_0.15/ has the suffix .15. A name that ends in .png
    or .npz means a file, even if there is a folder.
    """
    suffix = Path(path).suffix.lower()
    existing = suffix not in SUFFIXES and Path(path).is_dir()
    return os.fspath(path).endswith('/') or existing or suffix == ''


def _save_folder(path: Path, images: Pixels, labels: Labels | None) -> None:
    with _written(path) as partial:
        partial.mkdir()
        for i, image in enumerate(images):
            name = f'{i:06d}.png' if labels is None else f'{i:06d}_class{labels[i]}.png'
            (partial / name).write_bytes(_png(image))


def _check_pixels(images: np.ndarray) -> None:
    if images.dtype not in (np.uint8, np.uint16) or images.ndim != 4:
        raise ValueError(
            'images: expected uint8 or uint16 of shape (N, height, width, channels), '
            f'found {images.dtype} of shape {images.shape}'
        )


def _png(array: np.ndarray) -> bytes:
    """Returns a PNG file of 8 or 16 bits."""
    if array.dtype not in (np.uint8, np.uint16) or array.ndim not in (2, 3):
        raise ValueError(
            'image: expected uint8 or uint16 of shape (height, width[, channels]), '
            f'found {array.dtype} of shape {array.shape}'
        )
    array = array[..., None] if array.ndim == 2 else array
    if array.shape[2] != 4:
        _check_channels('PNG', array.shape[2])
    if array.dtype == np.uint16:
        return write_png16(array)
    file = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2] == 1 else array))
    image.save(file, format='PNG')
    return file.getvalue()


def _check_channels(where: str, channels: int, reading: Reading = PLAIN) -> None:
    if channels not in (1, 3) and not reading.keeps:
        raise UserError(
            f'{where}: expected images with 1 channel (grey) or 3 (RGB), found {channels}; '
            'save as .npz or .npy, which take any number'
        )


def _written(path: Path) -> contextlib.AbstractContextManager[Path]:
    """Yields a temporary name beside the file or folder that a path, or link, leads to."""
    return written(path.resolve())
