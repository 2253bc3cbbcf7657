"""The seam: the one place where xla, pallas or cuda is chosen for each op of the UNet.

`load_ops(backend)` returns an `Ops`; the UNet receives it as a field and never asks which backend it has.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float

from jaxunet.config import OP_BACKENDS, split_backend
from jaxunet.errors import UserError
from pallas_kernels import backend as kernels
from pallas_kernels import device
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.conv3x3 import reference as conv3x3_reference
from pallas_kernels.features import Features, passing
from pallas_kernels.group_norm import reference as group_norm_reference
from pallas_kernels.linear import reference as linear_reference
from xla_ffi import backend as ffi
from xla_ffi import unavailable


class Conv3x3(Protocol):
    """conv(x, kernel) + shift [+ residual · shortcut]; see `pallas_kernels.conv3x3.reference.conv3x3`."""

    def __call__(
        self,
        x: Features,
        kernel: Float[Array, '3 3 channels features'],
        shift: Float[Array, '#batch features'],
        *,
        residual: Features | None = None,
        shortcut: Float[Array, 'residual_channels features'] | None = None,
    ) -> Features: ...


class NormSiluConv3x3(Protocol):
    """conv3x3(SiLU(GroupNorm(x))) with the same epilogue; see `pallas_kernels.conv3x3.reference.norm_silu_conv3x3`.

    Returns: Features; (Features, x, ...) if it passes x on, as `pallas_kernels.features.passing` has it.
    """

    def __call__(
        self,
        x: Features,
        scale: Float[Array, '#batch channels'],
        offset: Float[Array, '#batch channels'],
        kernel: Float[Array, '3 3 channels features'],
        shift: Float[Array, '#batch features'],
        *,
        residual: Features | None = None,
        shortcut: Float[Array, 'residual_channels features'] | None = None,
        groups: int = 32,
        eps: float = 1e-5,
        passing: int = 0,
    ) -> Any: ...


class GroupNorm(Protocol):
    """GroupNorm [+ SiLU]; see `pallas_kernels.group_norm.reference.group_norm`.

    Returns: an array of x's shape; (array, x, ...) if it passes x on, as `pallas_kernels.features.passing` has it.
    """

    def __call__(
        self,
        x: Features,
        scale: Float[Array, '#batch channels'],
        offset: Float[Array, '#batch channels'],
        *,
        groups: int = 32,
        eps: float = 1e-5,
        silu: bool = False,
        passing: int = 0,
    ) -> Any: ...


class Attention(Protocol):
    """Multi-head attention on packed qkv; see `pallas_kernels.attention.reference.attention`."""

    def __call__(self, qkv: Float[Array, 'batch tokens packed'], *, num_heads: int) -> Float[Array, 'batch tokens channels']: ...


class Linear(Protocol):
    """x · kernel + bias [+ residual] at every pixel; see `pallas_kernels.linear.reference.linear`."""

    def __call__(
        self,
        x: Float[Array, 'batch height width channels'],
        kernel: Float[Array, 'channels features'],
        bias: Float[Array, '1 features'],
        *,
        residual: Float[Array, 'batch height width features'] | None = None,
    ) -> Float[Array, 'batch height width features']: ...


class Ops(NamedTuple):
    """The vocabulary of the UNet: one signature an op, shared by all backends."""

    conv3x3: Conv3x3
    norm_silu_conv3x3: NormSiluConv3x3
    group_norm: GroupNorm
    attention: Attention
    linear: Linear


XLA = Ops(
    conv3x3=conv3x3_reference.conv3x3,
    norm_silu_conv3x3=passing(conv3x3_reference.norm_silu_conv3x3),
    group_norm=passing(group_norm_reference.group_norm),
    attention=attention_reference.attention,
    linear=linear_reference.linear,
)
PALLAS = Ops(
    conv3x3=kernels.conv3x3,
    norm_silu_conv3x3=passing(kernels.norm_silu_conv3x3),
    group_norm=passing(kernels.group_norm),
    attention=kernels.attention,
    linear=linear_reference.linear,  # XLA's
)
CUDA = Ops(
    conv3x3=ffi.conv3x3,
    norm_silu_conv3x3=ffi.norm_silu_conv3x3,
    group_norm=ffi.group_norm,
    attention=ffi.attention,
    linear=ffi.linear,
)
TABLES = {'xla': XLA, 'pallas': PALLAS, 'cuda': CUDA}
KERNELS = {'pallas': 'Pallas kernels', 'cuda': 'CUDA kernels'}  # the backends whose kernels are measured beside XLA's, and their titles


def choose(backend: str, precision: str = 'bfloat16') -> dict[str, str]:
    """The backend of every op of `OP_BACKENDS` on this machine. `auto` takes, op by op, what was measured to be the fastest on its device.

    Args:
      backend: as `Config.backend`, such as pallas or pallas+adamw=cuda.
      precision: as `Config.precision`; it matters to `auto` alone.

    Raises:
      UserError: a backend is unknown, or this version or machine does not have it.
    """
    chosen = _named(backend, precision)
    used = set(chosen.values())
    if 'cuda' in used and (missing := unavailable()):
        raise UserError(f'backend={backend}: {missing}; or use backend=pallas on an NVIDIA GPU, or xla, which runs everywhere')
    if 'pallas' in used:
        try:
            device.target()
        except device.UnsupportedDeviceError as error:
            raise UserError(f'backend={backend}: {error}; use backend=xla, which runs everywhere') from None
    return chosen


def load_ops(backend: str, precision: str = 'bfloat16') -> Ops:
    """The ops that `choose` takes. Raises UserError as it does."""
    chosen = choose(backend, precision)
    return Ops(**{op: getattr(TABLES[chosen[op]], op) for op in Ops._fields})


def fuses_update(backend: str, precision: str = 'bfloat16') -> bool:
    """Whether what is done to all weights at once runs on the CUDA kernels: AdamW, the gradients' norm, averages, copies of 16 bits.

    Without them it is optax's and XLA's.
    """
    return _named(backend, precision)['adamw'] == 'cuda'


def describe(backend: str, precision: str = 'bfloat16') -> str:
    """One line for a log: the backend that each op got; AdamW's is optax, compiled by XLA, or the CUDA kernels."""
    return 'ops: ' + ', '.join(f'{op}={name}' for op, name in choose(backend, precision).items())


def further_kernels() -> dict[str, Ops]:
    """The ops of the backends beside pallas whose kernels run here, by name."""
    return {} if unavailable() else {'cuda': CUDA}


def _named(backend: str, precision: str) -> dict[str, str]:
    """The backend of every op, whether or not this machine has it."""
    base, changed = split_backend(backend)
    named = _auto(precision) if base == 'auto' else dict.fromkeys(OP_BACKENDS, base)
    return {op: named[op] if named[op] in backends else 'xla' for op, backends in OP_BACKENDS.items()} | changed


def _auto(precision: str) -> dict[str, str]:
    """By whole steps of elephants64 and by kernels on an H200 (README). In 16 bits the CUDA kernels are ahead of Pallas's, and compile in
    seconds where those take minutes; but for attention, where Pallas's are ahead with heads of 256 channels, and with narrow ones at
    batch 32 by a tenth, if 2% of a whole step behind at 256. In float32 the CUDA kernels, whose
    products are three of tf32 each, take more than three times as long as Pallas's.
    """
    if _device_family() is not device.Target.HOPPER:
        return dict.fromkeys(OP_BACKENDS, 'xla')
    if unavailable():
        return dict.fromkeys(OP_BACKENDS, 'pallas')
    if precision == 'float32':
        return dict.fromkeys(OP_BACKENDS, 'pallas') | {'adamw': 'cuda'}
    return dict.fromkeys(OP_BACKENDS, 'cuda') | {'attention': 'pallas'}


def _device_family() -> device.Target | None:
    """The kernels that this machine's device runs, None if none."""
    try:
        return device.target()
    except device.UnsupportedDeviceError:
        return None
