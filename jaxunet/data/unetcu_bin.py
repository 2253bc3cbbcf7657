"""Reads and writes unet.cu's data file (clu0/unet.cu, prepare_data.py).

An int32[256] header holds magic 20240620, n, channels, height, width and zeros. Then follow
n · C · H · W float32, channel-first, as pixel / 127.5 − 1. Everything is little-endian.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from jaxunet.data.pixels import Batch, Crops, Pixels, Shape, check_fit, fit
from jaxunet.data.source import MappedArray, Source, no_labels
from jaxunet.runtime.errors import UserError

MAGIC = 20240620
MODEL_MAGIC = 12345678  # of unet.cu's model files
HEADER_BYTES = 1024
MAX_SIDE = 2**16
FIELDS = {1: 'n_images', 2: 'channels', 3: 'height', 4: 'width'}  # index in the header -> name
TOLERANCE = 1e-3  # largest distance of a value from a whole grey level


class BinSource(Source):
    """The images of a data file, read from disk when loaded.

    Args:
      image_shape: (height, width, channels) that `load` returns.

    Raises:
      UserError: another kind of file, a size that contradicts the header, or values that are not
        8-bit pixels; `load` raises it too.
    """

    def __init__(self, path: Path, image_shape: Shape) -> None:
        self.name, self.image_shape = str(path), image_shape
        n, channels, height, width = read_header(path)
        check_fit((height, width, channels), image_shape, str(path))
        self._values = MappedArray(path, '<f4', (n, channels, height, width), HEADER_BYTES)
        self.labels = no_labels(n)
        # A file in another scale or layout fails here, not in the middle of training.
        self.load(np.unique([0, n - 1]))

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Reads the images at these indices; see `Source.load`.

        Raises:
          UserError: values that are not 8-bit pixels.
        """
        values = self._values[indices]
        with np.errstate(all='ignore'):
            pixels = (values + np.float32(1)) * np.float32(127.5)
            rounded = np.rint(pixels)
            # NaN fails these comparisons.
            good = (np.abs(pixels - rounded) <= TOLERANCE) & (rounded >= 0) & (rounded <= 255)
        if not good.all():
            row, *place = (int(i) for i in np.argwhere(~good)[0])
            raise self._bad_value(int(indices[row]), tuple(place), float(values[(row, *place)]))
        return fit(
            np.ascontiguousarray(rounded.astype(np.uint8).transpose(0, 2, 3, 1)),
            self.image_shape,
            self.name,
            crops,
        )

    def stored_size(self, index: int) -> tuple[int, int]:
        """Returns the size that the header gives to all images."""
        return self._values.shape[2], self._values.shape[3]

    def _bad_value(self, image: int, place: tuple[int, ...], value: float) -> UserError:
        shape = self._values.shape
        flat = int(np.ravel_multi_index((image, *place), shape))
        return UserError(
            f'{self.name}: image {image}, channel {place[0]}, row {place[1]}, column {place[2]} '
            f'(byte {HEADER_BYTES + 4 * flat}): expected pixel / 127.5 - 1 of a pixel 0 to 255, '
            f'found {value!r}; write the file again with `python -m jaxunet.prepare_data`'
        )


def read_header(path: Path) -> tuple[int, int, int, int]:
    """Reads (n, channels, height, width) of a data file and checks them against its length.

    Raises:
      UserError: a wrong field, named with its byte, expected and found.
    """
    with path.open('rb') as file:
        raw = file.read(HEADER_BYTES)
        size = file.seek(0, 2)
    if len(raw) >= 4:
        magic = int.from_bytes(raw[:4], 'little', signed=True)
        if magic == MODEL_MAGIC:
            raise UserError(
                f'{path}: magic (byte 0): {MODEL_MAGIC}, so this is a unet.cu model file '
                f'(weights), expected a data file ({MAGIC}); '
                'weights go to init_from or --checkpoint'
            )
        if magic != MAGIC:
            raise UserError(
                f'{path}: magic (byte 0): expected {MAGIC} (a unet.cu data file), found {magic}'
            )
    if len(raw) < HEADER_BYTES:
        raise UserError(
            f'{path}: header: expected {HEADER_BYTES} bytes, found {len(raw)}: '
            f'truncated at byte {len(raw)}; copy it again'
        )
    header = np.frombuffer(raw, '<i4')
    sizes = [int(header[i]) for i in FIELDS]
    for (i, name), value in zip(FIELDS.items(), sizes, strict=True):
        most = 2**31 - 1 if name == 'n_images' else MAX_SIDE
        if not 1 <= value <= most:
            raise UserError(f'{path}: {name} (byte {4 * i}): expected 1 to {most}, found {value}')
    n, channels, height, width = sizes
    expected = HEADER_BYTES + n * channels * height * width * 4
    if size != expected:
        what = (
            f'truncated at byte {size}'
            if size < expected
            else f'{size - expected} bytes too many from byte {expected}'
        )
        raise UserError(
            f'{path}: payload: expected {expected} bytes for n_images={n}, channels={channels}, '
            f'height={height}, width={width}, found {size}: {what}; copy or write it again'
        )
    return n, channels, height, width


def header_bytes(n: int, shape: Shape) -> bytes:
    """Returns the 1024-byte header of a file of n images of shape (height, width, channels)."""
    header = np.zeros(HEADER_BYTES // 4, '<i4')
    header[:5] = MAGIC, n, shape[2], shape[0], shape[1]
    return header.tobytes()


def to_values(image: Pixels) -> Float[np.ndarray, 'channels height width']:
    """Converts one image to the file's values, with unet.cu's order of float32 operations."""
    return (image.astype('<f4') / np.float32(127.5) - np.float32(1)).transpose(2, 0, 1)
