"""Fixtures of the ops' tests."""

import contextlib
from collections.abc import Iterator

import pytest
from support.functional import CUDA
from support.mosaic import simulated

from jaxunet.ops import backends as seam


@pytest.fixture(params=['xla', CUDA, 'pallas'], name='backend')
def _backend(request, monkeypatch) -> Iterator[str]:
    """Lets a backend run: the CUDA kernels' CPU handlers, Pallas's kernels simulated."""
    monkeypatch.setattr(seam, '_unavailable', lambda name: None)
    with simulated() if request.param == 'pallas' else contextlib.nullcontext():
        yield request.param
