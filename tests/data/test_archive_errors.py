"""Damaged and hostile .zip and .tar files of images."""

from __future__ import annotations

import gzip
import io
import pathlib
import struct
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from support.data_errors import PNG, change, cut, fails
from support.data_files import encoded, everything, put, random_pixels, write_tar, write_zip

from jaxunet.data import image_files
from jaxunet.data.sources import open_source

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


@pytest.mark.parametrize('kind', ['', 'gz', 'xz'])
def test_two_archives_joined_by_cat(kind, tmp_path):
    paths = [write_tar(tmp_path / f'{i}.tar', {f'{i}.png': PNG}, kind) for i in range(2)]
    path = tmp_path / 'x.tar'
    path.write_bytes(b''.join(path.read_bytes() for path in paths))
    fails(path, r'x.tar: another archive begins behind the end of this one.* unpack both')


def test_what_is_no_archive_may_follow_a_tar(tmp_path):
    path = write_tar(tmp_path / 'x.tar', {'1.png': PNG})
    path.write_bytes(path.read_bytes() + b'signed by me')
    assert len(open_source(str(path), image_shape=(8, 8, 3))) == 1


def test_a_compressed_tar_that_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, 'MAX_MEMORY', 3 * 16 * 16 * 3)
    path = write_tar(tmp_path / 'my x.tar.gz', {f'{i}.png': PNG for i in range(5)}, 'gz')
    fails(
        path,
        r'4 images or more, which take over .* GiB of memory at 16x16x3.*python -m '
        r"jaxunet.prepare_data --input '.*my x.tar.gz' --output ",
    )


@pytest.mark.parametrize('form', ['zip', 'tar', 'tar.gz'])
def test_the_last_file_of_a_name_counts(form, tmp_path):
    """An archive that was updated holds the earlier one, too."""
    old, new, other = (random_pixels(i, (8, 8, 3)) for i in range(3))
    files = {'a/1.png': encoded(old), 'b/1.png': encoded(other), './a/1.png': encoded(new)}
    source = open_source(str(put(tmp_path, files, form)), image_shape=(8, 8, 3))
    np.testing.assert_array_equal(everything(source), [new, other])
    assert (source.labels.tolist(), source.class_names) == ([0, 1], ('a', 'b'))
    assert source.skipped == (('a/1.png', 'a later file has the same name'),)


@pytest.mark.parametrize('kind', ['', 'gz'])
def test_a_link_and_a_file_of_one_name(kind, tmp_path):
    link = tarfile.TarInfo('1.png')
    link.type, link.linkname = tarfile.SYMTYPE, '2.png'
    file = tarfile.TarInfo('1.png')
    file.size = len(PNG)
    with tarfile.open(tmp_path / 'x.tar', f'w:{kind}') as archive:
        archive.addfile(link)
        archive.addfile(file, io.BytesIO(PNG))
    assert len(open_source(str(tmp_path / 'x.tar'), image_shape=(8, 8, 3))) == 1
