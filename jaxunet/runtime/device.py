"""The family of kernels that a device runs: the one place that reads the compute capability."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

import jax


class Target(enum.Enum):
    """A family of kernels."""

    # Compute capability 9.0: Mosaic GPU (TMA, wgmma) where a shape suits it, Triton elsewhere.
    HOPPER = 'hopper'
    # Compute capability 8.0 and later: Triton.
    TRITON = 'triton'
    # The Triton kernels, interpreted: correct and slow, for tests on a CPU.
    INTERPRET = 'interpret'


class UnsupportedDeviceError(ValueError):
    """Raised when this machine's device runs none of the kernels."""


_forced: list[tuple[Target, str | None]] = []


@contextlib.contextmanager
def use(target: Target, kind: str = 'NVIDIA H200') -> Iterator[None]:
    """Forces the family of the kernels that are traced and lowered inside.

    For tests, and to lower for a GPU on a machine without one.

    Args:
      kind: the GPU to lower for.
    """
    here = target is Target.INTERPRET or jax.default_backend() == 'gpu'
    _forced.append((target, None if here else kind))
    try:
        if here:
            yield
        else:
            gpu = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform='gpu')
            with jax.sharding.use_abstract_mesh(
                jax.sharding.AbstractMesh((), (), abstract_device=gpu)
            ):
                yield
    finally:
        _forced.pop()


def target() -> Target:
    """Returns the family that this process's default device runs.

    Raises:
      UnsupportedDeviceError: it is not an NVIDIA GPU of compute capability 8.0 or later.
    """
    if _forced:
        return _forced[-1][0]
    device = jax.devices()[0]
    if device.platform != 'gpu':
        raise UnsupportedDeviceError(
            f'Pallas kernels need an NVIDIA GPU of compute capability 8.0 or later; '
            f'found {device.platform}'
        )
    capability = getattr(device, 'compute_capability', '')
    try:
        major = int(str(capability).split('.')[0])
    except ValueError:
        raise UnsupportedDeviceError(
            f'Pallas kernels need an NVIDIA GPU; found {device.device_kind}'
        ) from None
    if major < 8:
        raise UnsupportedDeviceError(
            f'Pallas kernels need compute capability 8.0 or later; '
            f'{device.device_kind} has {capability}'
        )
    return Target.HOPPER if major == 9 else Target.TRITON


def kind() -> str:
    """Returns the name of the device that kernels are traced for, such as 'NVIDIA H200'."""
    lowered_for = _forced[-1][1] if _forced else None
    return jax.devices()[0].device_kind if lowered_for is None else lowered_for


def interpreted() -> bool:
    """Returns True if kernels are interpreted on a CPU."""
    return target() is Target.INTERPRET
