"""Chooses the backend of every op: xla, the references, or an installed kernel backend.

`load_ops(backend)` returns an `Ops`; the UNet receives it as a field and never asks which backend it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import logging

from jaxunet.config import OPS, split_backend
from jaxunet.ops.activation import passing
from jaxunet.ops.attention.reference import attention
from jaxunet.ops.conv3x3 import reference as conv3x3_reference
from jaxunet.ops.group_norm.reference import group_norm
from jaxunet.ops.linear.reference import linear
from jaxunet.ops.vocabulary import FusedUpdate, Ops
from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.plugins import Backend, backend_names, load_backend

XLA = Ops(
    conv3x3=conv3x3_reference.conv3x3,
    norm_silu_conv3x3=passing(conv3x3_reference.norm_silu_conv3x3),
    group_norm=passing(group_norm),
    attention=attention,
    linear=linear,
)


def choose(backend: str, precision: str = 'bfloat16') -> dict[str, str]:
    """The backend of every op of `jaxunet.config.OPS` on this machine. `auto` takes, op by op, what was measured to be the fastest on its device.

    Args:
      backend: as `Config.backend`, such as pallas or pallas+adamw=cuda.
      precision: as `Config.precision`; it matters to `auto` alone.

    Raises:
      UserError: a backend is unknown, or this version or machine does not have it.
    """
    chosen = named(backend, precision)
    for name in dict.fromkeys(chosen.values()):
        if missing := _unavailable(name):
            raise UserError(f'backend={backend}: {missing}; {_advice(name)}')
    return chosen


def named(backend: str, precision: str = 'bfloat16') -> dict[str, str]:
    """The backend of every op, whether or not this machine runs it.

    Raises:
      UserError: as `jaxunet.config.split_backend`.
    """
    base, changed = split_backend(backend)
    bases = _auto(precision) if base == 'auto' else dict.fromkeys(OPS, base)
    return {
        op: name if name != 'xla' and op in load_backend(name).ops else 'xla'
        for op, name in bases.items()
    } | changed


def load_ops(backend: str, precision: str = 'bfloat16') -> Ops:
    """The ops that `choose` takes. Raises UserError as it does."""
    choose(backend, precision)
    return ops_of(backend, precision)


def ops_of(backend: str, precision: str = 'bfloat16') -> Ops:
    """The ops of a backend, whether or not this machine runs them. Raises UserError as `named` does."""
    chosen = named(backend, precision)
    return Ops(
        **{
            op: getattr(XLA, op) if chosen[op] == 'xla' else load_backend(chosen[op]).ops[op]
            for op in Ops._fields
        }
    )


def fused_update(backend: str, precision: str = 'bfloat16') -> FusedUpdate | None:
    """The kernels for what is done to all weights at once: AdamW, the gradients' norm, averages, 16-bit copies.

    None where optax and XLA do it.
    """
    name = named(backend, precision)['adamw']
    return None if name == 'xla' else load_backend(name).ops['adamw']


def describe(backend: str, precision: str = 'bfloat16') -> str:
    """One line for a log: the backend that each op got; AdamW's is optax, compiled by XLA, or a kernel backend."""
    return 'ops: ' + ', '.join(f'{op}={name}' for op, name in choose(backend, precision).items())


def implementations(op: str, backends: Sequence[Backend]) -> dict[str, Any]:
    """The op on XLA and on those backends that have kernels for it, by name."""
    return {'xla': getattr(XLA, op)} | {
        backend.name: backend.ops[op] for backend in backends if op in backend.ops
    }


def installed() -> list[Backend]:
    """Every installed kernel backend."""
    return [load_backend(name) for name in backend_names()]


def runnable() -> list[Backend]:
    """The installed kernel backends whose kernels run on this machine."""
    return [backend for backend in installed() if backend.unavailable() is None]


def _advice(name: str) -> str:
    return (
        'or use backend=pallas on an NVIDIA GPU, or xla, which runs everywhere'
        if name == 'cuda'
        else 'use backend=xla, which runs everywhere'
    )


def _unavailable(name: str) -> str | None:
    """What this installation or machine lacks to run a backend, or None if it runs."""
    if name == 'xla':
        return None
    if name not in backend_names():
        return f'the {name} backend is not installed'
    return load_backend(name).unavailable()


def _auto(precision: str) -> dict[str, str]:
    """The fastest backend of every op as measured by whole steps on an H200 (docs/results).

    In 16 bits that is cuda, with Pallas's attention; in float32 Pallas, with CUDA's AdamW. Other GPUs take XLA: nothing has been
    measured there.
    """
    family = _device_family()
    if family in (device.Target.HOPPER, device.Target.TRITON) and (missing := _unavailable('cuda')):
        logging.log_first_n(
            logging.WARNING, 'backend=auto: the CUDA kernels are left out: %s', 1, missing
        )
    if family is not device.Target.HOPPER:
        return dict.fromkeys(OPS, 'xla')
    pallas = 'xla' if _unavailable('pallas') else 'pallas'
    if _unavailable('cuda'):
        return dict.fromkeys(OPS, pallas)
    if precision == 'float32':
        return dict.fromkeys(OPS, pallas) | {'adamw': 'cuda'}
    return dict.fromkeys(OPS, 'cuda') | {'attention': 'cuda' if pallas == 'xla' else 'pallas'}


def _device_family() -> device.Target | None:
    """The kernels that this machine's device runs, None if none."""
    try:
        return device.target()
    except device.UnsupportedDeviceError:
        return None
