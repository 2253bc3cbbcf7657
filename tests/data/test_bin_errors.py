"""Damaged, wrong and hostile .bin files of unet.cu, and their compressed form."""

from __future__ import annotations

import gzip
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from support.data_errors import cut, fails
from support.data_files import everything

from jaxunet.data import unetcu_bin
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError

HEADER = {0: 20240620, 1: 2, 2: 3, 3: 4, 4: 4}
BINS: dict[str, tuple[dict[int, int], int, str]] = {
    'model file': (
        {0: 12345678},
        0,
        r'magic \(byte 0\): 12345678, so this is a unet.cu model file \(weights\), expected a '
        r'data file',
    ),
    'magic': ({0: 7}, 0, r'magic \(byte 0\): expected 20240620 .*found 7'),
    'no images': ({1: 0}, 0, r'n_images \(byte 4\): expected 1 to 2147483647, found 0'),
    'negative images': ({1: -5}, 0, r'n_images \(byte 4\): .*found -5'),
    'channels': ({2: 0}, 0, r'channels \(byte 8\): expected 1 to 65536, found 0'),
    'height': ({3: -1}, 0, r'height \(byte 12\): .*found -1'),
    'width': ({4: 100000}, 0, r'width \(byte 16\): .*found 100000'),
    'more images': (
        {1: 3},
        0,
        r'payload: expected 1600 bytes for n_images=3, .*found 1408: truncated at byte 1408',
    ),
    'beyond 32 bits': (
        {1: 2**31 - 1, 3: 65536, 4: 65536},
        0,
        r'payload: expected 110680464390717703168 bytes .*truncated at byte 1408',
    ),
    'beyond 64 bits': (
        {1: 2**31 - 1, 2: 65536, 3: 65536, 4: 65536},
        0,
        r'payload: expected 2417851638103358442570752 bytes .*truncated at byte 1408',
    ),
    'cut off': ({}, -4, r'payload: expected 1408 bytes .*found 1404: truncated at byte 1404'),
    'too long': ({}, 5, r'payload: .*found 1413: 5 bytes too many from byte 1408'),
    'short header': ({}, -600, r'header: expected 1024 bytes, found 808: truncated at byte 808'),
    'two bytes': ({}, -1406, r'header: expected 1024 bytes, found 2'),
}


def write_bin(
    path: pathlib.Path, changes: dict[int, int] | None = None, values: np.ndarray | None = None
) -> pathlib.Path:
    header = np.zeros(256, '<i4')
    for index, value in {**HEADER, **(changes or {})}.items():
        header[index] = value
    values = np.zeros((2, 3, 4, 4), np.float32) + np.float32(1 / 255) if values is None else values
    path.write_bytes(header.tobytes() + values.astype('<f4').tobytes())
    return path


@pytest.mark.parametrize('case', BINS)
def test_bin(tmp_path, case):
    changes, extra, match = BINS[case]
    path = write_bin(tmp_path / 'x.bin', changes)
    data = path.read_bytes()
    path.write_bytes(data[:extra] if extra < 0 else data + bytes(extra))
    fails(path, rf'x.bin: (payload: )?{match}', shape=(4, 4, 3))


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 1.01, -1.01, 0.0, 3e38, 1 / 255 + 1e-4])
def test_bin_values(tmp_path, value):
    values = np.full((2, 3, 4, 4), 1 / 255, np.float32)
    values[1, 2, 3, 1] = value
    path = write_bin(tmp_path / 'x.bin', values=values)
    fails(
        path,
        r'image 1, channel 2, row 3, column 1 \(byte 1396\): expected pixel / 127.5 - 1 .*found',
        shape=(4, 4, 3),
    )


GZ_BINS: dict[str, tuple[dict[int, int], Callable[[bytes], bytes], str]] = {
    'model file': ({0: 12345678}, gzip.compress, r'magic \(byte 0\): 12345678, so this is a'),
    'cut before gzip': (
        {},
        lambda data: gzip.compress(data[:-4]),
        r'payload: expected 1408 bytes .*found 1404: truncated at byte 1404',
    ),
    'cut after gzip': ({}, lambda data: gzip.compress(data)[:-9], 'not a readable .gz file: Compr'),
    'no gzip': ({}, bytes, 'not a readable .gz file: Not a gzipped file'),
    'too long': (
        {},
        lambda data: gzip.compress(data + b'1'),
        r'payload: .*found more: bytes too many from byte 1408',
    ),
    'large': ({1: 2**31 - 1}, gzip.compress, '2147483647 images of 4x4x3 exceed 8589934592 bytes'),
}


@pytest.mark.parametrize('case', GZ_BINS)
def test_compressed_bin(tmp_path, case):
    changes, pack, match = GZ_BINS[case]
    path = tmp_path / 'x.bin.gz'
    path.write_bytes(pack(write_bin(tmp_path / 'x.bin', changes).read_bytes()))
    fails(path, rf'x.bin.gz: {match}', shape=(4, 4, 3))


def test_values_of_a_compressed_bin(tmp_path, monkeypatch):
    """The wrong value is in the second part that is decoded."""
    monkeypatch.setattr(unetcu_bin, 'CHUNK', 3 * 4 * 4)
    values = np.full((2, 3, 4, 4), 1 / 255, np.float32)
    values[1, 2, 3, 1] = 2
    path = tmp_path / 'x.bin.gz'
    path.write_bytes(gzip.compress(write_bin(tmp_path / 'x.bin', values=values).read_bytes()))
    fails(path, r'image 1, channel 2, row 3, column 1 \(byte 1396\)', shape=(4, 4, 3))


def test_bin_of_other_channels(tmp_path):
    path = write_bin(tmp_path / 'x.bin', {2: 2}, np.full((2, 2, 4, 4), -1, np.float32))
    fails(path, r'images have 2 channels, but model.image_channels is 1', shape=(4, 4, 1))


def test_a_bin_that_shrinks_while_in_use(tmp_path):
    path = write_bin(tmp_path / 'x.bin')
    source = open_source(str(path), image_shape=(4, 4, 3))
    data = pickle.dumps(source)
    cut(path, 1100)
    with pytest.raises(
        UserError, match=r'x.bin: ends at byte 1100, expected 192 bytes .* it was changed since'
    ):
        everything(pickle.loads(data))
