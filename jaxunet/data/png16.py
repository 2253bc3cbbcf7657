"""PNG of 16 bits a channel with colours or opacity, of which Pillow keeps 8 bits.

Every filter of PNG works on bytes, and combines a byte only with bytes of the same place in other
pixels. So the high bytes of all values, with the filters of their rows, are a PNG of 8 bits of
their own, and the low bytes are another; Pillow decodes both (PNG specification, section 9).
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from jaxtyping import UInt8, UInt16
from PIL import Image

SIGNATURE = b'\x89PNG\r\n\x1a\n'
TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # colour type by number of channels
CHANNELS = {colour: channels for channels, colour in TYPES.items()}
SUB = 1  # filter: each byte is stored as its difference from the pixel on the left


def read_png16(data: bytes) -> UInt16[np.ndarray, 'height width channels']:
    """Returns the values of a PNG file of 16 bits a channel; grey or RGB, opacity last.

    Raises:
      ValueError: damaged, interlaced, or of other bits; other exceptions of zlib, struct and
        Pillow are possible.
    """
    at, packed, header = len(SIGNATURE), [], (0, 0, 0, 0, 0, 0, 0)
    while at < len(data):
        (size,), kind = struct.unpack_from('>I', data, at), data[at + 4 : at + 8]
        content = data[at + 8 : at + 8 + size]
        if kind == b'IHDR':
            header = struct.unpack('>IIBBBBB', content)
        elif kind == b'IDAT':
            packed.append(content)
        at += size + 12
    width, height, bits, colour, _, _, interlaced = header
    if bits != 16 or colour not in CHANNELS:
        raise ValueError(f'expected 16 bits a channel, found {bits}')
    if interlaced:
        raise ValueError('interlaced with 16 bits a channel, which is not supported; save it plain')
    channels = CHANNELS[colour]
    row = 1 + 2 * channels * width
    stream = zlib.decompressobj().decompress(b''.join(packed), height * row)
    if len(stream) < height * row:
        raise ValueError(f'truncated: {len(stream)} of {height * row} bytes of pixels')
    rows = np.frombuffer(stream, np.uint8).reshape(height, row)
    high, low = (_eight_bits(rows, first, width, channels) for first in (1, 2))
    return high.astype(np.uint16) << 8 | low


def _eight_bits(
    rows: UInt8[np.ndarray, 'height bytes'], first: int, width: int, channels: int
) -> UInt8[np.ndarray, 'height width channels']:
    """Decodes every other byte of filtered rows, from `first` on."""
    half = np.concatenate([rows[:, :1], rows[:, first::2]], axis=1)
    data = _file(width, len(rows), 8, channels, zlib.compress(half.tobytes(), 0))
    with Image.open(io.BytesIO(data), formats=('PNG',)) as image:
        return np.asarray(image).reshape(len(rows), width, channels)


def write_png16(values: UInt16[np.ndarray, 'height width channels']) -> bytes:
    """Returns a PNG file of grey or RGB values of 16 bits, with opacity last if there is any."""
    height, width, channels = values.shape
    raw = np.frombuffer(values.astype('>u2').tobytes(), np.uint8)
    raw = raw.reshape(height, width, 2 * channels)
    rows = np.diff(raw, axis=1, prepend=np.zeros_like(raw[:, :1])).reshape(height, -1)
    filtered = np.concatenate([np.full((height, 1), SUB, np.uint8), rows], axis=1)
    return _file(width, height, 16, channels, zlib.compress(filtered.tobytes()))


def _file(width: int, height: int, bits: int, channels: int, packed: bytes) -> bytes:
    header = struct.pack('>IIBBBBB', width, height, bits, TYPES[channels], 0, 0, 0)
    parts = [SIGNATURE]
    for kind, content in ((b'IHDR', header), (b'IDAT', packed), (b'IEND', b'')):
        crc = struct.pack('>I', zlib.crc32(kind + content))
        parts += [struct.pack('>I', len(content)), kind, content, crc]
    return b''.join(parts)
