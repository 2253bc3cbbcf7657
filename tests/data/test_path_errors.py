"""Wrong paths, images, channels and classes: the error says what is wrong where, and what to do."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
from PIL import Image
from support.data_errors import PNG, fails
from support.data_files import encoded, put, random_pixels, write_folder, write_zip

from jaxunet.config import Config
from jaxunet.data.pixels import has_holes
from jaxunet.data.sources import check_path, open_data
from jaxunet.runtime.errors import UserError

PATHS = {
    'near miss': (
        '{dir}/elefants.zip',
        r'no such file or folder: .* has no "elefants.zip"; did you mean "elephants.zip"\?',
    ),
    'missing parent': ('{dir}/nothing/at/all', r'has no "nothing"'),
    'unknown set': ('digit:', r'unknown set "digit:"; did you mean "digits:"\?'),
    'unknown split': ('cifar10_tests:', r'; did you mean "cifar10_test:" or "cifar10:"\?'),
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
    path, match = PATHS[case]
    fails(path.format(dir=tmp_path), match)


def test_a_path_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails('photos.zip', r'photos.zip: no such file or folder: the current folder has no "photos')


@pytest.mark.parametrize('prefix', ['', 'cifar10:', 'cifar10_test:'])
def test_what_is_missing_is_found_without_opening(tmp_path, prefix):
    (tmp_path / 'plain').write_bytes(b'no images')
    check_path(f'{prefix}{tmp_path}/plain')
    with pytest.raises(UserError, match='plains: no such file or folder: '):
        check_path(f'{prefix}{tmp_path}/plains')


@pytest.mark.parametrize('path', ['digits:', 'cifar10:', 'cifar10_test:'])
def test_sets_with_names_are_not_missing(path):
    check_path(path)


def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch):
    path = write_zip(tmp_path / 'x.zip', {'a.png': PNG})

    def refuse(*_, **__):
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(zipfile, 'ZipFile', refuse)
    fails(path, r'x.zip: cannot be read: Permission denied; check the file and its permissions')


@pytest.mark.parametrize('form', ['folder', 'zip', 'tar', 'tar.gz'])
def test_sets_without_an_image(tmp_path, form):
    path = put(tmp_path, {'a.txt': b'words', 'b.png': b'', 'c.jpg': b'GIF'}, form)
    fails(
        path,
        r'no images .* found 3 other files: a.txt \(not an image\), b.png \(empty file\), c.jpg '
        r'\(not an image\)',
    )


@pytest.mark.parametrize('brands', [b'heic', b'mif1\0\0\0\0mif1heic', b'hevc\0\0\0\0msf1'])
def test_photographs_of_a_phone(tmp_path, brands):
    start = (8 + len(brands)).to_bytes(4) + b'ftyp' + brands + bytes(100)
    fails(
        put(tmp_path, {'a.heic': start}, 'folder'),
        r'found 1 other file: a.heic \(HEIC, which is not supported: convert it to JPEG or PNG\)',
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
    command = rf'python -m jaxunet.prepare_data --input {path} --output images.npz --image_size'
    fails(path, rf'sub/bad.png: (.|\n)*{match}(.|\n)*: {command} \.\.\.$')


def test_the_transparency_of_a_huge_image_is_not_looked_at():
    with pytest.raises(UserError, match=r'a\.png: 8200x8200 pixels, more than the'):
        has_holes(encoded(Image.new('P', (8200, 8200)), transparency=0), 'a.png')


def test_other_numbers_of_channels(tmp_path):
    fails(
        write_folder(tmp_path, {'a.png': PNG}),
        r'model.image_channels: expected 1 \(grey\) or 3 \(RGB\)',
        shape=(16, 16, 4),
    )


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
        r'to choose from, as x.png lies beside the sub-folders cat: .*, found cat',
        classes=('cat',),
    )


@pytest.mark.parametrize(
    ('changes', 'start'),
    [
        ({'classes': ('cow',)}, 'data.classes: digits: has no class "cow"'),
        ({'path': '{dir}'}, 'model.image_channels: expected 1'),
        ({'path': 'digit:'}, 'data.path: unknown set "digit:"'),
    ],
)
def test_an_error_names_one_field(tmp_path, changes, start):
    write_folder(tmp_path, {'a.png': PNG})
    changes = {name: str(tmp_path) if v == '{dir}' else v for name, v in changes.items()}
    with pytest.raises(UserError) as error:
        open_data(Config().replace(data=changes), (8, 8, 2 if 'path' in changes else 1))
    assert str(error.value).startswith(start)


def test_digits_have_one_size_of_channels():
    fails(
        'digits:', r'digits: images have 1 channel, but model.image_channels is 4', shape=(8, 8, 4)
    )
