"""Images of 16 bits, floats and any number of channels."""

from __future__ import annotations

import io
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from support.configs import CONFIGS, load
from support.data_files import encoded, everything, random_pixels, write_folder

from jaxunet.data import look, png16
from jaxunet.data.arrays import source_of
from jaxunet.data.automatic import complete
from jaxunet.data.images import check_output, from_pixels, save_images, to_pixels
from jaxunet.data.png16 import read_png16, write_png16
from jaxunet.data.reading import Reading
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError

WIDE = Reading(bits=16)
TWELVE = Reading(bits=16, range=(0, 4095))
IMAGES = next(path for path in CONFIGS if path.name == 'images.py')


def random_values(seed: int, shape: tuple[int, ...], most: int = 65535) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, shape, np.uint16, endpoint=True)


def opened(path, shape, how=WIDE):
    return everything(open_source(str(path), image_shape=shape, reading=how))


def paeth(a: int, b: int, c: int) -> int:
    """The predictor of the PNG specification, section 9.4."""
    p = a + b - c
    return min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]


def filtered(values: np.ndarray, kinds: list[int]) -> bytes:
    """Rows of 16-bit values as PNG stores them, each with a filter of its own."""
    step = 2 * values.shape[2]
    rows = values.astype('>u2').view(np.uint8).reshape(len(values), -1).astype(int)
    out = b''
    for y, row in enumerate(rows):
        up = rows[y - 1] if y else np.zeros_like(row)
        left, corner = (np.concatenate([np.zeros(step, int), line[:-step]]) for line in (row, up))
        guess = {
            0: np.zeros_like(row),
            1: left,
            2: up,
            3: (left + up) // 2,
            4: np.array([paeth(*pair) for pair in zip(left, up, corner, strict=True)]),
        }[kinds[y]]
        out += bytes([kinds[y], *((row - guess) % 256)])
    return out


@pytest.mark.parametrize('channels', [1, 2, 3, 4])
def test_png_of_every_filter(channels):
    values = random_values(channels, (10, 7, channels))
    packed = zlib.compress(filtered(values, [4, 3, 2, 1, 0] * 2))
    data = png16._file(7, 10, 16, channels, packed)
    np.testing.assert_array_equal(read_png16(data), values)
    np.testing.assert_array_equal(read_png16(write_png16(values)), values)
    # Pillow reads the file, at least the high bytes.
    with Image.open(io.BytesIO(write_png16(values))) as image:
        if channels > 1:
            np.testing.assert_array_equal(np.asarray(image)[..., -1], values[..., -1] >> 8)


def test_a_png_that_cannot_be_read_is_named(tmp_path):
    values = random_values(0, (8, 8, 3))
    whole = write_png16(values)
    cut = png16._file(8, 8, 16, 3, zlib.compress(filtered(values, [0] * 8)[:-5]))
    header = bytearray(whole)
    header[28] = 1  # interlaced
    header[29:33] = struct.pack('>I', zlib.crc32(bytes(header[12:29])))
    for data, match in ((cut, r'truncated: 387 of 392 bytes'), (bytes(header), 'interlaced')):
        path = write_folder(tmp_path / match[:5], {'a.png': data})
        with pytest.raises(UserError, match=rf'a.png: cannot be decoded: .*{match}'):
            opened(path, (8, 8, 3))


@pytest.mark.parametrize('channels', [1, 3])
def test_sixteen_bits_are_kept(tmp_path, channels):
    """PNG of 16 bits beside an 8-bit JPEG in one set; grey becomes RGB."""
    values = random_values(0, (16, 16, channels))
    grey = np.full((16, 16), 90, np.uint8)
    path = write_folder(
        tmp_path / 'set', {'a.png': write_png16(values), 'b.jpg': encoded(grey, 'JPEG')}
    )
    found = opened(path, (16, 16, 3))
    np.testing.assert_array_equal(found[0], np.broadcast_to(values, (16, 16, 3)))
    assert abs(found[1].astype(int) - 90 * 257).max() <= 257
    # Kept values map onto those that are rounded to 8 bits.
    eight = opened(path, (16, 16, 3), Reading())
    assert abs(found[0].astype(float) / 257 - eight[0]).max() <= (0.5 if channels == 1 else 1)
    assert from_pixels(found).min() >= -1
    assert from_pixels(np.array([0, 65535], np.uint16)).tolist() == [-1, 1]


def test_resizing_keeps_more_than_8_bits(tmp_path):
    ramp = np.linspace(20000, 20256, 64).astype(np.uint16)  # one level of 8 bits
    path = write_folder(tmp_path / 'set', {'a.png': encoded(np.tile(ramp, (64, 1)))})
    found = opened(path, (16, 16, 1))[0, 4, :, 0]
    assert len(np.unique(found)) == 16
    assert (np.diff(found.astype(int)) > 0).all()


def test_orientation_of_16_bits(tmp_path):
    values = random_values(0, (8, 12, 3))
    exif = Image.Exif()
    data = write_png16(values)
    for orientation, expected in {
        1: values,
        2: values[:, ::-1],
        3: values[::-1, ::-1],
        4: values[::-1],
        5: values.swapaxes(0, 1),
        6: np.rot90(values, -1),
        7: values.swapaxes(0, 1)[::-1, ::-1],
        8: np.rot90(values),
    }.items():
        exif[0x112] = orientation
        content = exif.tobytes()[6:]
        crc = struct.pack('>I', zlib.crc32(b'eXIf' + content))
        chunk = struct.pack('>I', len(content)) + b'eXIf' + content + crc
        path = write_folder(tmp_path / str(orientation), {'a.png': data[:33] + chunk + data[33:]})
        np.testing.assert_array_equal(opened(path, expected.shape)[0], expected)


def test_floats_and_wide_integers(tmp_path):
    """TIFF and .npy: floats from 0 to 1 or in a range that is stated, and other integers."""
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    expected = np.rint(values.astype(np.float64) * 65535).astype(np.uint16)[..., None]
    path = write_folder(tmp_path / 'tiff', {'a.tif': encoded(Image.fromarray(values), 'TIFF')})
    np.testing.assert_array_equal(opened(path, (8, 8, 1))[0], expected)
    np.testing.assert_array_equal(
        opened(path, (8, 8, 1), Reading())[0], np.rint(values * 255).astype(np.uint8)[..., None]
    )
    scans = (values * 3000 - 1000).astype(np.int16)
    np.save(tmp_path / 'scans.npy', scans[None])
    np.save(tmp_path / 'floats.npy', (2 * values - 1).astype('>f8')[None])
    stated = Reading(bits=16, range=(-1000, 2000))
    found = opened(tmp_path / 'scans.npy', (8, 8, 1), stated)
    assert (found[0, 0, 0, 0], found[0, -1, -1, 0]) == (0, 65535)
    np.testing.assert_allclose(stated.stored(found)[0, ..., 0], scans, atol=0.03)
    found = opened(tmp_path / 'floats.npy', (8, 8, 1), Reading(bits=16, range=(-1, 1)))
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize('order', ['C', 'F'])
@pytest.mark.parametrize('channels', [1, 2, 5, 13])
def test_npy_of_any_channels(tmp_path, channels, order):
    values = random_values(0, (6, 16, 16, channels), 4095)
    np.save(tmp_path / 'x.npy', np.asarray(values, order=order))
    source = open_source(str(tmp_path / 'x.npy'), image_shape=(16, 16, channels), reading=TWELVE)
    assert source.in_memory == (order == 'F')
    found = pickle.loads(pickle.dumps(source)).load(np.array([4, 1]))
    np.testing.assert_array_equal(TWELVE.stored(found), values[[4, 1]])
    shrunk = opened(tmp_path / 'x.npy', (8, 8, channels), TWELVE)
    assert shrunk.shape == (6, 8, 8, channels)
    np.savez(tmp_path / 'x.npz', images=values, labels=np.arange(6))
    npz = open_source(str(tmp_path / 'x.npz'), image_shape=(16, 16, channels), reading=TWELVE)
    np.testing.assert_array_equal(everything(npz), everything(source))
    assert npz.labels.tolist() == list(range(6))


def test_a_recipe_takes_the_channels_of_an_array(tmp_path):
    np.save(tmp_path / 'x.npy', random_values(0, (20, 16, 16, 5)))
    values = load(IMAGES).to_dict()
    values['data'] |= {'path': str(tmp_path / 'x.npy'), 'bits': 16}
    values['train'] |= {'sample_every': 0}
    assert complete(values).image_shape == (16, 16, 5)


@pytest.mark.parametrize(
    ('array', 'how', 'match'),
    [
        (
            random_values(0, (2, 8, 8)),
            TWELVE,
            r'expected values from 0 to 4095, found \d+ to 6\d{4}',
        ),
        (np.full((2, 8, 8), 1.5), WIDE, r'.* 0 to 1, the range of float64 .* found 1.5 to 1.5'),
        (np.full((2, 8, 8), np.nan), Reading(range=(-9, 9)), r'.* from -9 to 9, found nan to nan'),
        (np.zeros((2, 8, 8), np.int32), WIDE, r'int32 has no usual range .* such as 0,4095'),
        (np.zeros((2, 8, 8), bool), WIDE, r'expected dtype uint8 .*found bool'),
        (np.zeros((8, 8), np.uint8), WIDE, r'expected shape \(n, height, width, channels\)'),
        (np.zeros((2, 8, 8, 2), np.uint8), WIDE, r'images have 2 channels, but .* is 1'),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, array, how, match):
    np.save(tmp_path / 'x.npy', array)
    with pytest.raises(UserError, match=rf'x.npy: {match}'):
        opened(tmp_path / 'x.npy', (8, 8, 1), how)


def test_damaged_npy(tmp_path):
    np.save(tmp_path / 'x.npy', random_pixels(0, (4, 8, 8)))
    whole = (tmp_path / 'x.npy').read_bytes()
    for data, match in (
        (whole[:-9], r'shape \(4, 8, 8\) takes 256 bytes, found 247; the file is damaged'),
        (whole[:40], r'not a readable .npy file: .*; copy or write it again'),
        (b'PK' + whole, r'not a readable .npy file'),
    ):
        (tmp_path / 'x.npy').write_bytes(data)
        with pytest.raises(UserError, match=match):
            opened(tmp_path / 'x.npy', (8, 8, 1))


def test_sets_of_8_bits_are_not_taken_for_wide_ones(tmp_path):
    for how, channels in ((WIDE, 1), (Reading(range=(0, 9)), 1)):
        with pytest.raises(UserError, match=r'data.bits: digits: holds opaque pixels of 8 bits'):
            open_source('digits:', image_shape=(8, 8, channels), reading=how)


def test_rounding_to_8_bits_is_said(tmp_path, warned):
    path = str(write_folder(tmp_path / 'set', {'a.png': write_png16(random_values(0, (8, 8, 3)))}))
    np.save(tmp_path / 'x.npy', random_values(0, (2, 8, 8, 3)))
    for each in (path, path, str(tmp_path / 'x.npy')):
        opened(each, (8, 8, 3), Reading())
        opened(each, (8, 8, 3), WIDE)
    assert warned == [
        f'{path}: 16-bit values are rounded to 8 bits; data.bits=16 keeps 16',
        f'{tmp_path}/x.npy: uint16 values are rounded to 8 bits; data.bits=16 keeps 16',
    ]


def test_arrays_of_a_program():
    values = random_values(0, (4, 8, 8), 4095)
    given = source_of(values)
    np.testing.assert_array_equal(
        TWELVE.stored(everything(given.at((8, 8, 1), TWELVE)))[..., 0], values
    )
    with pytest.raises(UserError, match=r'<arrays>: expected values from 0 to 99'):
        given.at((8, 8, 1), Reading(range=(0, 99)))


@pytest.mark.parametrize('channels', [1, 3])
def test_samples_come_in_the_range_of_the_set(tmp_path, channels):
    x = np.random.default_rng(0).uniform(-1, 1, (3, 8, 8, channels)).astype(np.float32)
    drawn = to_pixels(x, np.dtype(np.uint16))
    save_images(tmp_path / 'folder', drawn, reading=TWELVE)
    save_images(tmp_path / 'x.npz', drawn, reading=TWELVE)
    save_images(tmp_path / 'x.npy', drawn, reading=TWELVE)
    expected = np.rint((x + 1) / 2 * 4095)
    with np.load(tmp_path / 'x.npz') as arrays:
        stored = arrays['images']
    assert stored.dtype == np.uint16
    assert abs(stored - expected).max() <= 1
    np.testing.assert_array_equal(np.load(tmp_path / 'x.npy'), stored)
    for name in ('folder', 'x.npz', 'x.npy'):
        found = opened(tmp_path / name, (8, 8, channels), TWELVE)
        np.testing.assert_array_equal(TWELVE.stored(found), stored)
    floats = Reading(bits=16, range=(-2.5, 1))
    save_images(tmp_path / 'f.npz', drawn, reading=floats)
    with np.load(tmp_path / 'f.npz') as arrays:
        np.testing.assert_allclose(arrays['images'], (x + 1) / 2 * 3.5 - 2.5, atol=1e-4)
    check_output(tmp_path / 'g.npz', channels, floats)
    with pytest.raises(UserError, match=r'a data.range of whole numbers .*found -2.5,1; save as'):
        check_output(tmp_path / 'g', channels, floats)
    save_images(tmp_path / 'grid.png', drawn, reading=TWELVE)
    with Image.open(tmp_path / 'grid.png') as image:  # to look at: 8 bits, all of their range
        assert image.mode == {1: 'L', 3: 'RGB'}[channels]
        assert np.asarray(image)[2:-2].min() < 30


def test_the_log_of_what_was_read(logged, tmp_path):
    values = np.full((4, 8, 8, 3), 1000, np.uint16)
    values[:, 0, :, 0], values[:, 1:3, :, 1], values[..., 2] = 0, 4095, 300
    np.save(tmp_path / 'x.npy', values)
    path = str(tmp_path / 'x.npy')
    look.log_pixels(open_source(path, image_shape=(8, 8, 3), reading=TWELVE))
    assert logged == [
        f'{path}: pixels of 4 of 4 images, 8x8x3: red 0 to 1000, mean 875, 12.5% at 0; '
        'green 1000 to 4095, mean 1774, 25.0% at 4095; blue 300 to 300, mean 300; '
        '4% near black (below 256)'
    ]
    logged.clear()
    np.save(tmp_path / 'x.npy', np.clip(values, 9, 2047))
    look.log_pixels(open_source(path, image_shape=(8, 8, 3), reading=WIDE))
    assert logged[-1] == (
        f'{path}: the values 9 to 2047 are less than 1/16 of the range; data.range=0,2047 would '
        'spread them over all of it'
    )
    logged.clear()
    np.save(tmp_path / 'x.npy', random_values(0, (4, 8, 8, 7)))
    look.log_pixels(open_source(path, image_shape=(8, 8, 7), reading=WIDE))
    assert ': 7 channels, ' in logged[0]


def test_a_range_lets_narrow_files_through(tmp_path):
    values = random_values(0, (8, 8, 1), 4095)
    path = write_folder(tmp_path / 'set', {'a.png': write_png16(values)})
    with pytest.raises(
        UserError, match=r'they would be black; set data.range .* data.range=0,4095'
    ):
        opened(path, (8, 8, 1), Reading())
    found = opened(path, (8, 8, 1), Reading(range=(0, 4095)))
    np.testing.assert_array_equal(found[0], np.rint(values / 4095 * 255))


def test_colours_that_pillow_rounds_are_refused(tmp_path):
    data = b'P6\n8 8\n65535\n' + random_values(0, (8, 8, 3)).astype('>u2').tobytes()
    path = write_folder(tmp_path / 'set', {'a.ppm': data})
    with pytest.raises(UserError, match=r'colours of more than 8 bits; save them as PNG or TIFF'):
        opened(path, (8, 8, 3))
    assert opened(path, (8, 8, 3), Reading()).shape == (1, 8, 8, 3)


def test_tiff_with_colours(tmp_path):
    tifffile = pytest.importorskip('tifffile')
    values = random_values(0, (8, 12, 3))
    for planar in ('contig', 'separate'):
        stored = values if planar == 'contig' else np.moveaxis(values, 2, 0)
        (tmp_path / planar).mkdir()
        tifffile.imwrite(
            tmp_path / planar / 'a.tif', stored, photometric='rgb', planarconfig=planar
        )
        np.testing.assert_array_equal(opened(tmp_path / planar, (8, 12, 3))[0], values)
        rounded = opened(tmp_path / planar, (8, 12, 3), Reading())[0]
        assert abs(rounded - values / 257).max() <= 1
