"""Metrics of given features: those of torch-fidelity's and pytorch-fid's own code.

`fixtures/metrics_golden.npz` holds what that code computed.
"""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from metrics_golden import LOGITS, NEIGHBOURS, REFERENCE, SAMPLES, SEED, SPLITS
from support.feature_statistics import moments

from jaxunet.metrics.frechet import frechet_distance
from jaxunet.metrics.inception_score import inception_score
from jaxunet.metrics.kernel_distance import kernel_distance
from jaxunet.metrics.precision_recall import precision_recall

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / 'fixtures' / 'metrics_golden.npz')


@pytest.mark.parametrize('name', ['frechet_distance', 'frechet_distance_pytorch_fid'])
def test_frechet_distance(name: str) -> None:
    found = frechet_distance(moments(SAMPLES), moments(REFERENCE))
    np.testing.assert_allclose(found, GOLDEN[name], rtol=1e-6)


def test_kernel_distance() -> None:
    """All images once, whole or as one subset."""
    for options in ({'subsets': 0}, {'subsets': 1}):
        found = kernel_distance(SAMPLES, REFERENCE, **options).value
        np.testing.assert_allclose(found, GOLDEN['kernel_distance'], rtol=1e-4)


def test_precision_and_recall() -> None:
    found = precision_recall(SAMPLES, REFERENCE, k=NEIGHBOURS)
    np.testing.assert_allclose(found, GOLDEN['precision_recall'], rtol=1e-6)


@pytest.mark.parametrize('splits', [1, SPLITS])
def test_inception_score(splits: int) -> None:
    """Mean and standard deviation over the same parts."""
    found = inception_score(LOGITS, splits=splits, seed=SEED)
    np.testing.assert_allclose(found, GOLDEN[f'inception_score_{splits}'], rtol=1e-6, atol=1e-9)
