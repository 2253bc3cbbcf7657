"""ADM's evaluator (openai/guided-diffusion, evaluations/evaluator.py): its reference batches, and
its results on the same features, which its own code computed (`fixtures/evaluator_golden.npz`).
"""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from evaluator_golden import (
    ALL,
    BATCH,
    POOLED,
    SAMPLES,
    SCALE,
    SPATIAL,
    WEIGHTS,
    features,
    write_batch,
)

from jaxunet.metrics.evaluation import Result, compute
from jaxunet.metrics.features import FeatureNetwork
from jaxunet.metrics.frechet import load_statistics, save_statistics
from jaxunet.metrics.precision_recall import precision_recall
from jaxunet.metrics.sides import open_side
from jaxunet.runtime.errors import UserError

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / 'fixtures' / 'evaluator_golden.npz')
# Its statistics of the pooled and of the spatial features of the whole set.
WHOLE = [tuple(GOLDEN[f'{name}{end}'] for name in ('mu', 'sigma')) for end in ('', '_s')]
METRICS = ['fid', 'sfid', 'precision', 'recall']


def network(**changes) -> FeatureNetwork:
    """A linear layer on the pixels of 8×8 images in the place of Inception."""

    def both(images):
        return jnp.asarray(images.reshape(len(images), -1).astype(np.float32) @ WEIGHTS)

    fields = {
        'name': 'tiny',
        'dimension': POOLED,
        'extract': lambda images: both(images)[:, :POOLED],
        'is_inception': True,
        'resize': 'none',
        'extract_both': both,
        'spatial_dimension': SPATIAL,
    }
    return FeatureNetwork(**(fields | changes))


def batch_file(folder: pathlib.Path, *, spatial: bool = True) -> str:
    """A reference batch: images, and the statistics of more than them."""
    return write_batch(folder / 'batch.npz', WHOLE, spatial=spatial)


def evaluate(
    reference: str,
    folder: pathlib.Path,
    metrics: list[str],
    used: FeatureNetwork | None = None,
    count: int | None = None,
) -> list[Result]:
    used = used or network()
    np.savez(folder / 'samples.npz', arr_0=SAMPLES)
    sides = []
    for path, option, images in (
        (str(folder / 'samples.npz'), '--samples', None),
        (reference, '--reference', count),
    ):
        with open_side(path, metrics, used, option, count=images, batch_size=16) as (side, _):
            sides.append(side())
    return compute(metrics, used, *sides)


def test_a_reference_batch_gives_its_statistics_and_its_images(tmp_path):
    results = evaluate(batch_file(tmp_path), tmp_path, METRICS)
    expected = [*GOLDEN['statistics'], *GOLDEN['precision_recall_float32']]
    assert [result.label for result in results] == METRICS
    np.testing.assert_allclose([result.value for result in results], expected, rtol=1e-6)
    of_images, of_statistics = GOLDEN['images_30'], GOLDEN['statistics']
    # Or the test could not tell them apart.
    assert (np.abs(of_images - of_statistics) > 0.05 * of_statistics).all()
    rows = [result.row() for result in results]
    assert [row.get('reference_statistics') for row in rows] == [
        'mu and sigma of the file',
        'mu_s and sigma_s of the file',
        None,
        None,
    ]
    assert [row['num_reference'] for row in rows] == ['unknown', 'unknown', 30, 30]
    assert 'reference_statistics=mu and sigma of the file' in results[0].line()


@pytest.mark.parametrize(('precision', 'scale'), [('float16', 1.0), ('float32', SCALE)])
def test_precision_and_recall_of_its_estimator(precision: str, scale: float) -> None:
    """It computes distances in float16, or in float32 where they are too large for it."""
    reference, samples = (scale * features(images)[0] for images in (BATCH, SAMPLES))
    expected = GOLDEN[f'precision_recall_{precision}']
    np.testing.assert_array_equal(precision_recall(samples, reference), expected)


def test_statistics_alone_need_no_features(tmp_path):
    def no_extract(images):
        raise AssertionError('computed')

    batch = batch_file(tmp_path)
    idle = network(extract=no_extract, extract_both=no_extract)
    with open_side(batch, ['fid', 'sfid'], idle, '--reference', batch_size=8) as (side, size):
        found = side()
    assert size == (8, 8)
    assert found.statistics is not None
    assert found.spatial is not None
    np.testing.assert_array_equal(found.spatial.mu, WHOLE[1][0])


@pytest.mark.parametrize('case', ['some images', 'other features', 'no spatial statistics'])
def test_where_statistics_do_not_fit_images_serve_and_the_log_says_so(case, tmp_path, caplog):
    caplog.set_level('INFO')
    batch = batch_file(tmp_path, spatial=case != 'no spatial statistics')
    metric, images, count, used = 'fid', BATCH, None, network()
    if case == 'some images':
        count = 20
        images = images[np.sort(np.random.default_rng(0).choice(30, 20, replace=False))]
    elif case == 'other features':
        used = network(is_inception=False)
    else:
        metric = 'sfid'
    place = ['fid', 'sfid'].index(metric)
    expected = GOLDEN[f'images_{len(images)}'][place]
    result = evaluate(batch, tmp_path, [metric], used, count)[0]
    np.testing.assert_allclose(result.value, expected, rtol=1e-6)
    assert result.row()['num_reference'] == len(images)
    assert 'its images' in caplog.text


def test_prepared_otherwise_is_warned_of(tmp_path, caplog):
    batch = batch_file(tmp_path)
    evaluate(batch, tmp_path, ['fid'])
    assert '--features inception_tensorflow prepares the others alike' in caplog.text
    caplog.clear()
    evaluate(batch, tmp_path, ['fid'], network(as_tensorflow=True))
    assert 'inception_tensorflow' not in caplog.text


def test_written_statistics_serve_sfid(tmp_path):
    results = evaluate(batch_file(tmp_path), tmp_path, ['fid', 'sfid'])
    statistics, spatial = (
        load_statistics(tmp_path / 'batch.npz', names)
        for names in (('mu', 'sigma'), ('mu_s', 'sigma_s'))
    )
    save_statistics(tmp_path / 'written.npz', statistics, spatial)
    again = evaluate(str(tmp_path / 'written.npz'), tmp_path, ['fid', 'sfid'])
    assert [result.value for result in again] == [result.value for result in results]


def test_what_a_file_lacks_or_has_wrong_is_refused(tmp_path):
    path = str(tmp_path / 's.npz')
    mu, sigma = WHOLE[0]
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
        evaluate(batch_file(tmp_path), tmp_path, ['sfid'], network(is_inception=False))
