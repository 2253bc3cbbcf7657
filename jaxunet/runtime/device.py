"""Which kernels a device runs: the one place that looks at the compute capability."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

import jax


class Target(enum.Enum):
    """A family of kernels."""

    HOPPER = 'hopper'  # compute capability 9.0: Mosaic GPU (TMA, wgmma) where a shape suits it, Triton elsewhere
    TRITON = 'triton'  # 8.0 and later: Triton
    INTERPRET = 'interpret'  # the Triton kernels, interpreted: correct and slow, for tests on a CPU


class UnsupportedDeviceError(ValueError):
    """This machine's device runs none of the kernels."""


_forced: list[tuple[Target, str | None]] = []


@contextlib.contextmanager
def use(target: Target, kind: str = 'NVIDIA H200') -> Iterator[None]:
    """Kernels traced and lowered inside are of this family whatever the device: for tests, and to lower for a GPU `kind` without one."""
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
    """The family that this process's default device runs.

    Raises:
      UnsupportedDeviceError: it is not an NVIDIA GPU of compute capability 8.0 or later.
    """
    if _forced:
        return _forced[-1][0]
    device = jax.devices()[0]
    if device.platform != 'gpu':
        raise UnsupportedDeviceError(
            f'Pallas kernels need an NVIDIA GPU of compute capability 8.0 or later; found {device.platform}'
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
            f'Pallas kernels need compute capability 8.0 or later; {device.device_kind} has {capability}'
        )
    return Target.HOPPER if major == 9 else Target.TRITON


def kind() -> str:
    """What the device that kernels are traced for is called, like 'NVIDIA H200'."""
    lowered_for = _forced[-1][1] if _forced else None
    return jax.devices()[0].device_kind if lowered_for is None else lowered_for


def interpreted() -> bool:
    """Whether kernels are interpreted on a CPU."""
    return target() is Target.INTERPRET
