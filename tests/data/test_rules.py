"""The rules of every set: which files are images, and which folders are classes."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from PIL import Image
from support.data_errors import PNG, fails
from support.data_files import (
    SHAPE,
    encoded,
    everything,
    put,
    random_pixels,
    write_folder,
    write_zip,
)
from support.tiny import tiny_config

from jaxunet.data import classes
from jaxunet.data.pixels import FORMATS, decode, size_of
from jaxunet.data.png16 import write_png16
from jaxunet.data.rules import find_classes, whole_names, why_not_image
from jaxunet.data.sources import open_source
from jaxunet.metrics import image_sets
from jaxunet.runtime.class_names import class_name
from jaxunet.runtime.errors import UserError

FORMS = ('folder', 'zip', 'tar', 'tar.gz')
POSIX = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}


def conditional(number):
    return tiny_config(model={'num_classes': number, 'label_dropout': 0.1}, parallel={'devices': 1})


@pytest.mark.parametrize(
    'text',
    [
        'BMW driving on a road, seen from the left side in the evening',
        'P3 robot standing',
        'P6 4 of 5 people',
        'P1 2 3 dogs',
        'BM',
        'This is WEBP, a format of images',
    ],
)
def test_a_caption_is_no_image_whatever_it_begins_with(text):
    assert why_not_image(text.encode(), len(text)) == 'not an image'


@pytest.mark.skipif('AVIF' not in FORMATS, reason='Pillow has no AVIF')
@pytest.mark.parametrize('brand', [b'', b'mif1', b'msf1'])
def test_avif_of_one_image_and_of_several(tmp_path, brand):
    red, green = (Image.new('RGB', SHAPE[1::-1], colour) for colour in ('red', 'lime'))
    for several in (False, True):
        data = encoded(red, 'AVIF', save_all=several, append_images=[green] if several else [])
        data = data[:8] + (brand or data[8:12]) + data[12:]
        source = open_source(str(put(tmp_path, {'a.avif': data}, 'zip')), image_shape=SHAPE)
        assert abs(everything(source)[0].astype(int) - (255, 0, 0)).max() < 8


def test_a_text_by_its_name_is_no_image():
    assert why_not_image(b'GIF89a is a format', 18, 'a/1.TXT') == 'not an image'


@pytest.mark.parametrize('kind', ['BMP', 'PPM', 'WEBP', 'GIF', 'TIFF', 'JPEG2000'])
@pytest.mark.parametrize('mode', ['1', 'L', 'RGB'])
def test_images_of_these_formats_are_images(kind, mode):
    image = Image.fromarray(random_pixels(0)).convert(mode)
    data = encoded(image if kind not in ('WEBP', 'JPEG2000') else image.convert('RGB'), kind)
    assert why_not_image(data[:64], len(data), 'x') == ''


@pytest.mark.parametrize(
    ('kind', 'options'), [('TIFF', {'big_tiff': True}), ('JPEG2000', {'no_jp2': True})]
)
def test_rarer_forms_of_these_formats_are_images(kind, options, tmp_path):
    pixels = random_pixels(0)
    (tmp_path / '1').write_bytes(encoded(pixels, kind, **options))
    source = open_source(str(tmp_path), image_shape=pixels.shape)
    np.testing.assert_array_equal(everything(source), [pixels])


@pytest.mark.parametrize(
    'comments', [b'# by me\n', b'# longer than the start\n' * 9, b'#' * 59 + b'\n']
)
def test_a_bitmap_with_comments_is_an_image(comments):
    data = b'P6\n' + comments + b'2 1\n255\n' + bytes(6)
    assert why_not_image(data[:64], len(data)) == ''


@pytest.mark.parametrize('form', FORMS)
def test_folders_of_systems_and_text_files_do_not_count(form, tmp_path):
    image = encoded(random_pixels(0))
    files = {
        'cat/1.png': image,
        'dog/1.png': image,
        'cat/@eaDir/1.png/SYNOPHOTO_THUMB_M.png': image,
        '@eaDir/cat/SYNOPHOTO_THUMB_S.png': image,
        '$RECYCLE.BIN/$R1.png': image,
        'lost+found/1.png': image,
        'System Volume Information/1.png': image,
        'cat/1.txt': b'BMW driving on a road',
        'dog/1.txt': b'P3 robot standing',
    }
    source = open_source(str(put(tmp_path, files, form)), image_shape=SHAPE)
    assert (len(source), source.class_names) == (2, ('cat', 'dog'))
    assert source.skipped == (('cat/1.txt', 'not an image'), ('dog/1.txt', 'not an image'))


@pytest.mark.parametrize('form', FORMS)
def test_an_archive_inside_a_set_is_named_as_such(form, tmp_path):
    files = {'1.png': encoded(random_pixels(0)), '00000.tar': b'x' * 99, '2.zip': b'PK\3\4'}
    source = open_source(str(put(tmp_path, files, form)), image_shape=SHAPE)
    assert [name for name, _ in source.skipped] == ['00000.tar', '2.zip']
    assert all(why.startswith('an archive inside the set') for _, why in source.skipped)


def test_a_zip_with_backslashes_has_classes(tmp_path):
    image = encoded(random_pixels(0))
    path = write_zip(
        tmp_path / 'x.zip', {'cat\\': b'', 'cat\\1.png': image, 'dog\\deep\\1.png': image}
    )
    source = open_source(str(path), image_shape=SHAPE)
    assert (source.class_names, source.skipped) == (('cat', 'dog'), ())
    assert everything(source).shape == (2, *SHAPE)


@pytest.mark.parametrize('form', FORMS)
def test_numbers_sort_as_numbers(form, tmp_path):
    image = encoded(random_pixels(0))
    files = {f'{name}/1.png': image for name in (*range(12), 'rest')}
    source = open_source(str(put(tmp_path, files, form)), image_shape=SHAPE)
    assert source.class_names == (*map(str, range(12)), 'rest')
    assert source.labels.tolist() == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9, 12]


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize(
    'parts', [('train', 'val'), ('Test', 'train', 'valid'), ('train2017', 'val2017')]
)
def test_the_parts_of_a_set_are_no_classes(form, parts, tmp_path):
    files = {f'{part}/{name}/1.png': PNG for part in parts for name in ('cat', 'dog')}
    path = put(tmp_path, files, form)
    source = open_source(str(path), image_shape=SHAPE)
    assert (len(source), source.class_names) == (len(files), ())
    with pytest.raises(UserError, match=rf'as the folders .*{parts[-1]} are parts of a set'):
        classes.check_classes(conditional(2), source)


def test_one_part_of_a_set_has_classes_and_so_has_one_named_class(tmp_path):
    files = {f'train/{name}/1.png': PNG for name in ('cat', 'dog')}
    source = open_source(str(put(tmp_path, files, 'folder')), image_shape=SHAPE)
    assert source.class_names == ('cat', 'dog')
    found = find_classes(['train/1.png', 'bus/1.png'], strip_leading=False)
    assert found[1] == ('bus', 'train')


@pytest.mark.parametrize('form', FORMS)
def test_camera_raw_is_left_out(form, tmp_path):
    """Its first image, which Pillow reads, is a thumbnail."""
    thumbnail = encoded(random_pixels(0), 'TIFF', tiffinfo={254: 1})
    files = {'a.png': PNG, 'b.NEF': thumbnail, 'c.dng': thumbnail}
    source = open_source(str(put(tmp_path, files, form)), image_shape=SHAPE)
    assert len(source) == 1
    assert [reason[:10] for _, reason in source.skipped] == ['camera raw'] * 2
    for read in (size_of, lambda data, name: decode(data, name, SHAPE)):
        with pytest.raises(UserError, match=r'x.tif: .*its first image is a thumbnail'):
            read(thumbnail, 'x.tif')


@pytest.mark.parametrize('kind', ['PNG', 'TIFF', 'JPEG'])
def test_large_metadata_are_no_damage(kind):
    data = encoded(random_pixels(0), kind, icc_profile=bytes(3 * 2**19))
    assert decode(data, 'x', SHAPE).shape == SHAPE
    assert size_of(data, 'x') == SHAPE[:2]


@pytest.mark.parametrize('exif', [b'Exif\0\0garbage', b'Exif\0\0II*\0' + bytes(3)])
def test_metadata_that_cannot_be_read_are_no_damage(exif):
    data = encoded(random_pixels(0), 'PNG', exif=exif)
    np.testing.assert_array_equal(decode(data, 'x', SHAPE), random_pixels(0))
    assert size_of(data, 'x') == SHAPE[:2]


def test_xmp_that_is_no_utf_8_still_turns_the_image(monkeypatch):
    """Pillow 11.2 decodes XMP as UTF-8."""
    get = Image.Image.getexif

    def strict(self):
        self.info.get('xmp', b'').decode()
        return get(self)

    monkeypatch.setattr(Image.Image, 'getexif', strict)
    xmp = b'<x:xmpmeta tiff:Orientation="6">caf\xe9</x:xmpmeta>'
    data = encoded(random_pixels(0, (8, 16, 3)), 'WEBP', lossless=True, xmp=xmp)
    assert size_of(data, 'x') == (16, 8)
    np.testing.assert_array_equal(
        decode(data, 'x', (16, 8, 3)), np.rot90(random_pixels(0, (8, 16, 3)), -1)
    )


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('highest', [255, 4095])
def test_narrow_values_in_wide_numbers_are_refused(form, highest, tmp_path):
    wide = np.linspace(0, highest, 256).astype(np.int32 if highest == 255 else np.uint16)
    data = encoded(Image.fromarray(wide.reshape(16, 16)), 'TIFF' if highest == 255 else 'PNG')
    fails(
        put(tmp_path, {'a.png': PNG, 'b.tif': data}, form),
        rf'b.tif: 16 or 32 bits, but .* above {highest}, expected 0 to 65535: they would be black',
    )


def test_narrow_colours_in_wide_numbers_are_refused(tmp_path):
    """Pillow keeps 8 bits of such files, and has no way to write them."""
    narrow, wide = (
        write_png16(np.full((16, 16, 3), values, np.uint16))
        for values in ((0, 4095, 300), (0, 65535, 32768))
    )
    (tmp_path / 'a.png').write_bytes(narrow)
    fails(tmp_path, r'a.png: 16 or 32 bits, but .* above 4095, expected 0 to 65535')
    (tmp_path / 'a.png').write_bytes(wide)
    pixels = everything(open_source(str(tmp_path), image_shape=(16, 16, 3)))
    assert pixels[0, 0, 0].tolist() == [0, 255, 128]


@pytest.mark.parametrize('form', FORMS)
def test_dark_images_beside_bright_ones_of_16_bits_are_read(form, tmp_path):
    dark, bright = (encoded(np.full((16, 16), v, np.uint16)) for v in (257, 65535))
    path = put(tmp_path, {'a.png': dark, 'b.png': bright}, form)
    pixels = everything(open_source(str(path), image_shape=(16, 16, 1)))
    assert pixels.max(axis=(1, 2, 3)).tolist() == [1, 255]


@pytest.mark.parametrize('shape', [(20, 3, 16, 16), (20, 4, 8, 8), (32, 32, 3, 20)])
def test_arrays_in_another_order_are_refused(shape, tmp_path):
    np.savez(tmp_path / 'x.npz', images=random_pixels(0, shape))
    for channels in (3, shape[3]):
        fails(
            tmp_path / 'x.npz',
            r'the order is another one; for channels first, store images.transpose\(0, 2, 3, 1\)',
            shape=(16, 16, channels),
        )


def test_names_with_commas_can_be_given(tmp_path):
    names = ('goldfish, Carassius auratus', 'tench', 'tench, Tinca tinca')
    pieces = ['tench', 'goldfish', 'Carassius auratus', 'tench,Tinca tinca', '2']
    assert whole_names(pieces, names) == [names[1], names[0], names[2], '2']
    assert classes.Classes(3, names).labels_of(pieces) == [1, 0, 2, 2]
    files = {f'{name}/{i}.png': PNG for name in names for i in range(2)}
    source = open_source(
        str(put(tmp_path, files, 'folder')),
        image_shape=SHAPE,
        classes=('goldfish', 'Carassius auratus', 'tench'),
    )
    assert source.class_names == (names[0], 'tench')
    with pytest.raises(UserError, match=r"names \(0 goldfish.*found 'goldfish'"):
        classes.Classes(3, names).labels_of(['goldfish', 'auratus'])


def test_a_name_that_exists_wins_over_a_label():
    names = ('0', '1', '10', '11', '2')
    known = classes.Classes(5, names)
    assert known.labels_of(['2', '10', '3']) == [4, 2, 3]


def test_a_name_has_one_form_in_every_locale_and_system(tmp_path):
    assert class_name(unicodedata.normalize('NFD', 'café')) == 'café'
    assert class_name('caf\udce9') == 'caf\\udce9'  # Latin-1, which is no UTF-8
    write_folder(tmp_path, {'café/1.png': PNG, 'zoo/1.png': PNG})
    code = (
        'import sys; from jaxunet.data.sources import open_source as o; '
        'print(ascii(o(sys.argv[1], image_shape=(8, 8, 3), classes=(sys.argv[2],)).class_names))'
    )
    found = subprocess.run(
        [sys.executable, '-c', code, str(tmp_path), 'café'],
        env=os.environ | POSIX,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == ascii(('café',))


def test_every_name_can_be_printed_in_a_posix_locale():
    code = 'from jaxunet.runtime import command; command.run(lambda argv: print(chr(233)))'
    found = subprocess.run(
        [sys.executable, '-c', code],
        env=os.environ | POSIX,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (0, '\\xe9\n')


def test_comparisons_use_the_same_rules(tmp_path):
    files = {'a\\1.png': PNG, 'a\\1.txt': b'BM car', '@eaDir\\a\\1.png': PNG}
    with image_sets.open_images(str(write_zip(tmp_path / 'x.zip', files))) as source:
        assert (len(source), source.skipped) == (1, (('a/1.txt', 'not an image'),))
