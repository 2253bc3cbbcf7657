"""The CUDA kernels as XLA FFI custom calls, and CPU handlers with the same checks and results.

Importing this package registers the handlers of the two extension modules, `_cpu` and `_cuda`, if
they are built. Both can be imported on any machine.
"""

from __future__ import annotations

import importlib
import pathlib
from types import ModuleType

import jax

from jaxunet.runtime import device

_DRIVERS = {12: '525', 13: '580'}  # the first NVIDIA driver of a major CUDA version


def _register(module: str, platform: str) -> tuple[ModuleType | None, str]:
    """Returns the extension module, its handlers registered, or None and the reason."""
    try:
        extension = importlib.import_module(f'xla_ffi.{module}')
    except ImportError as error:
        return None, str(error)
    for name, handler in extension.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    return extension, ''


_cpu, _cpu_error = _register('_cpu', 'cpu')
_cuda, _cuda_error = _register('_cuda', 'CUDA')


def unavailable() -> str | None:
    """Returns a line that says what this process lacks for the CUDA kernels; None if they can run.

    Checks the installation, the driver, JAX's default device, its compute capability, and the
    architectures that the kernels were built for, in this order.

    Raises:
      UserError: JAXUNET_KERNELS has an unknown value.
    """
    if _cpu is None:
        return f'the extension is not built ({_cpu_error}); {_how_to_build()}'
    if _cuda is None:
        return f'the extension is built without CUDA kernels ({_cuda_error}); {_how_to_build()}'
    if lacking := sorted(set(_cpu.registrations()) - set(_cuda.registrations())):
        return f'this version has no CUDA kernels yet for {", ".join(lacking)}'
    driver = _cuda.driver_version()
    if driver < _cuda.needed_driver:
        present = (
            f'a driver for CUDA {driver // 1000}.{driver % 1000 // 10}'
            if driver
            else 'no NVIDIA driver'
        )
        major = _cuda.needed_driver // 1000
        version = (
            f'version {_DRIVERS[major]} or later (CUDA {major}.0)'
            if major in _DRIVERS
            else f'CUDA {major}.0 or later'
        )
        return (
            f'the kernels were built with CUDA {major} and need an NVIDIA driver of {version}; '
            f'found {present}'
        )
    gpu = jax.devices()[0]
    if gpu.platform != 'gpu':
        return (
            f'JAX runs on {gpu.platform}; install jax[cuda12] or jax[cuda13] on a machine with '
            'an NVIDIA GPU'
        )
    capability = str(getattr(gpu, 'compute_capability', '0'))
    if int(capability.split('.', maxsplit=1)[0]) < 8:
        return (
            f'the kernels need compute capability 8.0 or later; {gpu.device_kind} has {capability}'
        )
    fastest = device.requested() is device.Kernels.FASTEST
    if not _runs_on(_cuda.architectures, capability, fastest=fastest):
        present = f'{gpu.device_kind} has compute capability {capability}'
        return f'the kernels are built for {_cuda.architectures}; {present}; {_how_to_build()}'
    return None


def _how_to_build() -> str:
    """Says how to get kernels for the GPUs of this machine."""
    root = pathlib.Path(__file__).resolve().parents[1]
    if (root / 'xla_ffi' / 'CMakeLists.txt').is_file():
        return f'build it with "JAXUNET_CUDA=1 pip install -e ." in {root}'
    return (
        'install a wheel of jaxunet with kernels (named manylinux, not none-any), or build them '
        'with "JAXUNET_CUDA=1 pip install --force-reinstall --no-deps SOURCE"; SOURCE is '
        'jaxunet-VERSION.tar.gz or a checkout'
    )


def _runs_on(architectures: str, capability: str, *, fastest: bool = True) -> bool:
    """Returns True if code for `architectures` runs on a GPU of this compute capability.

    Args:
      architectures: entries of CMake's CUDA_ARCHITECTURES with commas between them.
      capability: 8.0 or later, such as '9.0'.
      fastest: False if the Hopper kernels, which only code for 90a contains, are not needed.
    """
    major, minor = map(int, capability.split('.'))
    for entry in architectures.split(','):
        name, _, kind = entry.partition('-')
        code = int(name.rstrip('a'))
        if name.endswith('a') or (major == 9 and fastest):
            fits = name == f'{major}{minor}a'
        elif kind == 'real':
            fits = code // 10 == major and code % 10 <= minor
        else:  # PTX, which the driver compiles for later GPUs
            fits = code <= 10 * major + minor
        if fits:
            return True
    return False
