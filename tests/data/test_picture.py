"""A picture and its mask, as the pixels of a model."""

import re

import numpy as np
import pytest
from PIL import Image

from jaxunet.data.picture import read_mask, read_picture
from jaxunet.data.pixels import decode
from jaxunet.runtime.errors import UserError

COLOURS = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


@pytest.fixture
def folder(tmp_path):
    Image.fromarray(COLOURS).save(tmp_path / 'photo.png')
    Image.fromarray(COLOURS[..., 0]).save(tmp_path / 'grey.png')
    mask = np.zeros((24, 40), np.uint8)
    mask[:, 20:] = 255
    Image.fromarray(mask).save(tmp_path / 'mask.png')
    Image.fromarray(mask.T.copy()).save(tmp_path / 'turned.png')
    Image.fromarray(np.zeros((24, 40), np.uint8)).save(tmp_path / 'black.png')
    (tmp_path / 'text.png').write_text('not an image')
    (tmp_path / 'half.png').write_bytes((tmp_path / 'photo.png').read_bytes()[:900])
    return tmp_path


def test_a_picture_becomes_what_a_training_image_would(folder):
    data = (folder / 'photo.png').read_bytes()
    expected = decode(data, 'photo.png', (8, 8, 3))
    np.testing.assert_array_equal(read_picture(folder / 'photo.png', (8, 8, 3)), expected)
    # At the model's size it keeps its pixels.
    np.testing.assert_array_equal(read_picture(folder / 'photo.png', (24, 40, 3)), COLOURS)
    np.testing.assert_array_equal(read_picture(folder / 'grey.png', (24, 40, 1)), COLOURS[..., :1])
    Image.fromarray(COLOURS).quantize(4).save(folder / 'palette.png')
    assert read_picture(folder / 'palette.png', (8, 8, 3)).shape == (8, 8, 3)
    assert read_picture(folder / 'palette.png', (8, 8, 1)).shape == (8, 8, 1)


@pytest.mark.parametrize(('name', 'channels'), [('grey.png', 3), ('photo.png', 1)])
def test_a_picture_is_converted_to_the_channels_of_the_model(name, channels, folder):
    shape = (8, 8, channels)
    expected = decode((folder / name).read_bytes(), name, shape)
    np.testing.assert_array_equal(read_picture(folder / name, shape), expected)


def test_a_mask_is_cropped_with_its_picture(folder):
    # The middle square of 24x24 pixels; its right 12 columns are white.
    redraw = read_mask(folder / 'mask.png', folder / 'photo.png', (8, 8, 3))
    np.testing.assert_array_equal(redraw, np.tile(np.arange(8) >= 4, (8, 1)))
    exact = read_mask(folder / 'mask.png', folder / 'photo.png', (24, 40, 3))
    np.testing.assert_array_equal(exact, np.tile(np.arange(40) >= 20, (24, 1)))
    # A mask in colour, or of one bit, means its brightness.
    Image.open(folder / 'mask.png').convert('RGBA').save(folder / 'mask.png')
    np.testing.assert_array_equal(
        read_mask(folder / 'mask.png', folder / 'photo.png', (8, 8, 3)), redraw
    )


@pytest.mark.parametrize('mode', ['RGBA', 'LA', 'P'])
def test_a_mask_drawn_as_transparency_is_refused(mode, folder):
    alpha = np.full((24, 40), 255, np.uint8)
    alpha[:, 20:] = 0
    mask = Image.fromarray(np.dstack([COLOURS, alpha]))
    mask.convert(mode).save(folder / 'mask.png')
    with pytest.raises(UserError, match=r'mask.png: is transparent in places, .* flatten it, with'):
        read_mask(folder / 'mask.png', folder / 'photo.png', (8, 8, 3))


def test_a_mask_of_narrow_values_is_refused(folder):
    mask = np.where(np.arange(40) < 20, 0, 255).astype(np.int32)
    Image.fromarray(np.tile(mask, (24, 1))).save(folder / 'mask.tif')
    with pytest.raises(UserError, match=r'mask.tif: 16 or 32 bits, but .* above 255'):
        read_mask(folder / 'mask.tif', folder / 'photo.png', (8, 8, 3))


@pytest.mark.parametrize(
    ('name', 'shape', 'message'),
    [
        ('nowhere.png', (8, 8, 3), 'nowhere.png: cannot be read: No such file'),
        ('.', (8, 8, 3), 'cannot be read: Is a directory'),
        ('text.png', (8, 8, 3), 'text.png: not an image; expected a PNG, JPEG or other image'),
        ('half.png', (8, 8, 3), 'half.png: cannot be decoded'),
        ('photo.png', (8, 8, 4), 'a picture has 1 channel (grey) or 3 (RGB), but the model has 4'),
    ],
)
def test_pictures_that_do_not_fit(name, shape, message, folder):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_picture(folder / name, shape)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('turned.png', 'turned.png: expected a mask of the size of'),
        ('turned.png', '40x24 pixels (width x height), found 24x40'),
        ('black.png', 'black.png: nothing to redraw'),
        ('half.png', 'half.png: cannot be decoded'),
        ('nowhere.png', 'nowhere.png: cannot be read'),
    ],
)
def test_masks_that_do_not_fit(name, message, folder):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_mask(folder / name, folder / 'photo.png', (8, 8, 3))
    assert '\n' not in str(error.value)
