"""Metrics of samples and references: invariances, what a result says, and mistakes."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.feature_statistics import moments

from jaxunet.config import relations
from jaxunet.data.source import ArraySource
from jaxunet.metrics import sides as sides_module
from jaxunet.metrics.evaluation import check_metrics, compute
from jaxunet.metrics.features import FeatureNetwork
from jaxunet.metrics.frechet import frechet_distance, save_statistics
from jaxunet.metrics.image_sets import open_images
from jaxunet.metrics.kernel_distance import kernel_distance
from jaxunet.metrics.precision_recall import precision_recall
from jaxunet.metrics.sides import image_side
from jaxunet.metrics.table import TABLE
from jaxunet.runtime.errors import UserError


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
    told = {'samples': 'a', 'num_samples': 45, 'sample_size': '8x8'}
    told |= {'reference': 'b', 'num_reference': 45, 'features': 'tiny-1234'}
    told |= {'resize': 'none', 'seed': 0}
    for result in plain:
        row = result.row()
        assert (row['metric'], row['value']) == (result.label, result.value)
        assert row.items() >= told.items()
        assert json.loads(json.dumps(row)) == row
        for name, value in told.items():
            assert f'{name}={value}' in result.line()
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
        (['is'], r'precision, .*, inception_score, found \'is\'; did you mean "inception_score"\?'),
        (['IS'], r'found \'IS\'; did you mean "inception_score"\?'),
        (['FID'], r'found \'FID\'; did you mean "fid"'),
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


def test_arrays_of_other_channels_are_no_images_to_compare(tmp_path):
    """The message names no field of a config, which such a command does not have."""
    for channels, end in ((2, 'found 2$'), (4, 'found 4; images with opacity in a folder of PNG ')):
        np.save(tmp_path / 'x.npy', np.zeros((2, 8, 8, channels), np.uint8))
        with (
            pytest.raises(UserError, match=f'x.npy: expected images of 1 or 3 channels .*, {end}'),
            open_images(f'{tmp_path}/x.npy'),
        ):
            pass


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
