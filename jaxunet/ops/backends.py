"""Chooses a backend for every op: `xla`, the references, or an installed kernel backend.

`auto` chooses op by op, from the device and the precision; it times nothing at run time. If `python
-m jaxunet.benchmark --choose` has measured this kind of device, it takes the fastest backends of
that measurement (`jaxunet.ops.choices`). Otherwise `_auto` chooses by this table:

    Hopper (compute capability 9.0)             cuda
    compute capability 8.x, bfloat16, float16   cuda
    every other device and precision            xla

For `jaxunet.ops.functional`, the precision is the type of the activation. Every op of a type that
no kernel takes, such as float64, comes from xla.

On a Hopper GPU, `auto` chooses as on 8.x with JAXUNET_KERNELS=portable or ada.

If the CUDA kernels do not run, the log says so, and every op comes from pallas on Hopper, from xla
on 8.x. If pallas is missing, too, every op comes from xla, and the log says so. An op that its
backend does not implement runs on xla: pallas has no linear and no adamw.

`describe` returns the line that a run logs. A config can override single ops:
`backend=auto+attention=pallas`. For a short sampling job, `jaxunet.ops.short_jobs` takes the time
to compile into account.

`load_ops(backend)` returns an `Ops`. The UNet receives it as a field and never asks which backend
it has. Kernel backends are Python entry points; `jaxunet.runtime.plugins` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
# `overlaps`.
OVERLAP_PIXELS, OVERLAP_PIXELS_OF_SEVERAL = 64 * 64 * 64, 128 * 64 * 64
UNNAMED = 'auto'  # the default backend, chosen by `_auto`


def choose(backend: str, precision: str | None = None) -> dict[str, str]:
    """Returns the backend of every op of `jaxunet.config.OPS` on this machine.

    Args:
      backend: as `Config.backend`, such as pallas or pallas+adamw=cuda.
      precision: as `Config.precision`; only `auto` uses it, and needs it.

    Raises:
      UserError: a backend is unknown, or this version or machine does not have it; or
        JAXUNET_KERNELS has an unknown value.
      TypeError: `auto` without a precision.
    """
    device.asked()
    chosen = named(backend, precision)
    for name in dict.fromkeys(chosen.values()):
        if missing := _unavailable(name):
            raise UserError(f'backend={backend}: {missing}; {_advice(name)}')
    return chosen


def named(backend: str, precision: str | None = None) -> dict[str, str]:
    """Returns the backend of every op, even if this machine cannot run it.

    An op that the backend does not implement gets xla.

    Raises:
      UserError: as `jaxunet.config.split_backend`.
      TypeError: as `choose`.
    """
    base, changed = split_backend(backend)
    if base == UNNAMED and precision is None:
        raise TypeError(f'backend={backend} depends on the precision, which was not given')
    bases = _auto(precision) if base == UNNAMED and precision else dict.fromkeys(OPS, base)
    return {
        op: name if name != 'xla' and op in checked_ops(load_backend(name)) else 'xla'
        for op, name in bases.items()
    } | changed


def overlaps(config: Config, devices: int = 1) -> bool:
    """Returns True if a step is faster when independent kernels run at once, on each of its GPUs.

    This helps CUDA convolutions that are each too small to fill the GPU. Larger ones gain little
    for the memory that it takes, except on several GPUs, where they also run beside the all-reduce.
    Steps of other backends get slower (docs/results.md). To refit `OVERLAP_PIXELS`, run
    `tools/gpu/overlap.py`; `OVERLAP_PIXELS_OF_SEVERAL` is the largest that was measured.
    """
    height, width, _ = config.image_shape
    batch = config.data.batch_size // config.optimizer.accumulate_steps // devices
    convolutions = named(config.backend, config.precision)['norm_silu_conv3x3']
    allowed = config.parallel.concurrent_kernels and convolutions == 'cuda'
    largest = OVERLAP_PIXELS if devices == 1 else OVERLAP_PIXELS_OF_SEVERAL
    return allowed and batch * height * width <= largest


def load_ops(backend: str, precision: str | None = None) -> Ops:
    """Returns the ops of a backend that runs on this machine.

    Raises:
      UserError: as `choose`.
    """
    choose(backend, precision)
    return ops_of(backend, precision)


def ops_of(backend: str, precision: str | None = None) -> Ops:
    """Returns the ops of a backend, even if this machine cannot run them.

    Raises:
      UserError: as `named`.
    """
    chosen = named(backend, precision)

    def chosen_op(name: str) -> Op:
        owner = chosen[VARIANTS.get(name, name)]
        if owner == 'xla':
            return getattr(XLA, name)
        return implementation(name, checked_ops(load_backend(owner)))

    return Ops(**{name: chosen_op(name) for name in Ops._fields})


def fused_update(backend: str, precision: str | None = None) -> FusedUpdate | None:
    """Returns the kernels of the op `adamw`; None if optax and XLA do its work."""
    name = named(backend, precision)['adamw']
    return None if name == 'xla' else checked_ops(load_backend(name))['adamw']


def transform_gradients(
    backend: str, precision: str | None = None
) -> Callable[..., Callable[..., Any]]:
    """Returns what a step does to its gradient function: `Backend.transform_gradients`.

    It takes the function and the number of devices, by default 1. It is the identity unless one
    kernel backend computes all convolutions.
    """
    chosen = named(backend, precision)
    name, other = chosen['conv3x3'], chosen['norm_silu_conv3x3']
    if name == 'xla' or name != other:
        return unchanged
    return checked_transform(load_backend(name))


def check_averages(config: Config) -> None:
    """Checks that the backend of `adamw` takes all averages of the weights.

    Raises:
      UserError: they are more than its kernels take, or as `named`.
    """
    found = len(config.ema.rates) + len(config.ema.widths)
    name = named(config.backend, config.precision)['adamw']
    if found <= MAX_AVERAGES or name == 'xla':
        return
    base, changed = split_backend(config.backend)
    changed |= {'adamw': 'xla'}
    other = '+'.join([base, *(f'{op}={owner}' for op, owner in changed.items())])
    raise UserError(
        f'ema.rates, ema.widths: {found} averages of the weights; the kernels of adamw={name} take '
        f'at most {MAX_AVERAGES}; keep fewer, or set backend={other}'
    )


def describe(backend: str, precision: str | None = None) -> str:
    """Returns one line for a log: the backend of each op. `adamw=xla` is optax, compiled by XLA.

    It says so if JAXUNET_KERNELS chose the kernels, or `auto` follows measurements of this machine.
    """
    line = 'ops: ' + ', '.join(f'{op}={name}' for op, name in choose(backend, precision).items())
    if device.asked() is not device.Kernels.FASTEST:
        line += f' ({device.VARIABLE}={device.asked().value})'
    follows = split_backend(backend)[0] == UNNAMED and precision and measured(precision)
    return f'{line} (measured here: {choices.path()})' if follows else line


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
    if device.family() not in (device.Target.HOPPER, device.Target.PORTABLE):
        return None
    if device.asked() is not device.Kernels.FASTEST:
        return None
    found = choices.read(device.kind(), precision)
    for op, name in (found or {}).items():
        missing = _missing(name)
        if missing is None and name != 'xla' and op not in load_backend(name).ops:
            missing = f'the {name} backend has no {op}'
        if missing:
            choices.ignore(f'{choices.path()}: {op}={name}: {missing}')
            return None
    return found


def _auto(precision: str) -> dict[str, str]:
    """Returns the choice that was measured here, else that of this module's table.

    The table follows whole training steps timed on Hopper GPUs (docs/results), because a kernel
    that is faster alone can be slower in a step. The kernels of compute capability 8.x were timed
    there, too. Devices without such measurements use XLA. To refit the table, run `python -m
    jaxunet.benchmark` for each candidate on the new device.
    """
    if precision not in KERNEL_TYPES:
        return dict.fromkeys(OPS, 'xla')
    if found := measured(precision):
        return found
    hopper = device.family() is device.Target.HOPPER
    if not hopper and (precision == 'float32' or not _runs_portable()):
        return dict.fromkeys(OPS, 'xla')
    no_cuda = _missing('cuda')
    if not no_cuda:
        return dict.fromkeys(OPS, 'cuda')
    logging.log_first_n(
        logging.WARNING, 'backend=auto: the CUDA kernels are left out: %s', 1, no_cuda
    )
    if not hopper:
        return dict.fromkeys(OPS, 'xla')
    if no_pallas := _missing('pallas'):
        logging.log_first_n(
            logging.WARNING, 'backend=auto: the Pallas kernels are left out: %s', 1, no_pallas
        )
    return dict.fromkeys(OPS, 'xla' if no_pallas else 'pallas')


def _runs_portable() -> bool:
    """Returns True if `auto` may take the portable kernels: on 8.x, or by JAXUNET_KERNELS."""
    if device.family() is not device.Target.PORTABLE:
        return False
    if device.kernels() is not device.Kernels.FASTEST:
        return True
    return str(getattr(jax.devices()[0], 'compute_capability', '')).startswith('8.')
