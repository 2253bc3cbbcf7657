"""Attention on Hopper (sm_90): supported shapes, and how programs divide the work."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels.types import Index, Shaped

BLOCK = 64  # tokens that a program owns, and that it streams at a time: the rows of a wgmma
WIDTHS = (32, 64)  # head widths: a row is 64 or 128 bytes, a whole swizzle
Q, K, V = range(3)  # thirds of the packed arrays
MAX_PROGRAMS = 2**31 - 1  # in a grid


def supports(qkv: Shaped, num_heads: int) -> str | None:
    """Returns None if the kernels can run, else the reason. Reads only shape and type.

    Args:
      qkv: (batch, tokens, 3 · num_heads · width), which `check_kernel_operands` has checked.
    """
    batch, tokens, packed = qkv.shape
    width = packed // (3 * num_heads)
    if qkv.dtype not in (jnp.bfloat16, jnp.float16):
        return f'qkv: expected bfloat16 or float16, found {qkv.dtype}'
    if width not in WIDTHS:
        return f'qkv: expected heads of 32 or 64 channels, found {width}'
    if tokens % BLOCK or not tokens or not batch:
        return f'qkv: expected a multiple of {BLOCK} tokens, found shape {tuple(qkv.shape)}'
    programs = 2 * batch * num_heads * (tokens // BLOCK)
    if programs > MAX_PROGRAMS:
        return f'qkv: expected at most {MAX_PROGRAMS} programs, found {programs}'
    return None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of one call.

    Fields:
      width: channels of a head.
    """

    batch: int
    tokens: int
    heads: int
    width: int

    @property
    def blocks(self) -> int:
        """The blocks of tokens of a sample."""
        return self.tokens // BLOCK

    @property
    def slots(self) -> int:
        """The slots of a ring of streamed blocks."""
        return min(2, self.blocks)

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return self.width**-0.5

    @property
    def scale2(self) -> float:
        """The factor of the logits, for exponents of base two."""
        return self.scale * math.log2(math.e)

    def place(self, program: Index, roles: int) -> tuple[Index, Index, Index, Index]:
        """Returns the role, block, head and sample of a program.

        The programs of a head are consecutive, so that its keys and values stay in the L2 cache.
        """
        rest, block = _divided(program, self.blocks)
        rest, role = _divided(rest, roles)
        sample, head = _divided(rest, self.heads)
        return role, block, head, sample

    def column(self, head: Index, part: int = 0) -> Index:
        """Returns the first column of a head in a matrix of its outputs, or of packed arrays."""
        return (part * self.heads + head) * self.width


def sizes(qkv: Shaped, num_heads: int) -> Sizes:
    """Returns the sizes of a call.

    Raises:
      ValueError: `supports` refuses it; the message says why.
    """
    reason = supports(qkv, num_heads)
    if reason:
        raise ValueError(f'attention on Hopper: {reason}')
    batch, tokens, packed = qkv.shape
    return Sizes(batch, tokens, num_heads, packed // (3 * num_heads))


def _divided(value: Index, by: int) -> tuple[Index, Index]:
    return lax.div(value, jnp.int32(by)), lax.rem(value, jnp.int32(by))
