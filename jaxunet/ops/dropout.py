"""Dropout whose random numbers cost little: a hash of each pair's position.

JAX's generator would take more arithmetic per element than the layers around it. Here each sample
has two words, which are mixed with the positions of its pairs of neighbouring elements; each
element of a pair takes half of the bits. This is integer arithmetic, so all backends drop the same
elements: those whose op has dropout in its kernels, such as GroupNorm's of the cuda backend, and
those that call `drop` on its result.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from jaxunet.runtime import dropout_rate
from jaxunet.runtime.bits import mix_bits


@jax.tree_util.register_pytree_node_class
class Dropout(NamedTuple):
    """Says which elements of an array are dropped.

    What a sample loses depends on its own seeds alone, so the result does not depend on how a batch
    is split over devices.

    Fields:
      seeds: two words per sample; other words drop other elements.
      rate: the probability that an element is dropped, rounded to a multiple of 2⁻¹⁶. Above 0, it
        must be more than 2⁻¹⁷ and less than 1 − 2⁻¹⁷.
    """

    seeds: UInt32[Array, 'batch 2']
    rate: float

    def tree_flatten(self) -> tuple[tuple[Any], float]:
        """Returns the seeds alone as a leaf: the rate is a constant of the program."""
        return (self.seeds,), self.rate

    @classmethod
    def tree_unflatten(cls, rate: float, leaves: tuple[Any]) -> Dropout:
        """Returns the dropout of a leaf, which may be one of JAX's placeholders."""
        return cls(*leaves, rate)

    @property
    def threshold(self) -> int:
        """An element whose 16 bits are below this number is dropped."""
        return round(self.rate * dropout_rate.LEVELS)

    def factor(self, dtype: DTypeLike) -> np.ndarray:
        """The number that scales the other elements, in their type.

        It is 1 / (1 - rate) for the rounded rate, so that the mean stays the same.
        """
        return np.asarray(1 / (1 - self.threshold / dropout_rate.LEVELS), dtype)


def drop(x: Float[Array, 'batch *rest'], dropout: Dropout) -> Float[Array, 'batch *rest']:
    """Zeroes the dropped elements and scales the rest.

    Raises:
      ValueError: as `check_dropout`.
    """
    check_dropout(dropout, x.shape[0])
    dropped = _bits(dropout.seeds, x.shape[1:]) < jnp.uint32(dropout.threshold)
    return jnp.where(dropped, jnp.zeros((), x.dtype), x * dropout.factor(x.dtype))


def check_dropout(dropout: Dropout, batch: int) -> None:
    """Checks the seeds and the rate of a dropout.

    Args:
      batch: number of samples.

    Raises:
      ValueError: the seeds have another shape or type, or the rate is not supported.
    """
    seeds, expected = dropout.seeds, (batch, 2)
    if seeds.shape != expected or seeds.dtype != jnp.uint32:
        raise ValueError(
            f'dropout: seeds: {seeds.dtype}{list(seeds.shape)}; expected uint32{list(expected)}'
        )
    if not dropout_rate.is_supported(dropout.rate):
        raise ValueError(f'dropout: rate: expected {dropout_rate.SUPPORTED}, found {dropout.rate}')


def _bits(seeds: UInt32[Array, 'batch 2'], shape: tuple[int, ...]) -> UInt32[Array, 'batch *shape']:
    """Returns 16 random bits for every element of each sample, of this shape."""
    ones = (1,) * len(shape)
    first, second = (seeds[:, i].reshape(-1, *ones) for i in range(2))
    position = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(1, *shape)
    word = mix_bits(mix_bits((position >> 1) ^ first) + second)
    return (word >> ((position & 1) * 16)) & jnp.uint32(0xFFFF)
