"""Transparent images: drawn on a background, or with opacity as a fourth channel."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from support.data_files import encoded, everything, put, random_pixels, write_folder
from support.tiny import tiny_config

from jaxunet.config import identity, resolve, to_dict
from jaxunet.data import look
from jaxunet.data.automatic import complete
from jaxunet.data.images import plain_colours, save_images, to_pixels
from jaxunet.data.png16 import write_png16
from jaxunet.data.reading import Reading
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError

SIDE = 24


def emoji(number: int, junk: int) -> np.ndarray:
    """An RGBA figure with a soft edge; what its opacity of 0 hides are colours drawn by `junk`."""
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    opacity = np.clip((9 + number % 3 - np.hypot(x, y)) * 100, 0, 255).astype(np.uint8)
    pixels = random_pixels(junk, (SIDE, SIDE, 4))
    pixels[opacity > 0, :3] = (200, 40 * number % 256, 30)
    pixels[..., 3] = opacity
    return pixels


def palette(pixels: np.ndarray) -> bytes:
    """A palette PNG whose hidden entries have the colours of the hidden pixels."""
    hidden = pixels[..., 3] == 0
    indices = np.where(hidden, 1 + np.arange(SIDE) % 4, 0).astype(np.uint8)
    image = Image.fromarray(indices, 'P')
    image.putpalette([200, 40, 30, *pixels[0, :4, :3].ravel().tolist()])
    return encoded(image, transparency=bytes([255, 0, 0, 0, 0]))


def sixteen(pixels: np.ndarray) -> bytes:
    return write_png16(pixels.astype(np.uint16) * 257)


FORMS = {
    'rgba': encoded,
    'grey': lambda pixels: encoded(Image.fromarray(np.ascontiguousarray(pixels[..., ::3]), 'LA')),
    'palette': palette,
    'webp': lambda pixels: encoded(pixels, 'WEBP', lossless=True, exact=True),
    'tiff': lambda pixels: encoded(pixels, 'TIFF'),
    'sixteen': sixteen,
}


@pytest.mark.parametrize(
    'reading', [Reading(), Reading('keep'), Reading('keep', 16), Reading('#80ff00', 16)]
)
@pytest.mark.parametrize('form', FORMS)
def test_hidden_colours_do_not_change_a_value(form, reading, tmp_path):
    """At the size of the file, and shrunk, and cropped."""
    channels = 4 if reading.keeps else 3
    for shape in ((SIDE, SIDE, channels), (16, 16, channels), (8, 12, channels)):
        read = []
        for junk in (1, 2):
            files = {f'{i}.png': FORMS[form](emoji(i, junk)) for i in range(3)}
            path = put(tmp_path / f'{junk}{shape}', files, 'folder')
            read.append(everything(open_source(str(path), image_shape=shape, reading=reading)))
        assert read[0].dtype == reading.dtype
        np.testing.assert_array_equal(read[0], read[1])
        if shape[0] == SIDE:
            corner = np.array((0, 0, 0) if reading.keeps else reading.colour)
            assert (read[0][:, 0, 0, :3] == corner * (reading.top // 255)).all()
    dropped = Reading('drop')
    read = [
        everything(
            open_source(
                str(write_folder(tmp_path / f'drop{junk}', {'a.png': FORMS[form](emoji(0, junk))})),
                image_shape=(SIDE, SIDE, 3),
                reading=dropped,
            )
        )
        for junk in (1, 2)
    ]
    assert (read[0] != read[1]).any()


@pytest.mark.parametrize('background', ['white', 'black', '#123456'])
def test_backgrounds_are_those_of_alpha_composite(background, tmp_path):
    pixels = random_pixels(3, (SIDE, SIDE, 4))
    ground = Image.new('RGBA', (SIDE, SIDE), background)
    expected = np.asarray(Image.alpha_composite(ground, Image.fromarray(pixels)).convert('RGB'))
    path = str(write_folder(tmp_path / 'set', {'a.png': encoded(pixels)}))
    for bits in (8, 16):
        reading = Reading(background, bits)
        found = everything(open_source(path, image_shape=(SIDE, SIDE, 3), reading=reading))[0]
        assert abs(found.astype(float) * 255 / reading.top - expected).max() <= 1.01
        if bits == 8:
            np.testing.assert_array_equal(found, expected)


def test_colours_that_a_file_names_as_transparent(tmp_path):
    """PNG's key colour, of 8 and of 16 bits, grey and RGB."""
    grey, rgb = random_pixels(0, (SIDE, SIDE)), random_pixels(1, (SIDE, SIDE, 3))
    grey[:4], rgb[:4] = 7, (1, 2, 3)
    wide = grey.astype(np.uint16) * 257
    files = {
        'a.png': encoded(grey, transparency=7),
        'b.png': encoded(rgb, transparency=(1, 2, 3)),
        'c.png': encoded(wide, transparency=7 * 257),
    }
    path = str(write_folder(tmp_path / 'set', files))
    for bits in (8, 16):
        source = open_source(path, image_shape=(SIDE, SIDE, 3), reading=Reading(bits=bits))
        found = everything(source)
        assert (found[:, :4] == source.reading.top).all()
        scale = source.reading.top // 255
        np.testing.assert_array_equal(found[1, 4:], rgb[4:].astype(int) * scale)
        assert all(source.has_holes(i) for i in range(3))


def test_a_sample_written_and_read_again_keeps_what_shows(tmp_path):
    """Every pair of a colour and an opacity, multiplied, in every form that holds it."""
    opacity, colour = np.mgrid[:256, :256].astype(np.uint8)
    drawn = np.stack([colour, opacity // 2, np.zeros_like(colour), opacity], axis=-1)
    shows = np.minimum(drawn, drawn[..., 3:])  # a model may draw more colour than opacity
    plain = plain_colours(drawn)
    assert (plain[0, :, :3] == 0).all()
    save_images(tmp_path / 'folder', plain[None])
    save_images(tmp_path / 'x.npz', plain[None])
    for name in ('folder', 'x.npz'):
        path = str(tmp_path / name)
        source = open_source(path, image_shape=(256, 256, 4), reading=Reading('keep'))
        np.testing.assert_array_equal(everything(source)[0], shows)
    with Image.open(tmp_path / 'folder' / '000000.png') as image:
        assert image.mode == 'RGBA'
    save_images(tmp_path / 'grid.png', plain[None])
    with Image.open(tmp_path / 'grid.png') as image:
        assert image.mode == 'RGB'
        white = shows[..., :3].astype(int) + 255 - shows[..., 3:]
        shown = np.asarray(image)[2:258, 2:258]
        assert abs(shown - white).max() <= 1


def test_wide_samples_with_opacity_keep_what_shows(tmp_path):
    random = np.random.default_rng(0)
    x = random.uniform(-1.1, 1.1, (2, 8, 9, 4)).astype(np.float32)
    drawn = to_pixels(x, np.dtype(np.uint16))
    save_images(tmp_path / 'folder', plain_colours(drawn), reading=Reading('keep', 16))
    source = open_source(
        str(tmp_path / 'folder'), image_shape=(8, 9, 4), reading=Reading('keep', 16)
    )
    np.testing.assert_array_equal(everything(source), np.minimum(drawn, drawn[..., 3:]))


def test_the_log_counts_transparent_images(tmp_path, told):
    solid = encoded(random_pixels(0, (SIDE, SIDE, 3)))
    opaque = np.dstack([random_pixels(0, (SIDE, SIDE, 3)), np.full((SIDE, SIDE), 255, np.uint8)])
    files = {'a.png': encoded(emoji(0, 1)), 'b.png': solid, 'c.png': encoded(opaque)}
    path = str(write_folder(tmp_path / 'set', files))
    for background, what in (
        ('white', 'they are drawn on white'),
        ('keep', 'their opacity is a fourth channel'),
        ('drop', 'it is dropped, so that hidden colours count'),
    ):
        told.clear()
        shape = (SIDE, SIDE, 4 if background == 'keep' else 3)
        look.log_pixels(open_source(path, image_shape=shape, reading=Reading(background)))
        assert told[1] == (
            f'{path}: 1 of 3 images are transparent in places; {what} '
            f'(data.background={background})'
        )


def test_runs_from_before_the_field_keep_their_reading():
    new = tiny_config(data={'path': 'emoji/'})
    values = to_dict(new)
    for name in ('background', 'bits', 'range'):
        del values['data'][name]  # as checkpoints have it
    old = resolve(values)
    assert (old.data.background, new.data.background) == ('drop', 'white')
    assert complete(to_dict(new), old) == old  # a resumed run
    assert complete(to_dict(new)) == new
    assert identity(values) == identity(to_dict(old)) != identity(to_dict(new))
    # A few fields that a program gives are not those of an earlier version.
    assert resolve({'data': {'path': 'emoji/'}}).data.background == 'white'
    # No digit is transparent: earlier results are those of the same config.
    digits = to_dict(tiny_config())
    del values['data']['path']
    assert identity(digits) == identity({**digits, 'data': digits['data'] | {'background': 'drop'}})


def test_mistakes():
    for data, channels, match in (
        ({'background': 'grey'}, 3, r'data.background: expected white, .* found .grey.'),
        ({'background': 'keep'}, 3, r'expected model.image_channels=4, found 3'),
        ({'background': 'keep', 'range': (0, 9)}, 4, r'data.range: images with opacity'),
        ({'range': (5, 5)}, 3, r'data.range: expected LOWEST,HIGHEST'),
    ):
        with pytest.raises(UserError, match=match):
            tiny_config(data=data, model={'image_channels': channels})
