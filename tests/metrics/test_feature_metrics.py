"""Metrics of given features: known Gaussians, closed forms, and brute force in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from support.feature_statistics import moments

from jaxunet.metrics import pairwise
from jaxunet.metrics import precision_recall as module
from jaxunet.metrics.frechet import (
    Moments,
    Statistics,
    frechet_distance,
    is_statistics,
    load_statistics,
    save_statistics,
)
from jaxunet.metrics.inception_score import inception_score
from jaxunet.metrics.kernel_distance import kernel_distance, squared_mmd
from jaxunet.metrics.precision_recall import covered, precision_recall, squared_radii
from jaxunet.runtime.errors import UserError

RANDOM = np.random.default_rng(0)


def gaussian(dimension: int, rank: int, seed: int) -> Statistics:
    random = np.random.default_rng(seed)
    factor = random.normal(size=(dimension, rank))
    return Statistics(random.normal(size=dimension), factor @ factor.T / rank, {})


def test_streamed_moments_are_numpys_and_do_not_cancel():
    features = (RANDOM.normal(size=(100, 9)) + 1e6).astype(np.float32)
    found = moments(features)
    np.testing.assert_allclose(found.mu, features.mean(0, dtype=np.float64), rtol=1e-14)
    np.testing.assert_allclose(
        found.sigma, np.cov(features.astype(np.float64), rowvar=False), rtol=1e-8, atol=1e-8
    )


def test_moments_need_two_finite_images():
    accumulator = Moments(3)
    accumulator.add(np.ones((1, 3), np.float32))
    with pytest.raises(UserError, match='needs 2 images or more, found 1'):
        accumulator.statistics()
    accumulator.add(np.full((1, 3), np.nan, np.float32))
    with pytest.raises(UserError, match='not finite'):
        accumulator.statistics()


@pytest.mark.parametrize('seed', range(3))
def test_frechet_distance_is_scipys_on_known_gaussians(seed):
    a, b = gaussian(24, 40, seed), gaussian(24, 40, seed + 10)
    overlap = scipy.linalg.sqrtm(a.sigma @ b.sigma)
    expected = np.sum((a.mu - b.mu) ** 2) + np.trace(a.sigma + b.sigma - 2 * overlap.real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)


def test_frechet_distance_in_closed_form():
    """Commuting covariances: the distance of the roots of their eigenvalues."""
    base = np.linalg.qr(RANDOM.normal(size=(6, 6)))[0]
    first, second = np.array([4.0, 9, 1, 0, 0, 16]), np.array([1.0, 4, 1, 9, 0, 16])
    a, b = (Statistics(np.zeros(6), (base * v[None]) @ base.T, {}) for v in (first, second))
    assert frechet_distance(a, b) == pytest.approx(1 + 1 + 0 + 9 + 0 + 0, abs=1e-6)


def test_frechet_distance_of_singular_covariances():
    """Ten images in 100 dimensions: the product has no real square root as sqrtm computes it."""
    a, b = gaussian(100, 9, 1), gaussian(100, 9, 2)
    # On the joint range of both, of 18 dimensions, the problem is regular.
    base = np.linalg.qr(
        np.concatenate([np.linalg.eigh(s.sigma)[1][:, -9:] for s in (a, b)], axis=1)
    )[0]
    roots = [scipy.linalg.sqrtm(base.T @ s.sigma @ base + 1e-13 * np.eye(18)).real for s in (a, b)]
    overlap = np.linalg.svd(roots[0] @ roots[1], compute_uv=False).sum()
    expected = np.sum((a.mu - b.mu) ** 2) + np.trace(a.sigma + b.sigma) - 2 * overlap
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    for same in (a, b):
        assert frechet_distance(same, same) < 1e-9
    constant = Statistics(a.mu, np.zeros_like(a.sigma), {})
    assert frechet_distance(a, constant) == pytest.approx(np.trace(a.sigma))


def test_statistics_files_both_ways(tmp_path):
    mine = dataclasses.replace(gaussian(5, 9, 3), protocol={'features': 'tiny', 'count': 9})
    save_statistics(tmp_path / 'new' / 'mine.npz', mine)
    with np.load(tmp_path / 'new' / 'mine.npz') as arrays:  # as pytorch-fid reads it
        np.testing.assert_array_equal(arrays['mu'][:], mine.mu)
        np.testing.assert_array_equal(arrays['sigma'][:], mine.sigma)
    again = load_statistics(tmp_path / 'new' / 'mine.npz')
    assert again.protocol == mine.protocol
    np.savez_compressed(
        tmp_path / 'theirs.npz', mu=mine.mu, sigma=mine.sigma
    )  # as pytorch-fid writes it
    theirs = load_statistics(tmp_path / 'theirs.npz')
    assert theirs.protocol == {}
    assert frechet_distance(theirs, again) < 1e-12
    assert is_statistics(tmp_path / 'theirs.npz')
    np.savez(
        tmp_path / 'both.npz', mu=mine.mu, sigma=mine.sigma, arr_0=np.zeros((1, 2, 2, 3), np.uint8)
    )
    assert not is_statistics(tmp_path / 'both.npz')


@pytest.mark.parametrize(
    ('arrays', 'message'),
    [
        ({'mu': np.zeros(3)}, 'sigma is missing'),
        ({'mu': np.zeros(3), 'sigma': np.zeros((2, 2))}, r'found \(3,\) and \(2, 2\)'),
        ({'mu': np.zeros(2), 'sigma': np.full((2, 2), np.nan)}, 'found NaN'),
        ({'mu': np.zeros(2), 'sigma': np.array([[1.0, 2], [0, 1]])}, 'not symmetric'),
        ({'mu': np.zeros(2), 'sigma': -np.eye(2)}, 'negative variances'),
    ],
)
def test_statistics_that_are_none(arrays, message, tmp_path):
    np.savez(tmp_path / 's.npz', **arrays)
    with pytest.raises(UserError, match=message):
        load_statistics(tmp_path / 's.npz')


def test_statistics_of_other_features_do_not_compare():
    with pytest.raises(UserError, match='found 4 and 5; they come from different features'):
        frechet_distance(gaussian(4, 9, 0), gaussian(5, 9, 0))


def brute_mmd(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    aa, bb, ab = (np.power(x @ y.T / a.shape[1] + 1, 3) for x, y in ((a, a), (b, b), (a, b)))
    n, m = len(a), len(b)
    return float(
        (aa.sum() - np.trace(aa)) / (n * (n - 1))
        + (bb.sum() - np.trace(bb)) / (m * (m - 1))
        - 2 * ab.mean()
    )


def sets(n: int = 53, m: int = 41, d: int = 16) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(n, d)).astype(np.float32), (
        0.3 + 1.1 * random.normal(size=(m, d))
    ).astype(np.float32)


@pytest.mark.parametrize('block', [8, 16, 2048])
def test_squared_mmd_is_that_of_all_pairs_whatever_the_block(block):
    a, b = sets()
    assert squared_mmd(a, b, block=block) == pytest.approx(brute_mmd(a, b), rel=1e-4, abs=1e-6)


def test_kernel_distance_by_subsets():
    a, b = sets()
    whole = kernel_distance(a, b, subsets=0)
    assert whole.value == squared_mmd(a, b)
    some = kernel_distance(a, b, subsets=12, subset_size=20, seed=3)
    assert (some.subsets, some.subset_size) == (12, 20)
    assert some == kernel_distance(a, b, subsets=12, subset_size=20, seed=3)
    assert some.value != kernel_distance(a, b, subsets=12, subset_size=20, seed=4).value
    assert abs(some.value - whole.value) < 4 * some.std / np.sqrt(12)
    random = np.random.default_rng(3)
    by_hand = [
        brute_mmd(a[random.choice(53, 20, replace=False)], b[random.choice(41, 20, replace=False)])
        for _ in range(12)
    ]
    assert some.value == pytest.approx(np.mean(by_hand), rel=1e-4)
    assert kernel_distance(a, b, subsets=1, subset_size=10**6).subset_size == 41


def test_kernel_distance_is_unbiased():
    """Two halves of one distribution give 0 on average; the biased estimate is far above."""
    random = np.random.default_rng(6)
    values = [squared_mmd(*random.normal(size=(2, 24, 8)).astype(np.float32)) for _ in range(60)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(60)
    assert min(values) < 0


def brute_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.linalg.norm(a[:, None].astype(np.float64) - b[None].astype(np.float64), axis=2)


def brute_precision_recall(
    samples: np.ndarray, reference: np.ndarray, k: int
) -> tuple[float, float]:
    def share(points: np.ndarray, centres: np.ndarray) -> float:
        radii = np.sort(brute_distances(centres, centres), axis=1)[:, k]  # the first is itself
        return float((brute_distances(points, centres) <= radii[None]).any(1).mean())

    return share(samples, reference), share(reference, samples)


@pytest.mark.parametrize('block', [8, 32, 2048])
@pytest.mark.parametrize('k', [1, 3])
def test_precision_and_recall_are_those_of_all_pairs_whatever_the_block(block, k):
    samples, reference = sets()
    samples = (
        0.4 * samples + 50
    )  # far from the origin, where |x|² + |y|² − 2x·y would lose everything without centring
    reference = reference + 50
    found = precision_recall(samples, reference, k=k, block=block)
    assert found == brute_precision_recall(samples, reference, k)
    assert found[0] != found[1]


def test_radii_leave_out_the_point_itself_but_not_its_twins():
    points = np.array([[0.0], [0.0], [1.0], [3.0]], np.float32)
    np.testing.assert_allclose(squared_radii(points, 1, block=3), [0, 0, 1, 4])
    np.testing.assert_allclose(squared_radii(points, 3, block=3), [9, 9, 4, 9])
    assert covered(
        np.array([[2.0], [4.9], [5.1]], np.float32), points, np.array([0, 0, 1, 4], np.float32)
    ).tolist() == [True, True, False]


def test_a_copy_has_full_precision_and_recall_and_a_distant_set_none():
    samples, _ = sets()
    assert precision_recall(samples, samples) == (1.0, 1.0)
    assert precision_recall(samples, samples + 100) == (0.0, 0.0)
    collapsed = samples[:1] + np.zeros((20, 1), np.float32)
    precision, recall = precision_recall(collapsed, samples)
    assert precision == 1
    assert recall < 0.2


def test_memory_is_that_of_a_block():
    """50,000 × 50,000 distances are 10 GB; no array of the program has more than a block of them
    and the features.
    """
    n, block, d = 50_000, 1000, 4
    rows = jax.ShapeDtypeStruct((block, d), jnp.float32)
    tiles = jax.ShapeDtypeStruct((n // block, block, d), jnp.float32)
    numbers, extras = (
        jax.ShapeDtypeStruct((n // block, block), jnp.int32),
        jax.ShapeDtypeStruct((n // block, block), jnp.float32),
    )
    places = jax.ShapeDtypeStruct((block,), jnp.int32)
    compiled = pairwise._scan.lower(
        module._nearest, module._far(3), rows, places, tiles, numbers, extras
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * 4 * block * block


def test_inception_score_of_known_predictions():
    one_hot = np.where(np.eye(5, dtype=bool)[np.arange(50) % 5], 1e4, 0.0).astype(np.float32)
    mean, std = inception_score(one_hot, splits=1)
    assert mean == pytest.approx(5)
    assert std == 0
    assert inception_score(np.ones((50, 5), np.float32)) == (
        pytest.approx(1),
        pytest.approx(0, abs=1e-12),
    )
    logits = RANDOM.normal(size=(40, 7)).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    expected = np.exp(np.mean(np.sum(p * np.log(p / p.mean(0)[None]), axis=1)))
    assert inception_score(logits, splits=1)[0] == pytest.approx(expected)
    assert inception_score(logits, splits=4, seed=1) != inception_score(logits, splits=4, seed=2)
    with pytest.raises(UserError, match='over 10 parts needs as many images, found 3'):
        inception_score(logits[:3])
