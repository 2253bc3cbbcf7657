"""Settings of every test: strict JAX, four forced CPU devices, warnings as errors (pyproject.toml)."""

import os
import pathlib
import signal

import jaxlib.version

# Before jax starts: four CPU devices for the data-parallel tests, and quick compiling, as most of the time goes there.
QUICK = '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'
if jaxlib.version.__version_info__ < (0, 11):
    QUICK += ' --xla_cpu_use_fusion_emitters=false'  # halves it; later versions have no such choice
os.environ['XLA_FLAGS'] = (
    f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=4 {QUICK}'
)

# Many tests, and the commands that they start, compile the same tiny programs.
os.environ['JAX_COMPILATION_CACHE_DIR'] = str(
    pathlib.Path(__file__).parents[1] / '.pytest_cache' / 'xla'
)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'

# A shell's background jobs ignore Ctrl-C, and so would every process of a test that sends it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
