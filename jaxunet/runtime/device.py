"""The family of kernels that a device runs.

The environment variable JAXUNET_KERNELS can choose portable kernels on a GPU that has faster ones.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator

import jax

from jaxunet.runtime.errors import UserError

VARIABLE = 'JAXUNET_KERNELS'


class Kernels(enum.Enum):
    """The kernels that ops may run; the values of the environment variable `VARIABLE`."""

    # The fastest kernels for this GPU; the default.
    FASTEST = 'fastest'
    # Kernels that any GPU of compute capability 8.0 or later runs, even on Hopper.
    PORTABLE = 'portable'
    # The same, but the CUDA kernels use at most 99 KiB of shared memory, which a block of an Ada
    # GPU has.
    ADA = 'ada'


class Target(enum.Enum):
    """A family of kernels."""

    # Compute capability 9.0: TMA and wgmma.
    HOPPER = 'hopper'
    # Compute capability 8.0 and later.
    PORTABLE = 'portable'


class UnsupportedDeviceError(ValueError):
    """Raised when this machine's device runs none of the kernels."""


_forced: list[tuple[Target, str | None]] = []


def requested() -> Kernels:
    """Returns the kernels that `VARIABLE` asks for.

    Raises:
      UserError: `VARIABLE` has an unknown value.
    """
    name = os.environ.get(VARIABLE) or Kernels.FASTEST.value
    try:
        return Kernels(name)
    except ValueError:
        known = ', '.join(kernels.value for kernels in Kernels)
        raise UserError(f'{VARIABLE}: expected one of {known}, found {name!r}') from None


def kernels() -> Kernels:
    """Returns the kernels that ops may run if traced now: `requested`, unless inside `use`.

    Raises:
      UserError: see `requested`.
    """
    if not _forced:
        return requested()
    if _forced[-1][0] is not Target.PORTABLE:
        return Kernels.FASTEST
    return Kernels.PORTABLE if requested() is Kernels.FASTEST else requested()


@contextlib.contextmanager
def use(target: Target, kind: str = 'NVIDIA H200') -> Iterator[None]:
    """Forces the family of kernels that are traced and lowered in the block, despite `VARIABLE`.

    For tests, and to lower for a GPU on a machine without one.

    Args:
      target: the family.
      kind: name of the GPU to lower for.
    """
    here = jax.default_backend() == 'gpu'
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
    """Returns the family that this process's default device runs; `VARIABLE` can exclude Hopper's.

    Raises:
      UnsupportedDeviceError: the device is not an NVIDIA GPU of compute capability 8.0 or later.
      UserError: see `requested`.
    """
    if _forced:
        return _forced[-1][0]
    device = jax.devices()[0]
    if device.platform != 'gpu':
        raise UnsupportedDeviceError(
            f'the kernels need an NVIDIA GPU of compute capability 8.0 or later; '
            f'found {device.platform}'
        )
    capability = getattr(device, 'compute_capability', '')
    try:
        major = int(str(capability).split('.')[0])
    except ValueError:
        raise UnsupportedDeviceError(
            f'the kernels need an NVIDIA GPU; found {device.device_kind}'
        ) from None
    if major < 8:
        raise UnsupportedDeviceError(
            f'the kernels need compute capability 8.0 or later; '
            f'{device.device_kind} has {capability}'
        )
    return Target.HOPPER if major == 9 and requested() is Kernels.FASTEST else Target.PORTABLE


def family() -> Target | None:
    """Returns `target`, or None if this process's default device runs none of the kernels."""
    try:
        return target()
    except UnsupportedDeviceError:
        return None


def portable() -> bool:
    """Returns True if only portable kernels run: on other GPUs than Hopper, or if asked for.

    On a machine without a GPU, it returns False unless portable kernels are asked for: kernels
    there are stand-ins for Hopper's.
    """
    family_here = family()
    return (
        kernels() is not Kernels.FASTEST if family_here is None else family_here is Target.PORTABLE
    )


def kind() -> str:
    """Returns the name of the device that kernels are traced for, such as 'NVIDIA H200'."""
    lowered_for = _forced[-1][1] if _forced else None
    return jax.devices()[0].device_kind if lowered_for is None else lowered_for


def multiprocessors(otherwise: int) -> int:
    """Returns the number of multiprocessors of the GPU that kernels are traced for.

    Args:
      otherwise: the result if the number is unknown, on a machine without a GPU.
    """
    here = jax.devices()[0]
    if here.platform != 'gpu' or (_forced and _forced[-1][1] is not None):
        return otherwise
    return int(getattr(here, 'core_count', None) or otherwise)


def label() -> str:
    """Returns the name of this process's device for rows, with the value of `VARIABLE` if set.

    Tables separate rows by device name, so they also separate rows of portable kernels.

    Raises:
      UserError: see `requested`.
    """
    name = jax.devices()[0].device_kind
    return name if requested() is Kernels.FASTEST else f'{name}, {requested().value} kernels'
