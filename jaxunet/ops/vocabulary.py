"""The ops of the UNet: one signature and one return type per op, shared by all backends.

Each op is a fusion that is worth having. `Ops` holds one implementation of each op. `Convolution`
and `Norm` are operands of several ops; the module of an op's reference documents its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw.operands import AdamW, Tree
from jaxunet.ops.adamw.packed import Join, joined
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.linear.projections import Projection

Result = TypeVar('Result')
MAX_COPIES = 2  # other readers of the input of a residual block: its shortcut and a skip connection


class WithInput(NamedTuple, Generic[Result]):
    """A result, and copies of the op's input for the other readers of the input.

    The copies are the input itself; nothing is written. Other readers use these copies, so a fused
    op receives their gradients and can add them inside its own backward kernel.
    """

    result: Result
    copies: tuple[Activation, ...]


class Conv3x3(Protocol):
    """A 3×3 convolution of an image, of SiLU(GroupNorm(image)), or of the image upsampled.

    The last takes no residual. See `jaxunet.ops.conv3x3.reference`.
    """

    def __call__(self, conv: Convolution) -> Activation: ...


class Conv3x3AndInput(Protocol):
    """`Conv3x3` that also returns `copies` copies of the image, 1 to `MAX_COPIES`."""

    def __call__(self, conv: Convolution, *, copies: int = 1) -> WithInput[Activation]: ...


class GroupNorm(Protocol):
    """GroupNorm [+ SiLU] [+ dropout]. Returns one array, because its readers take arrays.

    See `jaxunet.ops.group_norm.reference.group_norm`.
    """

    def __call__(
        self, x: Activation, norm: Norm, *, silu: bool = False, dropout: Dropout | None = None
    ) -> Float[Array, 'batch height width channels']: ...


class GroupNormAndInput(Protocol):
    """`GroupNorm` that also returns `copies` copies of x, 1 to `MAX_COPIES`."""

    def __call__(
        self, x: Activation, norm: Norm, *, silu: bool = False, copies: int = 1
    ) -> WithInput[Array]: ...


class Attention(Protocol):
    """Multi-head attention on packed qkv. See `jaxunet.ops.attention.reference.attention`."""

    def __call__(
        self, qkv: Float[Array, 'batch tokens packed'], *, num_heads: int
    ) -> Float[Array, 'batch tokens channels']: ...


class Linear(Protocol):
    """x · kernel + bias [+ residual] at every pixel. See `jaxunet.ops.linear.reference.linear`."""

    def __call__(
        self,
        x: Float[Array, 'batch height width channels'],
        kernel: Float[Array, 'channels features'],
        bias: Float[Array, '1 features'],
        *,
        residual: Float[Array, 'batch height width features'] | None = None,
    ) -> Float[Array, 'batch height width features']: ...


class Project(Protocol):
    """x · kernel + biases of many layers at once.

    See `jaxunet.ops.linear.projections.project`.
    """

    def __call__(
        self, x: Float[Array, 'batch width'], layers: Sequence[Projection]
    ) -> tuple[Float[Array, '#batch features'], ...]: ...


class Ops(NamedTuple):
    """The ops that a UNet is built from.

    A backend implements some of them under these names. `upsample_conv3x3`, `project` and the two
    `..._and_input` are optional. `jaxunet.ops.references` composes a missing one from the plain op,
    except `project`, which XLA then computes.
    """

    conv3x3: Conv3x3
    upsample_conv3x3: Conv3x3
    norm_silu_conv3x3: Conv3x3
    norm_silu_conv3x3_and_input: Conv3x3AndInput
    group_norm: GroupNorm
    group_norm_and_input: GroupNormAndInput
    attention: Attention
    linear: Linear
    project: Project


class FusedUpdate(NamedTuple):
    """The parts of a training step that touch all weights at once: the op `adamw`.

    Fields:
      sum_of_squares: sum over all elements of a tree of gradients, a float32 scalar.
      adamw: one step of AdamW, of the averages of the weights, and of their 16-bit copies.
      narrow: converts float32 arrays to a 16-bit type, rounding to nearest even.
      pack: joins gradients in one float32 or bfloat16 array (`jaxunet.ops.adamw.packed.joined`).
      updates_copies: True if `adamw` takes `copies`.
    """

    sum_of_squares: Callable[[Tree], Float[Array, '']]
    adamw: AdamW
    narrow: Callable[[Sequence[Array], DTypeLike], tuple[Array, ...]]
    pack: Join = joined
    updates_copies: bool = False


def check_copies(op: str, copies: int) -> int:
    """Returns `copies`.

    Raises:
      ValueError: it is not 1 to `MAX_COPIES`.
    """
    if not 1 <= copies <= MAX_COPIES:
        raise ValueError(f'{op}_and_input: copies={copies}; expected 1 to {MAX_COPIES}')
    return copies
