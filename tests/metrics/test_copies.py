"""Copies of training images: planted ones are found, unseen real images are not."""

from __future__ import annotations

import csv

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxunet.data.holdout import hold_out
from jaxunet.data.images import GAP, save_images
from jaxunet.data.sources import open_source
from jaxunet.metrics import copies
from jaxunet.metrics.copies import find_copies
from jaxunet.metrics.evaluation import compute
from jaxunet.metrics.features import FeatureNetwork
from jaxunet.metrics.nearest import TABLE_COLUMNS, compare, write
from jaxunet.metrics.pairwise import BLOCK
from jaxunet.metrics.table import ImageSummary
from jaxunet.runtime.errors import UserError


def flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1)


def mirror(rows: np.ndarray) -> np.ndarray:
    return flat(rows.reshape(-1, 8, 8)[:, :, ::-1])


@pytest.fixture(scope='module')
def digits():
    """Training images and held-out images, uint8 (n, 8, 8, 1)."""
    source = hold_out(open_source('digits:', image_shape=(8, 8, 1)), 300)
    return source.load(np.arange(len(source))), source.held_out.load(np.arange(300))


def noisy(images: np.ndarray, levels: int) -> np.ndarray:
    change = np.random.default_rng(1).integers(-levels, levels + 1, images.shape)
    return np.clip(images.astype(int) + change, 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    'change',
    [
        lambda x: x,
        lambda x: x[:, :, ::-1],
        lambda x: noisy(x, 12),
        lambda x: noisy(x, 12)[:, :, ::-1],
    ],
    ids=['copies', 'flips', 'noise', 'noisy flips'],
)
def test_planted_copies_are_found(change, digits):
    training, _ = digits
    planted = np.arange(0, 1400, 7)
    found = find_copies(flat(change(training[planted])), flat(training), mirror=mirror)
    assert found.share == 1
    np.testing.assert_array_equal(found.nearest.image[:, 0], planted)


def test_unseen_images_are_not_copies(digits):
    training, held_out = digits
    found = find_copies(flat(held_out), flat(training), mirror=mirror)
    assert found.share == 0
    assert found.baseline == 0
    mixed = np.concatenate([held_out[:150], training[:50]])
    assert find_copies(flat(mixed), flat(training), mirror=mirror).share == 0.25


def test_without_mirror_flips_are_new(digits):
    training, _ = digits
    assert find_copies(flat(training[:100, :, ::-1]), flat(training)).share < 0.1


def test_copies_of_images_that_the_set_holds_three_times_are_found(digits):
    training, held_out = digits
    thrice = np.concatenate([training, noisy(training[:60], 2), noisy(training[:60], 3)])
    assert find_copies(flat(noisy(training[:60], 12)), flat(thrice), mirror=mirror).share > 0.9
    unseen = find_copies(flat(held_out), flat(thrice), mirror=mirror)
    assert unseen.share == 0
    assert 0.02 < unseen.baseline < 0.3  # some of the 180 are drawn for the baseline


def test_the_test_has_no_scale_and_does_not_depend_on_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    training = rng.normal(size=(90, 20)).astype(np.float32) + 30
    samples = np.concatenate([training[5:10] + np.float32(0.01), rng.normal(size=(20, 20)) + 30])
    samples = samples.astype(np.float32)
    plain = find_copies(samples, training)
    assert plain.found.tolist() == [True] * 5 + [False] * 20
    monkeypatch.setattr(copies, 'CHUNK_BYTES', 20 * 4 * 25)
    scaled = find_copies(samples * 128, training * 128, block=16)
    np.testing.assert_allclose(scaled.ratio, plain.ratio, rtol=1e-12)
    np.testing.assert_array_equal(scaled.nearest.image, plain.nearest.image)


def test_nearest_is_that_of_all_distances(digits):
    training, held_out = digits
    found = copies._Search(flat(training), mirror, BLOCK).nearest(flat(held_out), 3)
    a = flat(held_out).astype(float) / 255
    b, flipped = (flat(x).astype(float) / 255 for x in (training, training[:, :, ::-1]))
    plain, turned = (np.sqrt(((a[:, None] - x[None]) ** 2).sum(2)) for x in (b, flipped))
    least = np.minimum(plain, turned)
    np.testing.assert_allclose(found.distance, np.sort(least, axis=1)[:, :3])
    rows = np.arange(300)[:, None]
    np.testing.assert_allclose(found.distance, least[rows, found.image])
    np.testing.assert_array_equal(found.mirrored, (turned < plain)[rows, found.image])


def test_too_few_training_images():
    with pytest.raises(UserError, match='copies: need 5 training images or more, found 4'):
        find_copies(np.zeros((3, 2), np.float32), np.zeros((4, 2), np.float32))


def network() -> FeatureNetwork:
    weights = np.random.default_rng(3).normal(size=(8 * 8 * 3, 12)).astype(np.float32) / 255
    return FeatureNetwork(
        'tiny-1', 12, lambda images: jnp.asarray(flat(images) @ weights), False, 'none'
    )


def test_the_metric_of_features():
    rng = np.random.default_rng(0)
    training = rng.normal(size=(40, 12)).astype(np.float32)
    samples = np.concatenate([training[:4], rng.normal(size=(12, 12)).astype(np.float32)])
    sides = [ImageSummary(n, len(x), '8x8', None, x) for n, x in (('s', samples), ('t', training))]
    (result,) = compute(['copies'], network(), *sides)
    assert result.label == 'copies[features=tiny-1]'
    assert result.value == 0.25
    assert result.protocol['of_training_images'] == 0


def test_pairs_are_shown_and_listed(digits, tmp_path):
    training, held_out = digits
    samples = np.concatenate([held_out[:16], training[7:9, :, ::-1]])
    save_images(tmp_path / 'training', training[:60])
    np.savez(tmp_path / 'samples.npz', images=samples)
    found = compare(
        str(tmp_path / 'samples.npz'), str(tmp_path / 'training'), network(), batch_size=32
    )
    assert [r.label for r in found.results] == [
        'copies[pixels]',
        'copies[features=tiny-1]',
        'copies[pixels or features=tiny-1]',
    ]
    assert found.results[0].value == pytest.approx(2 / 18)
    table = write(tmp_path / 'out' / 'pairs.png', found)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(TABLE_COLUMNS)
    assert [int(row['sample']) for row in rows] == list(range(18))
    assert [row['pixel_neighbour'] for row in rows[16:]] == ['7', '8']
    assert [row['copy'] for row in rows] == [str(int(x)) for x in found.found]
    assert all(row['pixel_mirrored'] == '1' and row['pixel_distance'] == '0' for row in rows[16:])
    picture = np.asarray(Image.open(tmp_path / 'out' / 'pairs.png'))
    side = 48 + GAP  # 8 pixels, enlarged
    assert picture.shape == (6 * side + GAP, 16 * side + GAP, 3)
    first = [picture[GAP + i * side : (i + 1) * side, GAP:side][::6, ::6, :1] for i in range(2)]
    np.testing.assert_array_equal(first[0], samples[16])  # the most alike comes first
    np.testing.assert_array_equal(first[1], first[0])  # above its neighbour, mirrored as it is


def test_images_of_two_sizes_are_refused(digits, tmp_path):
    training, _ = digits
    np.savez(tmp_path / 'a.npz', images=training[:10])
    np.savez(tmp_path / 'b.npz', images=training[:10, :6])
    with pytest.raises(UserError, match=r'--nearest: .*b\.npz has images of 6x8 pixels, .* of 8x8'):
        compare(str(tmp_path / 'b.npz'), str(tmp_path / 'a.npz'), network(), batch_size=4)
