"""A version of JAX without the private modules is refused with the versions that were tested."""

import importlib.util
import pathlib
import sys
import tomllib

import pytest

from pallas_kernels.conv3x3 import hopper_views

PROJECT = pathlib.Path(__file__).parents[2] / 'pyproject.toml'


def test_missing_private_modules_name_the_supported_versions(monkeypatch):
    project = tomllib.loads(PROJECT.read_text())['project']
    (bounds,) = [d for d in project['dependencies'] if d.startswith('jax>')]
    for extra in ('cuda12', 'cuda13'):
        assert project['optional-dependencies'][extra] == [bounds.replace('jax', f'jax[{extra}]')]
    monkeypatch.setitem(sys.modules, 'jax._src.pallas.mosaic_gpu.core', None)
    spec = importlib.util.spec_from_file_location('other_views', hopper_views.__file__)
    with pytest.raises(ImportError, match='private modules of JAX') as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert f'install {bounds}, or use another backend' in str(caught.value)
