"""The vocabulary of the UNet: one signature an op, shared by all backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw.operands import Moved


class Conv3x3(Protocol):
    """conv(x, kernel) + shift [+ residual · shortcut]; see `jaxunet.ops.conv3x3.reference.conv3x3`."""

    def __call__(
        self,
        x: Activation,
        kernel: Float[Array, '3 3 channels features'],
        shift: Float[Array, '#batch features'],
        *,
        residual: Activation | None = None,
        shortcut: Float[Array, 'residual_channels features'] | None = None,
    ) -> Activation: ...


class NormSiluConv3x3(Protocol):
    """conv3x3(SiLU(GroupNorm(x))) with the same epilogue; see `jaxunet.ops.conv3x3.reference.norm_silu_conv3x3`.

    Returns: Activation; (Activation, x, ...) if it passes x on, as `jaxunet.ops.activation.passing` has it.
    """

    def __call__(
        self,
        x: Activation,
        scale: Float[Array, '#batch channels'],
        offset: Float[Array, '#batch channels'],
        kernel: Float[Array, '3 3 channels features'],
        shift: Float[Array, '#batch features'],
        *,
        residual: Activation | None = None,
        shortcut: Float[Array, 'residual_channels features'] | None = None,
        groups: int = 32,
        eps: float = 1e-5,
        passing: int = 0,
    ) -> Any: ...


class GroupNorm(Protocol):
    """GroupNorm [+ SiLU]; see `jaxunet.ops.group_norm.reference.group_norm`.

    Returns: an array of x's shape; (array, x, ...) if it passes x on, as `jaxunet.ops.activation.passing` has it.
    """

    def __call__(
        self,
        x: Activation,
        scale: Float[Array, '#batch channels'],
        offset: Float[Array, '#batch channels'],
        *,
        groups: int = 32,
        eps: float = 1e-5,
        silu: bool = False,
        passing: int = 0,
    ) -> Any: ...


class Attention(Protocol):
    """Multi-head attention on packed qkv; see `jaxunet.ops.attention.reference.attention`."""

    def __call__(
        self, qkv: Float[Array, 'batch tokens packed'], *, num_heads: int
    ) -> Float[Array, 'batch tokens channels']: ...


class Linear(Protocol):
    """x · kernel + bias [+ residual] at every pixel; see `jaxunet.ops.linear.reference.linear`."""

    def __call__(
        self,
        x: Float[Array, 'batch height width channels'],
        kernel: Float[Array, 'channels features'],
        bias: Float[Array, '1 features'],
        *,
        residual: Float[Array, 'batch height width features'] | None = None,
    ) -> Float[Array, 'batch height width features']: ...


class Ops(NamedTuple):
    """The ops that a UNet is built from."""

    conv3x3: Conv3x3
    norm_silu_conv3x3: NormSiluConv3x3
    group_norm: GroupNorm
    attention: Attention
    linear: Linear


class FusedUpdate(NamedTuple):
    """What a training step does to all weights at once, fused over them: the op `adamw`.

    Fields:
      sum_of_squares: of all elements of a tree of gradients, a float32 scalar.
      adamw: one step of AdamW and of the averages of the weights; arguments as `jaxunet.ops.adamw.operands` documents.
      narrow: float32 arrays as 16-bit ones, rounded to nearest even.
    """

    sum_of_squares: Callable[[Any], Float[Array, '']]
    adamw: Callable[..., Moved]
    narrow: Callable[[Sequence[Array], DTypeLike], tuple[Array, ...]]
