"""Image sets for tests: random pixels in every form that `data.path` accepts."""

from __future__ import annotations

import io
import pathlib
import struct
import tarfile
import zipfile

import numpy as np
from PIL import Image

SHAPE = (16, 16, 3)


def random_pixels(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(pixels: np.ndarray | Image.Image, kind: str = 'PNG', **options) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_zip(
    path: pathlib.Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED
) -> pathlib.Path:
    with zipfile.ZipFile(path, 'w', method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_tar(path: pathlib.Path, files: dict[str, bytes], kind: str = '') -> pathlib.Path:
    with tarfile.open(path, f'w:{kind}') as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_folder(path: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def put(path: pathlib.Path, files: dict[str, bytes], form: str) -> pathlib.Path:
    match form:
        case 'folder':
            return write_folder(path / 'images', files)
        case 'zip' | 'deflated.zip' | 'bzip2.zip':
            methods = {
                'zip': zipfile.ZIP_STORED,
                'deflated.zip': zipfile.ZIP_DEFLATED,
                'bzip2.zip': zipfile.ZIP_BZIP2,
            }
            return write_zip(path / f'images.{form}', files, methods[form])
        case 'tar':
            return write_tar(path / 'images.tar', files)
        case _:
            return write_tar(
                path / f'images.{form}', files, {'tgz': 'gz', 'tar.gz': 'gz', 'tar.xz': 'xz'}[form]
            )


def everything(source) -> np.ndarray:
    return source.load(np.arange(len(source)))


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2's pickle and numpy wrote the official ones, opcode by opcode."""

    def short(text: bytes) -> bytes:
        return b'U' + bytes([len(text)]) + text

    def number(value: int) -> bytes:
        return b'K' + bytes([value]) if value < 256 else b'M' + struct.pack('<H', value)

    raw = pixels.transpose(0, 3, 1, 2).tobytes()
    n = len(labels)
    dtype = (
        b'cnumpy\ndtype\nq\n'
        + short(b'u1')
        + b'K\x00K\x01\x87Rq\x0b(K\x03'
        + short(b'|')
        + b'NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb'
    )
    array = (
        b'cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85'
        + short(b'b')
        + b'\x87Rq\x09(K\x01'
    )
    array += (
        number(n)
        + number(3072)
        + b'\x86'
        + dtype
        + b'\x89T'
        + struct.pack('<i', len(raw))
        + raw
        + b'tb'
    )
    names = b']q\x0e(' + b''.join(short(b'image_%d.png' % i) for i in range(n)) + b'e'
    return (
        b'\x80\x02}q\x01('
        + (short(b'batch_label') + b'q\x02' + short(b'training batch 1 of 5') + b'q\x03')
        + (short(b'labels') + b'q\x04]q\x05(' + b''.join(number(v) for v in labels) + b'e')
        + (short(b'data') + b'q\x06' + array + short(b'filenames') + b'q\x0d' + names)
        + b'u.'
    )


def official_files(n: int = 4) -> dict[str, bytes]:
    prefix = 'cifar-10-batches-py/'
    names = [*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch']
    files = {
        prefix + name: python2_batch(
            random_pixels(i, (n, 32, 32, 3)), [(i + j) % 10 for j in range(n)]
        )
        for i, name in enumerate(names, 1)
    }
    return {**files, f'{prefix}batches.meta': b'\x80\x02}.'}
