"""Images to uint8, into grids and into files."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from support.data_files import random_pixels

from jaxunet.data import images as im
from jaxunet.runtime.errors import UserError


def pixels(count=5, height=40, width=36, channels=3, seed=0):
    return random_pixels(seed, (count, height, width, channels))


def to_uint8(images, **options):
    return im.to_pixels(images, np.dtype(np.uint8), **options)


def leftovers(folder):
    return [path.name for path in folder.iterdir() if 'partial' in path.name]


def test_to_pixels_inverts_the_loading_of_every_pixel_value():
    values = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        to_uint8(values.astype(np.float32) / np.float32(127.5) - 1), values
    )


def test_to_pixels_rounds_and_clips():
    x = jnp.asarray(
        [-np.inf, -5, -1.004, -1, 1, 1.004, 1.01, 9, np.inf, 0.4 / 127.5 - 1, 0.6 / 127.5 - 1],
        jnp.float32,
    )
    np.testing.assert_array_equal(to_uint8(x), [0, 0, 0, 0, 255, 255, 255, 255, 255, 0, 1])
    assert to_uint8(jnp.ones((2, 3), jnp.bfloat16)).tolist() == [[255] * 3] * 2


def test_to_pixels_truncates_as_guided_diffusion():
    x = np.random.default_rng(0).uniform(-1.2, 1.2, 1000).astype(np.float32)
    expected = ((x + 1) * np.float32(127.5)).clip(0, 255).astype(np.uint8)
    np.testing.assert_array_equal(to_uint8(x, truncate=True), expected)
    assert (to_uint8(x) != expected).any()


def test_to_pixels_refuses_nan():
    with pytest.raises(UserError, match=r'25.00% of the pixels are NaN'):
        to_uint8(np.array([0, np.nan, 1, 1], np.float32))


def test_grid_places_every_image():
    images = pixels(count=5)
    result = im.grid(images, columns=2)
    gap = im.GAP
    assert result.shape == (3 * (40 + gap) + gap, 2 * (36 + gap) + gap, 3)
    seen = np.zeros(result.shape[:2], bool)
    for i, image in enumerate(images):
        top, left = gap + i // 2 * (40 + gap), gap + i % 2 * (36 + gap)
        np.testing.assert_array_equal(result[top : top + 40, left : left + 36], image)
        seen[top : top + 40, left : left + 36] = True
    assert (result[~seen] == 255).all()


@pytest.mark.parametrize(('side', 'factor'), [(8, 6), (28, 2), (31, 2), (32, 1), (64, 1)])
def test_grid_enlarges_tiny_images_by_whole_pixels(side, factor):
    images = pixels(count=1, height=side, width=side + 3, channels=1)
    inner = im.grid(images)[im.GAP : -im.GAP, im.GAP : -im.GAP]
    np.testing.assert_array_equal(inner, np.kron(images[0], np.ones((factor, factor, 1), np.uint8)))


@pytest.mark.parametrize(
    ('classes', 'count', 'columns'),
    [
        (0, 64, None),
        (1, 64, None),
        (2, 64, 8),
        (3, 64, 9),
        (10, 64, 10),
        (10, 400, 20),
        (21, 64, None),
    ],
)
def test_columns_of_one_class_make_about_a_square(classes, count, columns):
    assert im.class_columns(classes, count) == columns


def test_grid_columns():
    images = pixels(count=7, height=32, width=32)
    cell = 32 + im.GAP
    assert im.grid(images).shape[:2] == (3 * cell + im.GAP, 3 * cell + im.GAP)
    assert im.grid(images, columns=20).shape[:2] == (cell + im.GAP, 7 * cell + im.GAP)
    with pytest.raises(UserError, match='columns: expected 1 or more, found 0'):
        im.grid(images, columns=0)
    with pytest.raises(UserError, match='images: expected at least one'):
        im.grid(images[:0])
    with pytest.raises(ValueError, match='expected uint8 or uint16 of shape'):
        im.grid(images.astype(np.float32))


@pytest.mark.parametrize(
    ('shape', 'mode'), [((9, 7), 'L'), ((9, 7, 1), 'L'), ((9, 7, 3), 'RGB'), ((9, 7, 4), 'RGBA')]
)
def test_png_round_trip(tmp_path, shape, mode):
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    path = tmp_path / 'new' / 'image.png'
    im.save_png(path, array)
    im.save_png(path, array)  # an existing file is replaced
    with Image.open(path) as image:
        assert (image.format, image.mode) == ('PNG', mode)
        np.testing.assert_array_equal(np.asarray(image).reshape(shape), array)
    assert os.listdir(path.parent) == ['image.png']


@pytest.mark.parametrize('channels', [2, 5, 6])
def test_png_names_the_channels_it_supports(tmp_path, channels):
    images = pixels(channels=channels)
    for save in (
        lambda: im.save_png(tmp_path / 'a.png', images[0]),
        lambda: im.save_images(tmp_path / 'b.png', images),
    ):
        with pytest.raises(
            UserError, match=rf'1 channel \(grey\) or 3 \(RGB\), found {channels}; save as .npz'
        ):
            save()
    with pytest.raises(UserError, match=f'found {channels}'):
        im.save_images(tmp_path / 'folder', images)
    assert list(tmp_path.iterdir()) == []


def test_save_images_as_grid(tmp_path):
    images = pixels()
    im.save_images(tmp_path / 'x.PNG', images, np.arange(5), columns=5)
    with Image.open(tmp_path / 'x.PNG') as image:
        np.testing.assert_array_equal(np.asarray(image), im.grid(images, 5))


def test_save_images_as_npz(tmp_path):
    images = pixels(channels=2)
    im.save_images(tmp_path / 'x.npz', images, np.array([3, 1, 4, 1, 5]))
    with np.load(tmp_path / 'x.npz') as file:
        assert sorted(file) == ['images', 'labels']
        np.testing.assert_array_equal(file['images'], images)
        assert file['images'].dtype == np.uint8
        assert file['labels'].dtype == np.int32
        assert file['labels'].tolist() == [3, 1, 4, 1, 5]
    im.save_images(tmp_path / 'x.npz', images)
    with np.load(tmp_path / 'x.npz') as file:
        assert sorted(file) == ['images']
    assert os.listdir(tmp_path) == ['x.npz']
    with pytest.raises(ValueError, match=r'labels: expected shape \(5,\), found \(4,\)'):
        im.save_images(tmp_path / 'y.npz', images, np.arange(4))


@pytest.mark.parametrize('exists', [False, True])
def test_save_images_as_folder(tmp_path, exists):
    folder = tmp_path / ('out.d' if exists else 'deep/out')
    if exists:
        folder.mkdir()
    images = pixels(count=11, channels=1)
    im.save_images(folder, images)
    assert sorted(os.listdir(folder)) == [f'{i:06d}.png' for i in range(11)]
    for i in (0, 10):
        with Image.open(folder / f'{i:06d}.png') as image:
            np.testing.assert_array_equal(np.asarray(image), images[i, ..., 0])
    assert leftovers(folder.parent) == []
    with pytest.raises(UserError, match='expected a new or empty folder'):
        im.save_images(folder, images)


def test_a_slash_makes_a_folder_of_a_name_with_a_dot(tmp_path):
    im.save_images(f'{tmp_path}/samples_0.15/', pixels(count=2))
    assert sorted(os.listdir(tmp_path / 'samples_0.15')) == ['000000.png', '000001.png']


def test_folder_names_carry_labels(tmp_path):
    im.save_images(tmp_path / 'out', pixels(count=2), np.array([7, 0]))
    assert sorted(os.listdir(tmp_path / 'out')) == ['000000_class7.png', '000001_class0.png']


def test_save_images_refuses_other_suffixes(tmp_path):
    with pytest.raises(UserError, match=r"ends in .png .*, .npz or .npy .*found '.jpg'"):
        im.save_images(tmp_path / 'x.jpg', pixels())


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / 'file').write_text('in the way')
    for name in ('file/x.png', 'file/x.npz', 'file/sub/x'):
        with pytest.raises(UserError, match=r'cannot be written: .*; check the folder'):
            im.save_images(tmp_path / name, pixels())
    assert (tmp_path / 'file').read_text() == 'in the way'
    assert os.listdir(tmp_path) == ['file']


def test_a_file_is_not_taken_for_a_folder_nor_a_folder_for_a_file(tmp_path):
    (tmp_path / 'file').write_text('in the way')
    (tmp_path / 'file.png').write_text('in the way')
    for name in ('file', 'file.png/'):
        with pytest.raises(UserError, match=r'is a file; name a folder .*, \.png .*, \.npz or'):
            im.check_output(f'{tmp_path}/{name}')
    for name in ('d.png', 'd.npz'):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=rf'{name}: is a folder; name a file, or put a / at'):
            im.check_output(tmp_path / name)
        im.check_output(f'{tmp_path}/{name}/')


@pytest.mark.parametrize('name', ['x.png', 'x.npz', 'x'])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, name):
    """A disk that fills up half-way: the old file stays whole and nothing partial remains."""
    if name != 'x':
        im.save_images(tmp_path / name, pixels(seed=1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(im.np, 'savez', full)
    monkeypatch.setattr(Image.Image, 'save', full)
    with pytest.raises(UserError, match='cannot be written: No space left on device'):
        im.save_images(tmp_path / name, pixels(seed=2))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
