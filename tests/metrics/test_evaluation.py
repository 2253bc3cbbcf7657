"""Metrics on features: known Gaussians, brute force in float64, and invariances."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxunet.config import relations
from jaxunet.data.source import ArraySource
from jaxunet.metrics import pairwise
from jaxunet.metrics import precision_recall as module
from jaxunet.metrics import sides as sides_module
from jaxunet.metrics.evaluation import check_metrics, compute
from jaxunet.metrics.features import FeatureNetwork
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
from jaxunet.metrics.sides import image_side
from jaxunet.metrics.table import TABLE
from jaxunet.runtime.errors import UserError

RANDOM = np.random.default_rng(0)


def gaussian(dimension: int, rank: int, seed: int) -> Statistics:
    random = np.random.default_rng(seed)
    factor = random.normal(size=(dimension, rank))
    return Statistics(random.normal(size=dimension), factor @ factor.T / rank, {})


def moments(features: np.ndarray, batch: int = 7) -> Statistics:
    accumulator = Moments(features.shape[1])
    for start in range(0, len(features), batch):
        accumulator.add(features[start : start + batch])
    return accumulator.statistics()


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


def tiny_network(**changes: object) -> FeatureNetwork:
    """A random linear layer on the pixels, of 8×8 images."""
    weights = np.random.default_rng(0).normal(size=(192, 6)).astype(np.float32) / 192
    network = FeatureNetwork(
        name='tiny-1234',
        dimension=6,
        extract=jax.jit(
            lambda images: jnp.matmul(
                images.reshape(images.shape[0], -1).astype(jnp.float32), weights
            )
        ),
        is_inception=False,
        resize='none',
    )
    return dataclasses.replace(network, **changes)


def images(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)


def sides(metrics, network, order=slice(None), batch_size=16, **options):
    return [
        image_side(
            name,
            ArraySource(name, pixels[order], (8, 8, 3)),
            metrics,
            network,
            batch_size=batch_size,
            **options,
        )
        for name, pixels in (('a', images(45, 0)), ('b', images(45, 1)))
    ]


METRICS = ['fid', 'kid', 'precision', 'recall']


def test_results_do_not_depend_on_order_or_batch_and_say_how_they_were_come_by():
    network = tiny_network()
    plain = compute(METRICS, network, *sides(METRICS, network), kid_subsets=0)
    shuffled = sides(METRICS, network, np.random.default_rng(2).permutation(45), batch_size=64)
    for first, second in zip(
        plain, compute(METRICS, network, *shuffled, kid_subsets=0), strict=True
    ):
        assert first.label == second.label
        assert first.value == pytest.approx(second.value, rel=1e-3)
    assert [result.label for result in plain] == [
        f'{name}[features=tiny-1234]'
        for name in ('frechet_distance', 'kernel_distance', 'precision', 'recall')
    ]
    for result in plain:
        assert not {'fid', 'kid'} & {result.label, result.row()['metric']}
        row = result.row()
        assert (row['samples'], row['num_samples'], row['sample_size']) == ('a', 45, '8x8')
        assert (
            row['reference'],
            row['num_reference'],
            row['features'],
            row['resize'],
            row['seed'],
        ) == ('b', 45, 'tiny-1234', 'none', 0)
        for part in (
            'samples a',
            'num_samples 45',
            'reference b',
            'features tiny-1234',
            'resize none',
            'seed 0',
        ):
            assert part in result.line()
    assert plain[2].row()['k'] == 3
    assert plain[1].row()['subset_size'] == 'all'


def test_values_are_those_of_the_parts():
    network = tiny_network()
    a, b = sides(METRICS, network)
    fid, kid, precision, recall = compute(
        METRICS, network, a, b, seed=4, kid_subsets=5, kid_subset_size=20
    )
    assert a.features is not None
    np.testing.assert_allclose(a.features, network.extract(images(45, 0)), rtol=1e-5, atol=1e-5)
    assert fid.value == pytest.approx(frechet_distance(moments(a.features), moments(b.features)))
    assert (
        kid.value
        == kernel_distance(a.features, b.features, subsets=5, subset_size=20, seed=4).value
    )
    assert (precision.value, recall.value) == precision_recall(a.features, b.features)


def test_the_table_holds_every_metric_of_the_config():
    assert tuple(TABLE) == relations.METRICS


def test_only_with_inception_a_fid_is_a_fid():
    network = tiny_network(is_inception=True, classify=jnp.asarray)
    results = compute(
        [*METRICS, 'inception_score'], network, *sides([*METRICS, 'inception_score'], network)
    )
    assert [result.label for result in results] == [*METRICS, 'inception_score']
    assert 'reference' not in results[-1].row()


def test_fid_alone_keeps_no_features():
    a, _ = sides(['fid'], tiny_network())
    assert a.features is None


def test_some_of_the_samples_are_drawn_by_seed():
    network = tiny_network()
    first, again, other = (sides(['kid'], network, count=20, seed=seed)[0] for seed in (0, 0, 1))
    assert first.count == 20
    np.testing.assert_array_equal(first.features, again.features)
    assert not np.array_equal(first.features, other.features)


def test_mistakes():
    network = tiny_network()
    for metrics, message in (
        ([], 'found none'),
        (['fidd'], 'did you mean "fid"'),
        (['fid', 'fid'], 'given twice'),
        (['inception_score'], 'inception_score needs the features inception, found tiny-1234'),
    ):
        with pytest.raises(UserError, match=message):
            check_metrics(metrics, network)
    with pytest.raises(UserError, match='46 asked for, but a has 45 images'):
        sides(['fid'], network, count=46)
    with pytest.raises(UserError, match='more than 3 images on each side, found 3 and 3'):
        compute(['recall'], network, *sides(['recall'], network, count=3))
    with pytest.raises(UserError, match='2 images or more on each side, found 1'):
        compute(['kid'], network, *sides(['kid'], network, count=1))
    broken = tiny_network(extract=lambda images: jnp.full((len(images), 6), jnp.nan))
    with pytest.raises(UserError, match='images 0 to 15 are not finite'):
        sides(['fid'], broken)


def test_too_many_features_to_keep(monkeypatch):
    monkeypatch.setattr(sides_module, 'MAX_FEATURES', 1000)
    with pytest.raises(UserError, match='ask for fid alone'):
        sides(['kid'], tiny_network())
    assert sides(['fid'], tiny_network())[0].statistics is not None


def test_statistics_of_other_features_are_refused(tmp_path):
    network = tiny_network()
    path = str(tmp_path / 's.npz')
    _, b = sides(['fid'], network)
    assert b.statistics is not None
    save_statistics(path, b.statistics)
    side = sides_module.statistics_side(path, ['fid'], network, '--reference')
    assert (side.count, side.size) == (45, '8x8')
    with pytest.raises(UserError, match='serve fid and sfid only, not kid'):
        sides_module.statistics_side(path, ['fid', 'kid'], network, '--reference')
    with pytest.raises(UserError, match='found those of tiny-1234'):
        sides_module.statistics_side(path, ['fid'], tiny_network(name='other'), '--reference')
    with pytest.raises(UserError, match='expected statistics of 7 features'):
        sides_module.statistics_side(path, ['fid'], tiny_network(dimension=7), '--reference')


def test_results_are_json():
    network = tiny_network()
    for result in compute(METRICS, network, *sides(METRICS, network)):
        assert json.loads(json.dumps(result.row()))['value'] == result.value
