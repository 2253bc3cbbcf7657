"""Chooses a backend for every op: `xla`, the references, or an installed kernel backend.

`auto` chooses op by op, from the device and the precision; it times nothing at run time. If `python
-m jaxunet.benchmark --choose` has measured this kind of device, it takes the fastest backends of
that measurement (`jaxunet.ops.choices`). Otherwise `_auto` chooses by this table:

    Hopper (compute capability 9.0)             cuda; in float32, linear from xla
    compute capability 8.x, bfloat16, float16   cuda
    every other device and precision            xla

On a GPU newer than Hopper, a log line says that the portable kernels run but were not measured.

For `jaxunet.ops.functional`, the precision is the type of the activation. Every op of a type that
no kernel takes, such as float64, comes from xla.

On a Hopper GPU, `auto` chooses as on 8.x with JAXUNET_KERNELS=portable or ada.

If the CUDA kernels do not run, the log says so. Every op then comes from pallas on Hopper, and from
xla if that does not run either, or on 8.x. An op that its backend does not
implement runs on xla: pallas has no linear and no adamw.

A config can override single ops: `backend=auto+attention=pallas`.

A session or generator calls `choose` once and passes on its `Kernels`. The UNet receives their
`ops` as a field and never asks which backend it has. Kernel backends are Python entry points;
`jaxunet.runtime.plugins` finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from absl import logging

from jaxunet.config import OPS, Config, split_backend
from jaxunet.ops import choices
from jaxunet.ops.adamw.operands import MAX_AVERAGES
from jaxunet.ops.checks import KERNEL_TYPES
from jaxunet.ops.guard import checked_ops, checked_transform
from jaxunet.ops.references import UPDATE, VARIANTS, XLA, Op, implementation
from jaxunet.ops.vocabulary import FusedUpdate, Ops
from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.plugins import Backend, backend_names, load_backend, unchanged

# The largest batches, in pixels, at which kernels overlap on one GPU, and on each of several; see
# `Kernels.overlap`.
OVERLAP_PIXELS, OVERLAP_PIXELS_OF_SEVERAL = 64 * 64 * 64, 128 * 64 * 64
UNNAMED = 'auto'  # the default backend, chosen by `_auto`
_warn_once = functools.cache(logging.warning)  # once for equal arguments


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels that a backend and a precision stand for; their text is a line for a log.

    Fields:
      names: the backend of every op of `jaxunet.config.OPS`. `adamw=xla` is optax, compiled by XLA.
      ops: for the UNet.
      update: of the op `adamw`; None if optax and XLA do its work.
      transform: what a step does to its gradient function, given with the number of devices, by
        default 1: `Backend.transform_gradients`. It is the identity unless one kernel backend
        computes all convolutions.
      why: what chose them, if that is neither the config nor this module's table.
    """

    names: Mapping[str, str]
    ops: Ops
    update: FusedUpdate | None
    transform: Callable[..., Callable[..., Any]]
    why: str

    def __str__(self) -> str:
        return 'ops: ' + ', '.join(f'{op}={name}' for op, name in self.names.items()) + self.why

    def overlap(self, config: Config, devices: int = 1) -> bool:
        """Returns True if a step is faster when independent kernels run at once, on its GPUs.

        This helps CUDA convolutions that are each too small to fill the GPU. Larger ones gain
        little for the memory that it takes, except on several GPUs, where they also run beside the
        all-reduce. Steps of other backends get slower (docs/results.md). To refit `OVERLAP_PIXELS`,
        run `tools/gpu/overlap.py`; `OVERLAP_PIXELS_OF_SEVERAL` is the largest that was measured.
        """
        height, width, _ = config.image_shape
        batch = config.data.batch_size // config.optimizer.accumulate_steps // devices
        cuda = self.names['norm_silu_conv3x3'] == 'cuda'
        largest = OVERLAP_PIXELS if devices == 1 else OVERLAP_PIXELS_OF_SEVERAL
        return cuda and config.parallel.concurrent_kernels and batch * height * width <= largest

    def check_averages(self, config: Config) -> None:
        """Checks that the backend of `adamw` takes all averages of the weights.

        Raises:
          UserError: they are more than its kernels take.
        """
        count = len(config.ema.rates) + len(config.ema.widths)
        if count <= MAX_AVERAGES or self.update is None:
            return
        base, changed = split_backend(config.backend)
        changed |= {'adamw': 'xla'}
        other = '+'.join([base, *(f'{op}={owner}' for op, owner in changed.items())])
        raise UserError(
            f'ema.rates, ema.widths: {count} averages of the weights; the kernels of '
            f'adamw={self.names["adamw"]} take at most {MAX_AVERAGES}; keep fewer, or set '
            f'backend={other}'
        )


def choose(backend: str, precision: str | None = None, *, here: bool = True) -> Kernels:
    """Returns the kernels of a backend. An op that it does not implement gets xla.

    Args:
      backend: as `Config.backend`, such as pallas or pallas+adamw=cuda.
      precision: as `Config.precision`; only `auto` uses it, and needs it.
      here: this machine has to run them.

    Raises:
      UserError: a backend is unknown, or this version or machine does not have it; or
        JAXUNET_KERNELS has an unknown value.
      TypeError: `auto` without a precision.
    """
    requested = device.requested()
    why = '' if requested is device.Kernels.FASTEST else f' ({device.VARIABLE}={requested.value})'
    base, changed = split_backend(backend)
    bases: Mapping[str, str] = dict.fromkeys(OPS, base)
    if base == UNNAMED:
        if precision is None:
            raise TypeError(f'backend={backend} depends on the precision, which was not given')
        if fastest := measured(precision):
            bases, why = fastest, f' (measured here: {choices.path()})'
        else:
            bases = _auto(precision)
            _tell_if_newer()
    elif base == 'cuda' and here:
        _tell_if_newer()
    names = {
        op: name if name != 'xla' and op in checked_ops(load_backend(name)) else 'xla'
        for op, name in bases.items()
    } | changed
    for name in dict.fromkeys(names.values()) if here else ():
        if missing := _unavailable(name):
            raise UserError(f'backend={backend}: {missing}; {_advice(name)}')
    return _kernels(names, why)


def _kernels(names: Mapping[str, str], why: str) -> Kernels:
    """Returns the implementations of the ops of these backends."""
    loaded = {name: checked_ops(load_backend(name)) for name in names.values() if name != 'xla'}

    def op(name: str) -> Op:
        owner = names[VARIANTS.get(name, name)]
        return getattr(XLA, name) if owner == 'xla' else implementation(name, loaded[owner])

    ops = Ops(**{name: op(name) for name in Ops._fields})
    update = None if names['adamw'] == 'xla' else loaded[names['adamw']]['adamw']
    owner = names['conv3x3']
    owns_all = owner != 'xla' and owner == names['norm_silu_conv3x3']
    transform = checked_transform(load_backend(owner)) if owns_all else unchanged
    return Kernels(names, ops, update, transform, why)


def implementations(op: str, backends: Sequence[Backend]) -> dict[str, Any]:
    """Returns the implementations of an op by backend: the reference, and backends that have it.

    A backend that has the plain op of a variant has the variant, too: composed, if it is missing.
    """
    plain = VARIANTS.get(op, op)
    return {'xla': UPDATE if op == 'adamw' else getattr(XLA, op)} | {
        backend.name: implementation(op, checked_ops(backend))
        for backend in backends
        if plain in backend.ops
    }


def installed() -> list[Backend]:
    """Returns every installed kernel backend."""
    return [load_backend(name) for name in backend_names()]


def runnable() -> list[Backend]:
    """Returns the installed kernel backends that run on this machine."""
    return [backend for backend in installed() if backend.unavailable() is None]


def _advice(name: str) -> str:
    if name == 'cuda':
        return 'or use backend=pallas on a Hopper GPU, or xla, which runs everywhere'
    if name == 'pallas' and device.family() is not None:
        return 'use backend=cuda, or xla, which runs everywhere'
    return 'use backend=xla, which runs everywhere'


def _unavailable(name: str) -> str | None:
    """Says why a backend does not run here; None if it runs."""
    if name == 'xla':
        return None
    if name not in backend_names():
        return f'the {name} backend is not installed'
    return load_backend(name).unavailable()


def _missing(name: str) -> str | None:
    """Says why `auto` skips a backend, which may fail to import; None if it runs here."""
    try:
        return _unavailable(name)
    except UserError as error:
        return str(error)


def measured(precision: str) -> dict[str, str] | None:
    """Returns what `auto` takes for each op because it was measured for this kind of GPU.

    None if nothing was measured, or some of its backends do not run here.

    None while JAXUNET_KERNELS chooses the kernels: the fastest were measured.
    """
    if precision not in KERNEL_TYPES:
        return None
    if device.family() not in (device.Target.HOPPER, device.Target.PORTABLE):
        return None
    if device.requested() is not device.Kernels.FASTEST:
        return None
    fastest = choices.read(device.kind(), precision)
    for op, name in (fastest or {}).items():
        missing = _missing(name)
        if missing is None and name != 'xla' and op not in load_backend(name).ops:
            missing = f'the {name} backend has no {op}'
        if missing:
            choices.ignore(f'{choices.path()}: {op}={name}: {missing}')
            return None
    return fastest


def _auto(precision: str) -> dict[str, str]:
    """Returns the choice of this module's table.

    It follows whole training steps timed on Hopper GPUs (docs/results), because a kernel that is
    faster alone can be slower in a step. The kernels of compute capability 8.x were timed there,
    too. Devices without such measurements use XLA. To refit the table, run `python -m
    jaxunet.benchmark` for each candidate on the new device.
    """
    if precision not in KERNEL_TYPES:
        return dict.fromkeys(OPS, 'xla')
    hopper = device.family() is device.Target.HOPPER
    if not hopper and (precision == 'float32' or not _runs_portable()):
        return dict.fromkeys(OPS, 'xla')
    order = {'cuda': 'CUDA', 'pallas': 'Pallas'} if hopper else {'cuda': 'CUDA'}
    for name, kernels in order.items():
        if missing := _missing(name):
            _warn_once('backend=auto: the %s kernels are left out: %s', kernels, missing)
            continue
        # XLA's linear layers multiply in tf32; those of cuda add three such products.
        faster = {'linear': 'xla'} if name == 'cuda' and precision == 'float32' else {}
        return dict.fromkeys(OPS, name) | faster
    return dict.fromkeys(OPS, 'xla')


def _runs_portable() -> bool:
    """Returns True if `auto` may take the portable kernels: on 8.x, or by JAXUNET_KERNELS."""
    if device.family() is not device.Target.PORTABLE:
        return False
    if device.kernels() is not device.Kernels.FASTEST:
        return True
    return _major() == 8


def _major() -> int:
    """Returns the first number of this GPU's compute capability; 0 if it is unknown."""
    first = str(getattr(jax.devices()[0], 'compute_capability', '')).partition('.')[0]
    return int(first) if first.isdigit() else 0


def _tell_if_newer() -> None:
    """Logs, once, that the kernels were not measured on this GPU, if it is newer than Hopper."""
    if device.family() is device.Target.PORTABLE and _major() > 9:
        _warn_once(
            '%s (compute capability %s) is newer than the GPUs that the kernels were measured on; '
            'backend=cuda runs the portable ones there, and %s finds the fastest backends',
            device.kind(),
            jax.devices()[0].compute_capability,
            choices.COMMAND,
        )
