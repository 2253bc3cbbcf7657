"""ADM's evaluator (openai/guided-diffusion, evaluations/evaluator.py): its reference batches and
formulas, written here in numpy and scipy, on the same features.
"""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxunet.metrics.evaluation import Result, compute
from jaxunet.metrics.features import FeatureNetwork
from jaxunet.metrics.frechet import load_statistics, save_statistics
from jaxunet.metrics.sides import open_side
from jaxunet.runtime.errors import UserError

RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.normal(size=(192, 11)).astype(np.float32) / 192  # 6 features, 5 spatial ones
METRICS = ['fid', 'sfid', 'precision', 'recall']


def network(**changes) -> FeatureNetwork:
    """A linear layer on the pixels of 8×8 images in the place of Inception."""

    def both(images):
        return jnp.asarray(images.reshape(len(images), -1).astype(np.float32) @ WEIGHTS)

    fields = {
        'name': 'tiny',
        'dimension': 6,
        'extract': lambda images: both(images)[:, :6],
        'is_inception': True,
        'resize': 'none',
        'extract_both': both,
        'spatial_dimension': 5,
    }
    return FeatureNetwork(**(fields | changes))


def pixels(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)


def features(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = images.reshape(len(images), -1).astype(np.float32) @ WEIGHTS
    return found[:, :6].astype(np.float64), found[:, 6:].astype(np.float64)


def adm_statistics(activations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return activations.mean(0), np.cov(activations, rowvar=False)


def adm_distance(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    root = scipy.linalg.sqrtm(a[1] @ b[1]).real
    difference = a[0] - b[0]
    return float(difference @ difference + np.trace(a[1]) + np.trace(b[1]) - 2 * np.trace(root))


def adm_precision_recall(samples: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    def distances(u, v):
        return ((u[:, None] - v[None]) ** 2).sum(2)

    def covered(points, centres):
        radii = np.partition(distances(centres, centres), 3, axis=1)[:, 3]
        return float((distances(points, centres) <= radii[None]).any(1).mean())

    return covered(samples, reference), covered(reference, samples)


ALL = pixels(60, 1)  # the data set, of which the reference batch has the first 30 images
SAMPLES = pixels(40, 2)


def write_batch(path: pathlib.Path, *, spatial: bool = True) -> str:
    """Writes a reference batch: images, and the statistics of more than them."""
    names = {'mu': 'mu_s', 'sigma': 'sigma_s'}
    pooled, maps = (dict(zip(names, adm_statistics(x), strict=True)) for x in features(ALL))
    arrays = {'arr_0': ALL[:30], **pooled}
    if spatial:
        arrays |= {names[name]: value for name, value in maps.items()}
    np.savez(path, **arrays)
    return str(path)


def evaluate(
    reference: str,
    folder: pathlib.Path,
    metrics: list[str],
    features: FeatureNetwork | None = None,
    count: int | None = None,
) -> list[Result]:
    features = features or network()
    np.savez(folder / 'samples.npz', arr_0=SAMPLES)
    sides = []
    for path, option, images in (
        (str(folder / 'samples.npz'), '--samples', None),
        (reference, '--reference', count),
    ):
        with open_side(path, metrics, features, option, count=images, batch_size=16) as (side, _):
            sides.append(side())
    return compute(metrics, features, *sides)


def test_a_reference_batch_gives_its_statistics_and_its_images(tmp_path):
    results = evaluate(write_batch(tmp_path / 'batch.npz'), tmp_path, METRICS)
    (pooled, maps), (pooled_all, maps_all) = features(SAMPLES), features(ALL)
    fid = adm_distance(adm_statistics(pooled), adm_statistics(pooled_all))
    sfid = adm_distance(adm_statistics(maps), adm_statistics(maps_all))
    expected = [fid, sfid, *adm_precision_recall(pooled, features(ALL[:30])[0])]
    assert [result.label for result in results] == METRICS
    np.testing.assert_allclose([result.value for result in results], expected, rtol=1e-6)
    of_images = adm_distance(adm_statistics(pooled), adm_statistics(features(ALL[:30])[0]))
    assert abs(of_images - fid) > 0.05 * fid  # or the test could not tell them apart
    rows = [result.row() for result in results]
    assert [row.get('reference_statistics') for row in rows] == [
        'mu and sigma of the file',
        'mu_s and sigma_s of the file',
        None,
        None,
    ]
    assert [row['num_reference'] for row in rows] == ['unknown', 'unknown', 30, 30]
    assert 'reference_statistics mu and sigma of the file' in results[0].line()


def test_statistics_alone_need_no_features(tmp_path):
    def no_extract(images):
        raise AssertionError('computed')

    batch = write_batch(tmp_path / 'batch.npz')
    idle = network(extract=no_extract, extract_both=no_extract)
    with open_side(batch, ['fid', 'sfid'], idle, '--reference', batch_size=8) as (side, size):
        found = side()
    assert size == (8, 8)
    assert found.statistics is not None
    assert found.spatial is not None
    np.testing.assert_array_equal(found.spatial.mu, adm_statistics(features(ALL)[1])[0])


@pytest.mark.parametrize('case', ['some images', 'other features', 'no spatial statistics'])
def test_where_statistics_do_not_fit_images_serve_and_the_log_says_so(case, tmp_path, caplog):
    caplog.set_level('INFO')
    batch = write_batch(tmp_path / 'batch.npz', spatial=case != 'no spatial statistics')
    metric, images = 'fid', ALL[:30]
    count, used = None, network()
    if case == 'some images':
        count = 20
        images = images[np.sort(np.random.default_rng(0).choice(30, 20, replace=False))]
    elif case == 'other features':
        used = network(is_inception=False)
    else:
        metric = 'sfid'
    place = ['fid', 'sfid'].index(metric)
    expected = adm_distance(
        adm_statistics(features(SAMPLES)[place]), adm_statistics(features(images)[place])
    )
    result = evaluate(batch, tmp_path, [metric], used, count)[0]
    np.testing.assert_allclose(result.value, expected, rtol=1e-6)
    assert result.row()['num_reference'] == len(images)
    assert 'its images' in caplog.text


def test_prepared_otherwise_is_warned_of(tmp_path, caplog):
    batch = write_batch(tmp_path / 'batch.npz')
    evaluate(batch, tmp_path, ['fid'])
    assert '--features inception_tensorflow prepares the others alike' in caplog.text
    caplog.clear()
    evaluate(batch, tmp_path, ['fid'], network(as_tensorflow=True))
    assert 'inception_tensorflow' not in caplog.text


def test_written_statistics_serve_sfid(tmp_path):
    results = evaluate(write_batch(tmp_path / 'batch.npz'), tmp_path, ['fid', 'sfid'])
    statistics, spatial = (
        load_statistics(tmp_path / 'batch.npz', names)
        for names in (('mu', 'sigma'), ('mu_s', 'sigma_s'))
    )
    save_statistics(tmp_path / 'written.npz', statistics, spatial)
    again = evaluate(str(tmp_path / 'written.npz'), tmp_path, ['fid', 'sfid'])
    assert [result.value for result in again] == [result.value for result in results]


def test_what_a_file_lacks_or_has_wrong_is_refused(tmp_path):
    path = str(tmp_path / 's.npz')
    mu, sigma = adm_statistics(features(ALL)[0])
    np.savez(path, mu=mu, sigma=sigma)
    with pytest.raises(UserError, match='sfid needs the statistics mu_s and sigma_s or images'):
        evaluate(path, tmp_path, ['fid', 'sfid'])
    np.savez(path, mu=mu, sigma=sigma, mu_s=mu, sigma_s=sigma)
    with pytest.raises(UserError, match=r'mu_s: expected statistics of 5 features \(tiny\), found'):
        evaluate(path, tmp_path, ['sfid'])
    np.savez(path, arr_0=ALL, mu=mu[:4], sigma=sigma[:4, :4])
    with pytest.raises(UserError, match=r'mu: expected statistics of 6 features \(tiny\), found 4'):
        evaluate(path, tmp_path, ['fid'])
    np.savez(path, mu=mu, sigma=sigma, mu_s=mu[:5], sigma_s=sigma[:5, :4])
    with pytest.raises(
        UserError, match=r'mu_s \(d,\) and sigma_s \(d, d\) with d of 1 or more, found \(5,\) and'
    ):
        evaluate(path, tmp_path, ['sfid'])
    with pytest.raises(UserError, match='sfid needs the features inception, found tiny'):
        evaluate(write_batch(tmp_path / 'b.npz'), tmp_path, ['sfid'], network(is_inception=False))
