"""Dropout: how many elements it drops, that these are unrelated, and what it does to the others."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxunet.model.dropout import block_dropout, dropout_seeds
from jaxunet.ops.dropout import Dropout, drop

SAMPLES, SHAPE = 64, (32, 32, 16)


def seeds(number=0, samples=SAMPLES):
    return dropout_seeds(jax.random.split(jax.random.key(number), samples))


def dropout(x, given, rate, path):
    return drop(x, block_dropout(given, rate, path))


def dropped(given, rate, name='down_0_res_0', shape=SHAPE):
    ones = jnp.ones((len(given), *shape))
    return np.asarray(dropout(ones, given, rate, (name,)) == 0)


def correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1]


@pytest.mark.parametrize('rate', [0.1, 0.3, 0.5, 0.99])
def test_the_share_of_dropped_elements_is_the_rate(rate):
    found = dropped(seeds(), rate)
    sigma = (rate * (1 - rate)) ** 0.5
    assert abs(found.mean() - rate) < 4 * sigma / found.size**0.5
    # Each sample, pixel and channel alone, too: the largest of some thousand deviations.
    for axes in ((1, 2, 3), (0, 3), (0, 1, 2)):
        means = found.mean(axes)
        count = found.size / means.size
        deviations = (means - rate) / (sigma / count**0.5)
        assert np.abs(deviations).max() < 5.5
        assert abs(deviations.std() - 1) < 5 / (2 * means.size) ** 0.5


def test_dropped_elements_are_unrelated():
    """Between neighbours in each direction, samples, blocks and steps, within 5 sigma."""
    found, limit = dropped(seeds(), 0.5), 5 / (SAMPLES * np.prod(SHAPE)) ** 0.5
    for axis in range(4):
        for distance in (1, 2, 8):
            size = found.shape[axis]
            near, far = np.arange(size - distance), np.arange(distance, size)
            assert abs(correlation(found.take(near, axis), found.take(far, axis))) < 1.5 * limit
    assert abs(correlation(found, dropped(seeds(), 0.5, 'down_0_res_1'))) < limit
    assert abs(correlation(found, dropped(seeds(1), 0.5))) < limit


def test_patterns_of_eight_neighbours_are_equally_frequent():
    bits = dropped(seeds(), 0.5).reshape(-1, 8)
    counts = np.bincount(bits @ (1 << np.arange(8)), minlength=256)
    expected = len(bits) / 256
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


def test_one_changed_bit_of_a_seed_changes_half_of_the_elements():
    for word in range(2):
        changed = seeds(samples=1).at[0, word].set(seeds(samples=1)[0, word] ^ jnp.uint32(1 << 31))
        differ = dropped(seeds(samples=1), 0.5) != dropped(changed, 0.5)
        assert 0.48 < differ.mean() < 0.52


def test_it_is_murmurhash_of_pairs_name_and_seeds():
    """NumPy's arithmetic of 64 bits, element by element, from the words of the seeds."""
    given, name, rate = seeds(samples=2), 'up_0_res_1', 0.25

    def mix(word):
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) % 2**32
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) % 2**32
        return word ^ (word >> 16)

    code = zlib.crc32(name.encode())
    for sample, (first, second) in zip(
        dropped(given, rate, name, (3, 5)), np.asarray(given).tolist(), strict=True
    ):
        words = [mix((mix(i // 2 ^ first ^ code) + (second ^ code)) % 2**32) for i in range(15)]
        want = [(words[i] >> (i % 2 * 16)) % 2**16 < rate * 2**16 for i in range(15)]
        np.testing.assert_array_equal(sample.ravel(), want)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_the_rest_is_scaled_and_the_gradient_takes_the_same_elements(dtype):
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 3)).astype(dtype)
    y, pull = jax.vjp(lambda x: dropout(x, seeds(samples=4), 0.2, ('a',)), x)
    zero = np.asarray(y) == 0
    assert y.dtype == x.dtype
    assert 0 < zero.mean() < 0.5
    scaled = x * jnp.asarray(2**16 / (2**16 - 13107), dtype)
    np.testing.assert_array_equal(np.asarray(y)[~zero], np.asarray(scaled)[~zero])
    (gradient,) = pull(jnp.ones_like(x))
    np.testing.assert_array_equal(np.asarray(gradient) == 0, zero)


@pytest.mark.parametrize('rate', [0.0, 1e-5, 0.1, 0.3, 0.5, 1 - 1e-5])
def test_the_mean_over_all_bits_stays_the_same(rate):
    """All values of the bits are equally likely; the factor makes up for those that drop."""
    given = Dropout(seeds(samples=1), rate)
    kept = np.arange(2**16) >= given.threshold
    assert (kept * given.factor('float64')).mean() == pytest.approx(1, rel=1e-12)


def test_rate_zero_drops_nothing_the_least_rate_few_and_the_largest_almost_all():
    x = jnp.ones((2, 64, 64))
    np.testing.assert_array_equal(dropout(x, seeds(samples=2), 0.0, ('a',)), x)
    least = np.nextafter(2.0**-17, 1)
    assert 0 < dropped(seeds(), least).mean() < 2**-15
    assert dropped(seeds(samples=2), 1 - 2**-16, shape=(64, 64)).mean() > 0.999


def test_wrong_seeds_and_rates_are_errors():
    x = jnp.ones((4, 2, 2, 8))
    for words, found in (
        (seeds(samples=3), r'uint32\[3, 2\]'),
        (jnp.ones((4, 2)), r'float32\[4, 2\]'),
    ):
        with pytest.raises(ValueError, match=rf'seeds: {found}; expected uint32\[4, 2\]'):
            drop(x, Dropout(words, 0.1))
    for rate in (-0.1, 1e-6, 2**-17, 1 - 2**-17, 1 - 2**-40, 1.0, float('nan')):
        with pytest.raises(ValueError, match=f'rate: expected 0, or more than .*, found {rate}'):
            drop(x, Dropout(seeds(samples=4), rate))
