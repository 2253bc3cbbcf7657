"""data.crop=random: another part of each image every epoch, as guided-diffusion's random_crop."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from support.data_files import encoded, official_files, put, write_tar

from jaxunet.config import Config, resolve, to_dict
from jaxunet.data import pipeline
from jaxunet.data.crop import random_crops
from jaxunet.data.source import ArraySource
from jaxunet.data.sources import open_images, open_source
from jaxunet.runtime.errors import UserError
from jaxunet.training.evaluation import Colour


def ramp(height: int = 90, width: int = 160) -> np.ndarray:
    """An image whose red is its column and whose green is its row."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns, rows, 0 * rows], axis=2).astype(np.uint8)


@pytest.mark.parametrize('form', ['folder', 'npz', 'array'])
@pytest.mark.parametrize(
    'crop', [(1.0, 0.5, 0.5), (1.0, 0.0, 0.25), (0.8, 1.0, 0.0), (40 / 47, 0.3, 0.9)]
)
def test_a_crop_is_the_part_that_it_names(form, crop, tmp_path):
    if form == 'folder':
        path = put(tmp_path, {'a.png': encoded(ramp())}, 'folder')
        source = open_source(str(path), image_shape=(40, 40, 3))
    elif form == 'npz':
        np.savez(tmp_path / 'a.npz', images=ramp()[None])
        source = open_source(str(tmp_path / 'a.npz'), image_shape=(40, 40, 3))
    else:
        source = Colour(ArraySource('a', ramp()[None], (40, 40, 3)))
    share, down, right = crop
    found = source.load(np.array([0]), np.array([crop]))[0].astype(float)
    side = 90 * share
    places = (np.arange(40) + 0.5) * side / 40 - 0.5
    inner = slice(4, -4)  # the filter is cut off at the edges
    red, green = found[inner, inner, 0], found[inner, inner, 1]
    np.testing.assert_allclose(red, np.tile((160 - side) * right + places[inner], (32, 1)), atol=1)
    np.testing.assert_allclose(
        green, np.tile((90 - side) * down + places[inner, None], (1, 32)), atol=1
    )
    if crop == (1.0, 0.5, 0.5):
        np.testing.assert_array_equal(source.load(np.array([0]))[0], found)


@pytest.mark.parametrize('share', [1.0, 0.8, 0.25])
def test_a_crop_of_a_photograph_has_all_its_detail(share, tmp_path):
    """A JPEG decoder that reduces the image must leave enough pixels for a small part of it."""
    blocks = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    photo = encoded(blocks.repeat(8, axis=0).repeat(8, axis=1), 'JPEG', quality=95)
    pixels = np.asarray(Image.open(io.BytesIO(photo)))
    files = {'a.jpg': photo, 'b.png': encoded(pixels)}
    source = open_source(str(put(tmp_path, files, 'folder')), image_shape=(32, 32, 3))
    found = source.load(np.array([0, 1]), np.array([(share, 0.5, 0.5)] * 2)).astype(float)
    assert np.abs(found[0] - found[1]).mean() < 8


def test_an_image_of_the_models_size_is_cropped_too():
    image = ramp(32, 32)[None]
    source = ArraySource('a', image, (32, 32, 3))
    np.testing.assert_array_equal(source.load(np.array([0])), image)
    cut = source.load(np.array([0]), np.array([[0.8, 0.0, 1.0]]))[0].astype(float)
    places = (np.arange(32) + 0.5) * 0.8 - 0.5
    np.testing.assert_allclose(cut[4:-4, 4:-4, 0], np.tile(6.4 + places[4:-4], (24, 1)), atol=1)


def test_the_distribution_is_guided_diffusions():
    """The shorter side becomes 64 to 80 pixels, each number as often, and 64 are cut from them."""
    crops = random_crops(np.random.default_rng(0), 20_000, 64, 0.8)
    sides, counts = np.unique(np.round(64 / crops[:, 0], 9), return_counts=True)
    np.testing.assert_array_equal(sides, range(64, 81))
    assert np.abs(counts - 20_000 / 17).max() < 5 * np.sqrt(20_000 / 17)
    for place in crops[:, 1:].T:
        assert 0 <= place.min() < 1e-3 < 1 - 1e-3 < place.max() < 1
        np.testing.assert_allclose(
            np.quantile(place, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.02
        )
    np.testing.assert_array_equal(random_crops(np.random.default_rng(0), 5, 64, 1.0)[:, 0], 1)


def config(**data) -> Config:
    return Config(seed=3).replace(
        data={'batch_size': 4, 'crop': 'random', **data}, train={'steps': 6}
    )


def test_batches_are_a_function_of_seed_and_step():
    images = np.random.default_rng(0).integers(0, 256, (8, 24, 20, 3), dtype=np.uint8)
    source = ArraySource('a', images, (8, 8, 3))
    with pipeline.stream(source, config(), 0, slice(0, 4)) as batches:
        whole = [batch['image'] for batch in batches]
    for first, rows in ((0, slice(0, 2)), (3, slice(2, 4)), (5, slice(0, 4))):
        with pipeline.stream(source, config(), first, rows) as batches:
            for step, batch in enumerate(batches, first):
                np.testing.assert_array_equal(batch['image'], whole[step][rows])
    once, again = (
        {image.tobytes() for batch in whole[i : i + 2] for image in batch} for i in (0, 2)
    )
    assert len(once) == len(again) == 8  # an epoch of 8 images each
    assert not once & again  # cut elsewhere
    # Evaluations and the held-out loss see the centre.
    np.testing.assert_array_equal(source.load(np.arange(8)), pipeline.load_all(source, False)[0])


def test_random_crops_are_streamed():
    source = ArraySource('a', np.zeros((8, 8, 8, 3), np.uint8), (8, 8, 3))
    assert pipeline.choose_cache(config(), source) == 'stream'
    assert pipeline.choose_cache(Config(), source) == 'device'


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        ({'cache': 'device'}, 'data.crop: random cuts images anew every epoch, but data.cache='),
        ({'crop': 'centre'}, "data.crop: expected one of center, random, found 'centre'; did you"),
        ({'crop_least': 0.0}, 'data.crop_least: expected more than 0 and at most 1, found 0.0'),
        ({'crop_least': 1.5}, 'data.crop_least: expected more than 0 and at most 1, found 1.5'),
    ],
)
def test_mistakes(data, message):
    with pytest.raises(UserError, match=message):
        resolve(to_dict(config(**data)))


@pytest.mark.parametrize('prefix', ['', 'cifar10:'])
def test_a_compressed_tar_is_decoded_once(prefix, tmp_path):
    path = put(tmp_path, {'a.png': encoded(ramp())}, 'tar.xz')
    with pytest.raises(UserError, match='is a compressed tar, which is decoded once; unpack it'):
        open_images(config(path=f'{prefix}{path}'))


def test_the_official_archive_keeps_its_images(tmp_path):
    archive = write_tar(tmp_path / 'cifar-10-python.tar.gz', official_files(), 'gz')
    assert open_images(config(path=f'cifar10:{archive}')).stored_size(0) == (32, 32)
