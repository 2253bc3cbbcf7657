"""Settings of every test: strict JAX, four forced CPU devices, bounded memory."""

import gc
import os
import pathlib
import signal
from collections.abc import Iterator

# Before numpy starts: on a busy machine OpenBLAS's threads wait for each other, busily.
os.environ['OPENBLAS_NUM_THREADS'] = '1'

from support import annotations
from support.settings import QUICK

ROOT = pathlib.Path(__file__).resolve().parent

# Before jax starts: four CPU devices for the data-parallel tests.
os.environ['XLA_FLAGS'] = (
    f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=4 {QUICK}'
)

# Many tests, and the commands that they start, compile the same tiny programs.
os.environ['JAX_COMPILATION_CACHE_DIR'] = str(ROOT / '.pytest_cache' / 'xla')
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'

# Choices that were measured on this machine must not change what tests find.
os.environ['JAXUNET_CHOICES'] = str(ROOT / '.pytest_cache' / 'choices.json')

# A shell's background jobs ignore Ctrl-C, and so would every process of a test that sends it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import pytest  # noqa: E402
from support import memory  # noqa: E402

annotations.install(ROOT)  # before the packages are imported

import xla_ffi  # noqa: E402

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

KERNELS = ROOT / 'xla_ffi'


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--update-golden',
        action='store_true',
        help='record the lowered training steps anew instead of comparing them',
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # A parity test calls the handlers; other tests beside the kernels say so themselves.
        if item.path.is_relative_to(KERNELS) and item.path.name == 'parity_test.py':
            item.add_marker('extension')
    marked = [item for item in items if item.get_closest_marker('gpu')]
    if marked and jax.default_backend() != 'gpu':
        for item in marked:
            item.add_marker(pytest.mark.skip(reason='needs an NVIDIA GPU'))


def pytest_collection_finish() -> None:
    """Makes garbage collections rare and cheap: JAX's traces start many, nearly all in vain."""
    gc.collect()
    gc.freeze()  # modules and tests, which stay
    gc.set_threshold(10_000, 10, 20)


@pytest.hookimpl(tryfirst=True)  # before fixtures that call handlers
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked `extension` where the module is missing, or fails it if CI sets so."""
    for mark in item.iter_markers('extension'):
        name = mark.args[0] if mark.args else '_cpu'
        if getattr(xla_ffi, name) is None:
            how = (
                'JAXUNET_CUDA=cpu pip install -e .'
                if name == '_cpu'
                else 'JAXUNET_CUDA=1 pip install -e .'
            )
            reason = f'the extension xla_ffi.{name} is not built; build it with: {how}'
            if os.environ.get('JAXUNET_REQUIRE_EXTENSION') == '1':
                pytest.fail(f'{reason} (JAXUNET_REQUIRE_EXTENSION=1)', pytrace=False)
            pytest.skip(reason)


@pytest.fixture(scope='session')
def shared_dir() -> pathlib.Path:
    """Real images and golden values that not every machine has."""
    path = ROOT.parent / 'shared'
    if not (path / 'data').is_dir():
        pytest.skip(f'{path} is missing: this test needs its real data')
    return path


@pytest.fixture(scope='module')
def shared_steps() -> Iterator[None]:
    """Compiles the training step of runs with equal configs once."""
    from support.shared_steps import shared_steps  # noqa: PLC0415 (most workers need no training)

    with shared_steps():
        yield


STATM = pathlib.Path('/proc/self/statm')
# A worker that occupies more bytes than this drops its compiled programs. Tests of the next file
# share few of them, tests of the same file most, so within a file they may grow larger. A single
# test adds up to 0.5 GiB to either.
GIB = 1 << 30
BETWEEN_FILES, WITHIN_A_FILE = 3 * GIB // 4, 3 * GIB // 2
GROWTH = GIB // 4  # beyond what dropping left, so that it is not repeated in vain
_left = 0


def _resident() -> int:
    """Returns the bytes of memory that this process occupies, or 0 where there is no /proc."""
    if not STATM.exists():
        return 0
    return int(STATM.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Drops compiled programs once they fill a worker's memory; the cache on disk keeps them."""
    global _left  # noqa: PLW0603
    yield
    same_file = nextitem is not None and nextitem.path == item.path
    if _resident() > max(WITHIN_A_FILE if same_file else BETWEEN_FILES, _left + GROWTH):
        memory.drop_compiled_programs()
        _left = _resident()
