"""Damaged, wrong and hostile data files: each gives a UserError that says what is wrong where, and
what to do.
"""

from __future__ import annotations

import gzip
import os
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from support.data_files import (
    SHAPE,
    encoded,
    everything,
    official_files,
    put,
    python2_batch,
    random_pixels,
    write_folder,
    write_tar,
    write_zip,
)

from jaxunet.data import image_files, npz, unetcu_bin
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError

PNG = encoded(random_pixels(0))


def fails(
    path: object, match: str, *, shape: tuple[int, int, int] = SHAPE, classes: tuple[str, ...] = ()
) -> None:
    with pytest.raises(UserError, match=match) as caught:
        everything(open_source(str(path), image_shape=shape, classes=classes))
    assert 'Traceback' not in str(caught.value)
    assert len(str(caught.value)) < 1000


# ---- paths

PATHS = {
    'near miss': (
        '{dir}/elefants.zip',
        r'no such file or folder: .* has no "elefants.zip"; did you mean "elephants.zip"\?',
    ),
    'missing parent': ('{dir}/nothing/at/all', r'has no "nothing"'),
    'unknown set': ('digit:', r'unknown set "digit:"; did you mean "digits:"\?'),
    'empty path': ('', r'expected a folder of images, .* found an empty path'),
    'text file': (
        '{dir}/notes.txt',
        r'notes.txt: unknown kind of file ".txt", expected a folder of images',
    ),
    'no suffix': ('{dir}/plain', r'unknown kind of file ""'),
    'one image': ('{dir}/image.png', r'image.png: is one image, expected many; give the folder'),
    'weights': ('{dir}/model.safetensors', r'holds weights, expected images.*init_from'),
    'empty file': ('{dir}/empty.zip', r'empty.zip: expected .*, found an empty file'),
    'null byte': ('{dir}/a\0b', r'no such file or folder'),
    'pipe': ('{dir}/pipe.zip', r'pipe.zip: expected a file or folder, found something else'),
    'cifar10 near miss': ('cifar10:{dir}/elefants.zip', r'did you mean "elephants.zip"'),
}


@pytest.mark.parametrize('case', PATHS)
def test_paths(tmp_path, case):
    write_zip(tmp_path / 'elephants.zip', {'a.png': PNG})
    others = {
        'notes.txt': b'hello',
        'plain': b'hello',
        'image.png': PNG,
        'model.safetensors': b'x' * 40,
        'empty.zip': b'',
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / 'pipe.zip')
    path, match = PATHS[case]
    fails(path.format(dir=tmp_path), match)


def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch):
    path = write_zip(tmp_path / 'x.zip', {'a.png': PNG})

    def refuse(*_, **__):
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(zipfile, 'ZipFile', refuse)
    fails(path, r'x.zip: cannot be read: Permission denied; check the file and its permissions')


# ---- folders and archives of images


@pytest.mark.parametrize('form', ['folder', 'zip', 'tar', 'tar.gz'])
def test_sets_without_an_image(tmp_path, form):
    path = put(tmp_path, {'a.txt': b'words', 'b.png': b'', 'c.jpg': b'GIF'}, form)
    fails(
        path,
        r'no images .* found 3 other files: a.txt \(not an image\), b.png \(empty file\), c.jpg '
        r'\(not an image\)',
    )


def test_an_empty_folder(tmp_path):
    fails(tmp_path, r'no images .* found no files at all')


HUGE = encoded(Image.new('1', (10000, 10000)))
BAD_IMAGES = {
    'cut off': (PNG[: len(PNG) // 2], r'cannot be decoded: '),
    'only the magic': (PNG[:8], r'cannot be decoded: '),
    'flipped bytes': (PNG[:60] + bytes(40) + PNG[100:], r'cannot be decoded: '),
    'cut off JPEG': (encoded(random_pixels(0, (64, 64, 3)), 'JPEG')[:400], r'cannot be decoded: '),
    'decompression bomb': (
        HUGE,
        r'10000x10000 pixels, more than the \d+ accepted|decompression bomb',
    ),
    'floats': (
        encoded(Image.fromarray(np.zeros((8, 8), np.float32)), 'TIFF'),
        r'floating-point pixels',
    ),
    'wide integers': (
        encoded(Image.fromarray(np.full((8, 8), 70000, np.int32)), 'TIFF'),
        r'32-bit pixels from 70000 to 70000',
    ),
}


@pytest.mark.parametrize('form', ['folder', 'zip', 'tar', 'tar.gz'])
@pytest.mark.parametrize('case', BAD_IMAGES)
def test_images_that_cannot_be_decoded(tmp_path, case, form):
    data, match = BAD_IMAGES[case]
    path = put(tmp_path, {'a.png': PNG, 'sub/bad.png': data}, form)
    fails(path, rf'sub/bad.png: (.|\n)*{match}(.|\n)*jaxunet.prepare_data')


def test_other_numbers_of_channels(tmp_path):
    fails(
        write_folder(tmp_path, {'a.png': PNG}),
        r'model.image_channels: expected 1 \(grey\) or 3 \(RGB\)',
        shape=(16, 16, 4),
    )


def cut(path: pathlib.Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def change(path: pathlib.Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


ZIPS: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    'not a zip': (lambda p: p.write_bytes(b'hello' * 20), r'not a readable zip archive'),
    'cut off': (lambda p: cut(p, p.stat().st_size - 30), r'not a readable zip archive.*truncated'),
    'local header': (lambda p: change(p, 0, b'XX'), r'no images .*no local file header at byte 0'),
    'pixels': (
        lambda p: change(p, 200, b'XXXX'),
        r'a.png: checksum [0-9a-f]{8}, expected [0-9a-f]{8}',
    ),
    'central directory': (
        lambda p: change(p, p.read_bytes().index(b'PK\x01\x02'), b'XXXX'),
        r'not a readable zip archive',
    ),
    'encrypted': (
        lambda p: change(p, p.read_bytes().index(b'PK\x01\x02') + 8, b'\x01\0'),
        r'a.png \(encrypted\)',
    ),
    'method': (
        lambda p: change(p, p.read_bytes().index(b'PK\x01\x02') + 10, b'\x63\0'),
        r'a.png \(compressed by method 99',
    ),
    'arrays': (lambda p: write_zip(p, {'images.npy': b'x'}), r'is an .npz with the name of a .zip'),
}


@pytest.mark.parametrize('case', ZIPS)
def test_zip(tmp_path, case):
    path = write_zip(tmp_path / 'x.zip', {'a.png': PNG})
    damage, match = ZIPS[case]
    damage(path)
    fails(path, match)


def test_zip_that_decompresses_to_another_size(tmp_path):
    path = write_zip(tmp_path / 'x.zip', {'a.png': PNG}, zipfile.ZIP_DEFLATED)
    change(path, path.read_bytes().index(b'PK\x01\x02') + 24, struct.pack('<I', 100))
    fails(path, r'a.png: decompresses to 101 bytes, expected 100')


@pytest.mark.parametrize('kind', ['', 'gz', 'xz'])
def test_tar(tmp_path, kind):
    path = tmp_path / f'x.tar{"." * bool(kind)}{kind}'
    files = {f'{i}.png': PNG for i in range(5)}
    write_tar(path, files, kind)
    size = path.stat().st_size
    for at in (size // 3, size - 12) if kind else (1300, 2100):
        write_tar(path, files, kind)
        cut(path, at)
        fails(path, r'(not a readable .tar|truncated in \d.png: the file ends at byte)')
    path.write_bytes(b'hello' * 300)
    fails(path, r'not a readable .tar archive')


@pytest.mark.parametrize('kind', ['', 'gz'])
def test_a_tar_whose_middle_is_damaged_does_not_just_end_there(tmp_path, kind):
    plain = write_tar(tmp_path / 'plain.tar', {f'{i}.png': PNG for i in range(5)})
    step = 512 + -(-len(PNG) // 512) * 512
    change(plain, 2 * step, b'XXXX')
    path = plain
    if kind:
        path = tmp_path / 'x.tar.gz'
        path.write_bytes(gzip.compress(plain.read_bytes()))
    fails(path, rf'no valid member header at byte {2 * step}')


def test_a_compressed_tar_that_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, 'MAX_MEMORY', 3 * 16 * 16 * 3)
    path = write_tar(tmp_path / 'x.tar.gz', {f'{i}.png': PNG for i in range(5)}, 'gz')
    fails(
        path,
        r'4 images or more, which take over .* GiB of memory at 16x16x3.*python -m '
        r'jaxunet.prepare_data --input .*x.tar.gz',
    )


# ---- classes


@pytest.mark.parametrize(
    ('classes', 'match'),
    [
        (('cta',), r'has no class "cta"; did you mean "cat"\?; it has cat, dog'),
        (('cat', 'cat'), r'expected different names, found cat, cat'),
        (('cat', 'horse'), r'has no class "horse"; it has cat, dog'),
    ],
)
def test_classes(tmp_path, classes, match):
    fails(
        write_folder(tmp_path, {'cat/a.png': PNG, 'dog/b.png': PNG}),
        f'data.classes: .*{match}',
        classes=classes,
    )


def test_classes_of_a_set_without(tmp_path):
    fails(
        write_folder(tmp_path, {'a.png': PNG}),
        r'has no classes to choose from, found cat',
        classes=('cat',),
    )
    mixed = write_folder(tmp_path / 'mixed', {'cat/a.png': PNG, 'x.png': PNG})
    fails(
        mixed,
        r'to choose from, as x.png lies beside the sub-folders cat, found cat',
        classes=('cat',),
    )


# ---- .npz

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
    'floats': ({'images': IMAGES / 255}, r'images: expected dtype uint8 .*found float64'),
    'integers': ({'images': IMAGES.astype(np.int64)}, r'expected dtype uint8 .*found int64'),
    'objects': ({'images': np.array([1, 'x'], object)}, r'expected dtype uint8 .*found object'),
    'rank 2': (
        {'images': IMAGES[0, 0]},
        r'expected shape \(n, height, width, channels\).*found \(8, 3\)',
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
        r'labels: expected integers, found float64',
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
        r'found Python objects, which are never unpickled',
    ),
    'too few names': (
        {**LABELLED, 'class_names': np.array(['a', 'b'])},
        r'found 3, but class_names has 2 names',
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


# ---- .bin

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
        UserError, match=r'x.bin: cannot be mapped into memory.*was it changed or removed'
    ):
        everything(pickle.loads(data))


# ---- CIFAR-10


class Evil:
    """A pickle that would run a command."""

    def __reduce__(self):
        return os.system, ('touch evil',)


def without(name: str) -> bytes:
    return python2_batch(random_pixels(0, (2, 32, 32, 3)), [1, 2]).replace(
        name.encode(), b'x' * len(name)
    )


def pickled(value: object) -> bytes:
    return pickle.dumps(value, 2)


GOOD = python2_batch(random_pixels(0, (2, 32, 32, 3)), [1, 2])
BATCHES: dict[str, tuple[bytes, str]] = {
    'runs a command': (
        pickled(Evil()),
        r'global "posix.system" is not allowed.*; the file is not safe and was not run',
    ),
    'evaluates': (
        b'cbuiltins\neval\n(S"1"\ntR.',
        r'byte 0: .*global "builtins.eval" is not allowed',
    ),
    'other numpy': (b'cnumpy\nload\n(S"x"\ntR.', r'global "numpy.load" is not allowed'),
    'cut off': (GOOD[:500], r'not a batch of CIFAR-10: .*copy or download it again'),
    'text': (b'hello', r'not a batch of CIFAR-10'),
    'empty': (b'', r'not a batch of CIFAR-10'),
    'a list': (pickled([1]), r'expected a dict, found list'),
    'no data': (without('data'), r'no entry "data"'),
    'no labels': (without('labels'), r'no entry "labels"'),
    'label': (
        python2_batch(random_pixels(0, (2, 32, 32, 3)), [1, 12]),
        r'labels: expected a list of integers 0 to 9',
    ),
    'counts': (
        GOOD.replace(b'K\x02M\x00\x0c', b'K\x03M\x00\x0c'),
        r'data: expected u1 of shape \(2, 3072\), found .*\(3, 3072\)',
    ),
    'dtype': (GOOD.replace(b'U\x02u1', b'U\x02f8'), r'data: expected u1 of shape'),
    'persistent': (b'\x80\x02X\x01\0\0\0aQ.', r'refers to objects outside the file'),
}


@pytest.mark.parametrize('case', BATCHES)
def test_cifar10_batches(tmp_path, case, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, match = BATCHES[case]
    files = official_files()
    files['cifar-10-batches-py/data_batch_1'] = data
    write_folder(tmp_path, files)
    fails(f'cifar10:{tmp_path}', rf'data_batch_1: .*{match}', shape=(32, 32, 3))
    assert not (tmp_path / 'evil').exists()


def test_cifar10_with_a_batch_missing(tmp_path):
    files = official_files()
    del files['cifar-10-batches-py/data_batch_3']
    fails(
        f'cifar10:{write_folder(tmp_path, files)}',
        r'no data_batch_3; expected the five training batches',
        shape=(32, 32, 3),
    )


def test_cifar10_without_its_prefix(tmp_path):
    path = write_tar(tmp_path / 'cifar-10-python.tar.gz', official_files(), 'gz')
    fails(
        path,
        r'holds CIFAR-10\'s official batches, not image files; write data.path as '
        rf'"cifar10:{path}"',
        shape=(32, 32, 3),
    )


def test_digits_have_one_size_of_channels():
    fails(
        'digits:',
        r'digits:: images have 1 channels, but model.image_channels is 4',
        shape=(8, 8, 4),
    )
