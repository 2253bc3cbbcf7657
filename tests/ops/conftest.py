"""Fixtures of the ops' tests."""

import contextlib
import sys
import textwrap
from collections.abc import Iterator

import pytest
from support.functional import CUDA
from support.mosaic import simulated

from jaxunet.ops import backends as seam
from jaxunet.runtime import plugins


@pytest.fixture(params=['xla', CUDA, 'pallas'], name='backend')
def _backend(request, monkeypatch) -> Iterator[str]:
    """Lets a backend run: the CUDA kernels' CPU handlers, Pallas's kernels simulated."""
    monkeypatch.setattr(seam, '_unavailable', lambda name: None)
    with simulated() if request.param == 'pallas' else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package with an entry point on the path, as pip would."""

    def make(source, *, target='toy_kernels:BACKEND', **values):
        (tmp_path / 'toy_kernels.py').write_text(
            textwrap.dedent(source.format(**{'api': plugins.API, 'missing': None} | values))
        )
        info = tmp_path / 'toy-1.2.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: toy\nVersion: 1.2\n')
        (info / 'entry_points.txt').write_text(f'[{plugins.BACKEND_GROUP}]\ntoy = {target}\n')
        monkeypatch.syspath_prepend(tmp_path)

    for function in (plugins.backend_entry_points, plugins.load_backend):
        function.cache_clear()
    yield make
    monkeypatch.undo()
    sys.modules.pop('toy_kernels', None)
    for function in (plugins.backend_entry_points, plugins.load_backend):
        function.cache_clear()
