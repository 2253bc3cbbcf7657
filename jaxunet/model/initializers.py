"""The initializers of kernels, and how those of a whole network are drawn in one loop.

A program that draws each kernel by itself has a hundred copies of the generator, which take longer
to compile than to run. `drawn_together` makes a program with one, which draws the same numbers.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PyTree, UInt32

from jaxunet.config import ModelConfig

BLOCK = 2**14  # numbers of one kernel that share a key and a limit
BLOCKS = 64  # most blocks that a pass of the loop draws: enough to occupy the cores of a CPU


class _Kernel(NamedTuple):
    """A kernel that is to be drawn."""

    key: Key[Array, '']
    limit: np.float32
    stand_in: Float[Array, '...']


# The kernels of the network that `drawn_together` initializes, in the order of their creation.
_drawn_later: contextvars.ContextVar[list[_Kernel] | None] = contextvars.ContextVar(
    'kernels to draw together', default=None
)


@dataclass(frozen=True)
class Uniform:
    """Uniform within ±√(3 scale / fan), as `jax.nn.initializers.variance_scaling` draws it.

    Fields:
      mode: fan_in, or fan_avg, the average of the fans in and out.
    """

    scale: float
    mode: Literal['fan_in', 'fan_avg']

    def __call__(
        self, key: Key[Array, ''], shape: Sequence[int], dtype: DTypeLike = jnp.float32
    ) -> Float[Array, '...']:
        """Returns a kernel (*spatial, in, out); zeros in its place inside `drawn_together`."""
        kernels = _drawn_later.get()
        if kernels is None or dtype != jnp.float32 or not _is_known_generator():
            draw = nn.initializers.variance_scaling(self.scale, self.mode, 'uniform')
            return draw(key, shape, dtype)
        stand_in = jnp.zeros(shape, jnp.float32)
        kernels.append(_Kernel(key, self.limit(shape), stand_in))
        return stand_in

    def limit(self, shape: Sequence[int]) -> np.float32:
        """Returns the bound of the numbers of a kernel, rounded as JAX does."""
        fan_in, fan_out = math.prod(shape[:-1]), math.prod(shape) / shape[-2]
        fan = fan_in if self.mode == 'fan_in' else (fan_in + fan_out) / 2
        return np.sqrt(np.float32(3) * np.float32(self.scale / fan))


INITIALIZERS = {
    # PyTorch's default for kernels: uniform within 1/sqrt(fan_in).
    'torch': Uniform(1 / 3, 'fan_in'),
    'ddpm': Uniform(1.0, 'fan_avg'),
    'edm': Uniform(1.0, 'fan_avg'),
}
# Layers of NVlabs/edm's networks that start smaller, as there: √0.2 and 1e-5 of the others.
SMALLER = {'qkv': Uniform(0.2, 'fan_avg'), 'last': Uniform(1e-10, 'fan_avg')}


def initializer(model: ModelConfig, kind: str = '') -> nn.initializers.Initializer:
    """Returns the initializer of the kernels of a network.

    Args:
      kind: as `jaxunet.model.blocks.Block.kernel`.
    """
    if kind == 'last' and not model.zero_init:
        return INITIALIZERS[model.init]
    if model.init == 'edm' and kind:
        return SMALLER[kind]
    return nn.initializers.zeros if kind == 'last' else INITIALIZERS[model.init]


def _is_known_generator() -> bool:
    """Returns True if JAX draws as `_draw` does, which is its default."""
    settings = jax.config.values
    return (
        settings['jax_default_prng_impl'] == 'threefry2x32'
        and settings['jax_threefry_partitionable']
    )


def drawn_together(initialize: Callable[[], PyTree]) -> PyTree:
    """Returns the parameters that `initialize` returns, with all `Uniform` kernels drawn in a loop.

    The numbers are those that each kernel's initializer draws by itself, bit for bit.

    Args:
      initialize: traced by JAX; returns the kernels of `Uniform` as it got them.

    Raises:
      ValueError: it changed a kernel.
    """
    kernels: list[_Kernel] = []
    token = _drawn_later.set(kernels)
    try:
        params = initialize()
    finally:
        _drawn_later.reset(token)
    if not kernels:
        return params
    drawn = zip(kernels, _draw(kernels), strict=True)
    left = {id(kernel.stand_in): numbers for kernel, numbers in drawn}
    params = jax.tree.map(lambda leaf: left.pop(id(leaf), leaf), params)
    if left:
        raise ValueError(f'{len(left)} kernels are not among the parameters as they were created')
    return params


def _draw(kernels: Sequence[_Kernel]) -> list[Float[Array, '...']]:
    """Returns the kernels, which are parts of one array of blocks."""
    sizes = [kernel.stand_in.size for kernel in kernels]
    blocks = [-(-size // BLOCK) for size in sizes]
    ends = np.cumsum(blocks)
    owners = np.repeat(np.arange(len(kernels)), blocks)
    first = np.arange(len(owners)) - np.repeat(ends - blocks, blocks)  # of the kernel's blocks
    passes = -(-len(owners) // BLOCKS)
    per_pass = -(-len(owners) // passes)
    spare = (0, passes * per_pass - len(owners))

    def by_pass(of_blocks: np.ndarray) -> np.ndarray:
        return np.pad(of_blocks, spare).reshape(passes, per_pass)

    keys = jnp.stack([jax.random.key_data(kernel.key) for kernel in kernels])
    limits = np.array([kernel.limit for kernel in kernels])
    starts = (first * BLOCK).astype(np.uint32)
    numbers = jax.lax.map(
        jax.vmap(_block),
        (keys[by_pass(owners)], by_pass(starts), by_pass(limits[owners])),
    ).reshape(-1)
    return [
        numbers[(end - count) * BLOCK :][:size].reshape(kernel.stand_in.shape)
        for kernel, size, count, end in zip(kernels, sizes, blocks, ends, strict=True)
    ]


def _block(
    of: tuple[UInt32[Array, '2'], UInt32[Array, ''], Float[Array, '']],
) -> Float[Array, ' numbers']:
    """Returns `BLOCK` numbers within a limit, from a key and the place of the first in the kernel.

    As `jax.random.uniform`: a number is made of the 23 upper bits of a word, and the word is a
    function of the key and the number's place.
    """
    key, start, limit = of
    low = start + jax.lax.iota(jnp.uint32, BLOCK)
    words = threefry_2x32(key, jnp.concatenate([jnp.zeros_like(low), low]))
    bits = words[:BLOCK] ^ words[BLOCK:]
    one_to_two = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    return ((one_to_two - 1) * 2 - 1) * limit
