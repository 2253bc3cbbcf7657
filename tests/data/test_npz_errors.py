"""Damaged, wrong and hostile .npz files."""

from __future__ import annotations

import pathlib
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from support.data_errors import change, cut, fails
from support.data_files import random_pixels, write_zip

from jaxunet.data import npz

IMAGES = random_pixels(0, (4, 8, 8, 3))
LABELLED = {'images': IMAGES, 'labels': np.arange(4)}
NPZ: dict[str, tuple[dict[str, object], str]] = {
    'other name': (
        {'image': IMAGES},
        r'no array "images" \(or "arr_0"\), found image; did you mean "image"',
    ),
    'two names': (
        {'images': IMAGES, 'arr_0': IMAGES},
        r'expected one of images and arr_0, found both',
    ),
    'floats': (
        {'images': IMAGES / 128},
        r'expected values from 0 to 1, the range of float64 without data.range, found 0 to 1.9',
    ),
    'integers': (
        {'images': IMAGES.astype(np.int64)},
        r'int64 has no usual range of pixels; set data.range to',
    ),
    'signs': ({'images': IMAGES > 9}, r'expected dtype uint8 .*, uint16 or floats, found bool'),
    'objects': ({'images': np.array([1, 'x'], object)}, r'expected dtype uint8 .*found object'),
    'rank 2': (
        {'images': IMAGES[0, 0]},
        r'expected shape \(n, height, width, channels\).*found \(8, 3\)',
    ),
    'one image': (
        {'images': IMAGES[0]},
        r'found shape \(8, 8, 3\), which is one image .* store images\[None\]',
    ),
    'rank 5': ({'images': IMAGES[None]}, r'found \(1, 4, 8, 8, 3\)'),
    'no images': (
        {'images': IMAGES[:0]},
        r'expected at least one image and one pixel, found shape \(0, 8, 8, 3\)',
    ),
    'channels': (
        {'images': random_pixels(0, (4, 8, 8, 2))},
        r'images have 2 channels, but model.image_channels is 3',
    ),
    'label count': (
        {'images': IMAGES, 'labels': np.arange(3)},
        r'labels: expected shape \(4,\), one for each image, found \(3,\)',
    ),
    'label type': (
        {'images': IMAGES, 'labels': np.ones(4)},
        r'labels: expected integers, .*found float64; convert them by \.astype\(int\)',
    ),
    'label bytes': (
        {'images': IMAGES, 'labels': np.array([b'cat'] * 4)},
        r'labels: expected integers, .*found \|S3; .* or \.astype\(str\)',
    ),
    'label empty': (
        {'images': IMAGES, 'labels': np.array(['cat', ' ', 'cat', 'cat'])},
        r'labels: expected names of classes, found an empty one',
    ),
    'label unnamed': (
        {'images': IMAGES, 'labels': np.array(list('aacb')), 'class_names': np.array(['a', 'b'])},
        r"labels: class_names lacks 'c'; add it",
    ),
    'label below': (
        {'images': IMAGES, 'labels': np.array([0, 1, -2, 0])},
        r'labels: expected 0 to .*found -2',
    ),
    'label above': (
        {'images': IMAGES, 'labels': np.array([0, 1, 2**40, 0])},
        r'labels: expected 0 to .*found 1099511627776',
    ),
    'label objects': (
        {'images': IMAGES, 'labels': np.array([{}] * 4, object)},
        r'found Python objects, which are never unpickled; .*\.astype\(str\)',
    ),
    'too few names': (
        {**LABELLED, 'class_names': np.array(['a', 'b'])},
        r'found 3, but class_names has 2 names',
    ),
    'a name twice': (
        {**LABELLED, 'class_names': np.array(['a', 'b', 'a', 'c'])},
        r'class_names: expected different names, found a, b, a, c',
    ),
    'names': (
        {**LABELLED, 'class_names': np.arange(4)},
        r'class_names: expected a list of strings, found int64',
    ),
}


@pytest.mark.parametrize('case', NPZ)
def test_npz(tmp_path, case):
    arrays, match = NPZ[case]
    np.savez(tmp_path / 'x.npz', **arrays)
    fails(tmp_path / 'x.npz', rf'x.npz: .*{match}', shape=(8, 8, 3))


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_damaged_npz(tmp_path, save, monkeypatch):
    path = tmp_path / 'x.npz'
    for damage, match in (
        (lambda: cut(path, 300), r'not a readable .npz file'),
        (lambda: path.write_bytes(b'\x93NUMPY' * 30), r'not a readable .npz file'),
        (lambda: write_zip(path, {'images.npy': b'\x93NUMPY\x01\0'}), r'not a readable .npz file'),
        (
            lambda: write_zip(path, {'images.npy': b'\x93NUMPY\x07\0' + b' ' * 90}),
            r'images: expected .npy format 1 to 3, found \(7, 0\)',
        ),
        (
            lambda: claim(path, '(4000000000, 8, 8, 3)', save),
            r'shape \(4000000000, 8, 8, 3\) takes 768000000000 bytes, found 768',
        ),
        (lambda: claim(path, '(-4, 8, 8, -3)', save), r'expected sizes of 0 or more'),
    ):
        save(path, images=IMAGES)
        damage()
        fails(path, match, shape=(8, 8, 3))
    save(path, images=IMAGES)
    monkeypatch.setattr(npz, 'MAX_MEMORY', 100)
    if save is np.savez_compressed:
        fails(
            path,
            r'more than the .* GiB accepted for a compressed array; save it by np.savez',
            shape=(8, 8, 3),
        )


def claim(path: pathlib.Path, shape: str, save: Callable) -> None:
    """Rewrites the array's header to another shape, leaving its pixels."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + '\n'
    data = b'\x93NUMPY\x01\0' + struct.pack('<H', len(header)) + header.encode() + IMAGES.tobytes()
    write_zip(
        path, {'images.npy': data}, zipfile.ZIP_STORED if save is np.savez else zipfile.ZIP_DEFLATED
    )


def test_a_compressed_npz_with_a_wrong_checksum(tmp_path):
    np.savez_compressed(tmp_path / 'x.npz', images=np.zeros((4, 8, 8, 3), np.uint8))
    change(tmp_path / 'x.npz', (tmp_path / 'x.npz').read_bytes().index(b'PK\x01\x02') + 16, b'abcd')
    fails(tmp_path / 'x.npz', r'not a readable .npz file: Bad CRC-32', shape=(8, 8, 3))
