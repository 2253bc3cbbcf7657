"""The hand-written CUDA kernels as XLA FFI custom calls, and CPU handlers with the same checks and results.

Importing registers every handler of the two extension modules: `_cpu`, and `_cuda` where it was built. Both import on any machine.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax

_DRIVERS = {12: '525', 13: '580'}  # the first NVIDIA driver of a major CUDA version


def _register(module: str, platform: str) -> tuple[Any, str]:
    """The extension module with its handlers registered, or None and why not."""
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
    """What this process lacks to run the CUDA kernels, or None if they run.

    Looks at the installation, the driver, JAX's default device, and its compute capability, in this order.
    """
    if _cpu is None:
        return f'the extension is not built ({_cpu_error}); install the project with "pip install ." and without wheel.cmake=false'
    if _cuda is None:
        return f'this installation was built without CUDA handlers ({_cuda_error}); install it again without JAXUNET_CUDA=0, on Linux'
    if lacking := sorted(set(_cpu.registrations()) - set(_cuda.registrations())):
        return f'this version has no CUDA kernels yet for {", ".join(lacking)}'
    driver = _cuda.driver_version()
    if driver < _cuda.needed_driver:
        found = (
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
        return f'the kernels were built with CUDA {major} and need an NVIDIA driver of {version}; found {found}'
    device = jax.devices()[0]
    if device.platform != 'gpu':
        return f'JAX runs on {device.platform}; install jax[cuda12] or jax[cuda13] on a machine with an NVIDIA GPU'
    capability = str(getattr(device, 'compute_capability', '0'))
    if int(capability.split('.', maxsplit=1)[0]) < 8:
        return f'the kernels need compute capability 8.0 or later; {device.device_kind} has {capability}'
    return None
