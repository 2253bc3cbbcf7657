"""Opens images for comparison: at their own size, without the cropping and resizing of training."""

from __future__ import annotations

import contextlib
import gzip
import math
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from jaxunet.data import cifar10
from jaxunet.data.containers import Container
from jaxunet.data.crop import Crop, Pixels
from jaxunet.data.image_files import ImageFiles, report_skipped
from jaxunet.data.images import ENLARGED, GAP, TINY
from jaxunet.data.npz import array_shape
from jaxunet.data.open_files import TAR, open_container
from jaxunet.data.pixels import BadImage, open_image, size_of
from jaxunet.data.source import ArraySource, Source
from jaxunet.data.sources import open_source
from jaxunet.data.tar import TarArchive, compression, decompress
from jaxunet.data.unetcu_bin import HEADER_BYTES, parse_header, read_header
from jaxunet.runtime import archives
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.remote import on_disk
from jaxunet.runtime.untrusted import one_line

Size = tuple[int, int]  # height, width


@contextlib.contextmanager
def open_images(path: str, *, grid_size: Size | None = None) -> Iterator[Source]:
    """Opens all images of `path` as RGB, at the one size that they share.

    Args:
      path: anything that `data.path` accepts (folder, .zip, .tar(.gz|.xz), several .tar, .npz,
        .npy, unet.cu's .bin or .bin.gz, digits:, cifar10:[PATH], cifar10_test:[PATH]), or a .png
        grid made by `jaxunet.data.images.grid`. A compressed tar is unpacked into a temporary
        folder, which is removed with the context.
      grid_size: (height, width) of the images in a .png grid.

    Raises:
      UserError: a wrong path, images of several sizes (when loaded), an array of other than 1 or 3
        channels, or a .png that is not such a grid.
    """
    file = Path(on_disk(path))
    if file.suffix.lower() == '.png' and file.is_file():
        if grid_size is None:
            raise UserError(
                f'{path}: a grid does not state the size of its images; '
                'give --image_size HEIGHT,WIDTH'
            )
        yield ArraySource(path, read_grid(file, grid_size), (*grid_size, 3))
        return
    prefix, unprefixed = cifar10.split_path(path)
    local = Path(on_disk(unprefixed))
    if path == 'digits:':
        yield open_source(path, image_shape=(8, 8, 3))
    elif prefix == cifar10.TEST or (
        prefix and (not unprefixed or (_is_set(local) and cifar10.is_official(local)))
    ):
        yield open_source(path, image_shape=(32, 32, 3))
    elif local.name.lower().endswith(TAR) and local.is_file() and compression(local):
        with tempfile.TemporaryDirectory(prefix='jaxunet.') as folder:
            plain = Path(folder) / 'unpacked.tar'
            decompress(local, plain)
            yield SameSize(TarArchive(plain, str(local)))
    elif not re.fullmatch(r'(\w+:)?', path) and (container := open_container(local)) is not None:
        yield SameSize(container)
    else:
        yield open_source(str(local) if path else path, image_shape=_array_shape(local))


class SameSize(ImageFiles):
    """Image files that share the size of the first.

    Another size is an error on `load`, because resizing would change what is measured.
    """

    def __init__(self, container: Container) -> None:
        height, width = _first_size(container)
        super().__init__(container, (height, width, 3), strip_leading=True)
        report_skipped(self.name, self.skipped)

    def _one(self, i: int, crop: Crop) -> Pixels:
        data, name = self._container.read(i), self._container.describe(i)
        if (found := size_of(data, name)) != (wanted := self.image_shape[:2]):
            raise UserError(
                f'{name}: expected {wanted[0]}x{wanted[1]} pixels (height x width) as the first '
                f'image has, found {found[0]}x{found[1]}; bring all to one size: python -m '
                f'jaxunet.prepare_data --input {shlex.quote(self.name)} --output images.npz '
                '--image_size ...'
            )
        return super()._one(i, crop)


def read_grid(path: Path, size: Size) -> UInt8[np.ndarray, 'images height width 3']:
    """Reads the images of a grid that `jaxunet.data.images.save_images` wrote, row by row.

    Gaps and enlargement are undone; white cells at the end are unused and left out.

    Args:
      size: (height, width) of one image.

    Raises:
      UserError: not an image, or not a grid of images of this size.
    """
    height, width = size
    try:
        with open_image(path) as image:
            canvas = np.asarray(image.convert('RGB'))
    except Exception as error:  # Pillow raises nearly everything on damaged files
        raise BadImage(str(path), f'cannot be decoded: {one_line(error)}') from None
    factor = math.ceil(ENLARGED / min(size)) if min(size) < TINY else 1
    cell_height, cell_width = factor * height + GAP, factor * width + GAP
    rows, columns = (canvas.shape[0] - GAP) // cell_height, (canvas.shape[1] - GAP) // cell_width
    wrong = UserError(
        f'{path}: expected a grid of {height}x{width} images as jaxunet.sample writes it, '
        f'found {canvas.shape[0]}x{canvas.shape[1]} pixels that are no such grid; '
        'give --image_size, or a folder or .npz of the images'
    )
    if min(rows, columns) < 1 or canvas.shape[:2] != (
        rows * cell_height + GAP,
        columns * cell_width + GAP,
    ):
        raise wrong
    cells = (
        canvas[GAP:, GAP:]
        .reshape(rows, cell_height, columns, cell_width, 3)
        .swapaxes(1, 2)
        .reshape(-1, cell_height, cell_width, 3)
    )
    images = cells[:, :-GAP:factor, :-GAP:factor]
    enlarged = images.repeat(factor, axis=1).repeat(factor, axis=2)
    gaps = (canvas[:GAP], canvas[:, :GAP], cells[:, -GAP:], cells[:, :, -GAP:])
    if any((gap != 255).any() for gap in gaps) or (enlarged != cells[:, :-GAP, :-GAP]).any():
        raise wrong
    used = np.flatnonzero((images != 255).any(axis=(1, 2, 3)))
    if len(used) == 0:
        raise wrong
    return np.ascontiguousarray(images[: used[-1] + 1])


def _is_set(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.name.lower().endswith(TAR))


def _first_size(container: Container) -> Size:
    """Returns the size of the first readable image; (1, 1) if none, which `ImageFiles` reports."""
    for i in range(len(container)):
        with contextlib.suppress(BadImage):
            if not container.reason(i):
                return size_of(container.read(i), container.describe(i))
    return 1, 1


def _array_shape(path: Path) -> tuple[int, int, int]:
    """Returns the image shape in an .npz, .npy, .bin or .bin.gz.

    It is (1, 1, 3) if the file is unreadable; opening it reports why.

    Raises:
      UserError: an array of other than 1 or 3 channels.
    """
    shape = array_shape(path)
    if shape is not None and len(shape) == 4 and shape[3] not in (1, 3):
        opacity = '; images with opacity in a folder of PNG files are compared on white'
        raise UserError(
            f'{path}: expected images of 1 or 3 channels to compare, found {shape[3]}'
            + opacity * (shape[3] == 4)
        )
    if shape is not None and len(shape) in (3, 4) and min(shape) > 0:
        return shape[1], shape[2], 3
    with contextlib.suppress(*archives.ERRORS, OSError):
        if path.suffix.lower() == '.bin' and path.is_file():
            header = read_header(path)
            return header.height, header.width, 3
        elif path.name.lower().endswith('.bin.gz') and path.is_file():
            with gzip.open(path, 'rb') as file:
                header = parse_header(path, file.read(HEADER_BYTES))
            return header.height, header.width, 3
    return 1, 1, 3
