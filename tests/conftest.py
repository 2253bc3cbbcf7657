"""Settings of every test: strict JAX, four forced CPU devices, warnings as errors (pyproject.toml)."""

import os
import pathlib

# Before jax starts: four devices for the data-parallel tests; a GPU machine keeps its own.
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=4'

import jax
import pytest

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker('gpu')]
    if marked and jax.default_backend() != 'gpu':
        for item in marked:
            item.add_marker(pytest.mark.skip(reason='needs an NVIDIA GPU'))


@pytest.fixture(scope='session')
def shared_dir() -> pathlib.Path:
    """Real images and golden values that not every machine has."""
    path = pathlib.Path(__file__).resolve().parents[2] / 'shared'
    if not (path / 'data').is_dir():
        pytest.skip(f'{path} is missing: this test needs its real data')
    return path
