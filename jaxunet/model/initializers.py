"""The initializers of kernels, and how the arrays of a whole network are made from them.

A program that draws each kernel by itself has a hundred copies of the generator, which take longer
to compile than to run. `Traced` knows a function's kernels from its trace: one small program draws
the numbers of all of them, the same ones bit for bit; numpy makes what is filled or copied, and the
few operations that are left run one by one.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from typing import Literal as OneOf

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
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


# The kernels of the function that `Traced` traces, in the order of their creation.
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
    mode: OneOf['fan_in', 'fan_avg']

    def __call__(
        self, key: Key[Array, ''], shape: Sequence[int], dtype: DTypeLike = jnp.float32
    ) -> Float[Array, '...']:
        """Returns a kernel (*spatial, in, out); zeros in its place inside `Traced`."""
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


class Traced:
    """A function without arguments, traced; its arrays are made when they are asked for.

    Attributes:
      shapes: the shapes and types of its result.
    """

    def __init__(self, function: Callable[[], PyTree]) -> None:
        kernels: list[_Kernel] = []

        def outputs() -> PyTree:
            token = _drawn_later.set(kernels)
            try:
                result = function()
            finally:
                _drawn_later.reset(token)
            keys = [jax.random.key_data(kernel.key) for kernel in kernels]
            return result, [kernel.stand_in for kernel in kernels], keys

        closed, (self.shapes, stand_ins, _) = jax.make_jaxpr(outputs, return_shape=True)()
        self._jaxpr, self._constants = closed.jaxpr, closed.consts
        self._limits = [kernel.limit for kernel in kernels]
        self._kernel_shapes = [stand_in.shape for stand_in in stand_ins]

    def arrays(self) -> PyTree:
        """Returns the result of the function as numpy arrays."""
        count = len(self._limits)
        leaves, structure = jax.tree.flatten(self.shapes)
        outputs, end = self._jaxpr.outvars, len(leaves) + count
        results, stand_ins, keys = outputs[: len(leaves)], outputs[len(leaves) : end], outputs[end:]
        known: dict[object, Any] = dict(zip(self._jaxpr.constvars, self._constants, strict=True))
        if count:
            drawn = _draw(self._evaluate(keys, known), self._limits, self._kernel_shapes)
            known |= dict(zip(stand_ins, drawn, strict=True))
        values = self._evaluate(results, known)
        return jax.tree.unflatten(structure, [np.asarray(value) for value in values])

    def _evaluate(self, variables: Sequence[object], known: dict[object, Any]) -> list[Any]:
        """Returns the values of variables; `known` has those of others, and gets new ones."""
        needed, equations = {v for v in variables if not isinstance(v, Literal)}, []
        for equation in reversed(self._jaxpr.eqns):
            if any(v in needed and v not in known for v in equation.outvars):
                equations.append(equation)
                needed.update(v for v in equation.invars if not isinstance(v, Literal))
        for equation in reversed(equations):
            inputs = [v.val if isinstance(v, Literal) else known[v] for v in equation.invars]
            known |= dict(zip(equation.outvars, _applied(equation, inputs), strict=True))
        return [v.val if isinstance(v, Literal) else known[v] for v in variables]


def _applied(equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """Returns the results of an equation; numpy fills and copies, for which JAX would compile."""
    name = equation.primitive.name
    if name == 'broadcast_in_dim' and np.ndim(inputs[0]) == 0:
        return [np.full(equation.params['shape'], inputs[0])]
    if name == 'copy':
        return [np.array(inputs[0])]
    apply: Callable[..., Any] = functools.partial(equation.primitive.bind, **equation.params)
    if name in ('jit', 'pjit'):  # jax.random's functions
        apply = jax.jit(apply, compiler_options=quick())
    results = apply(*inputs)
    return results if equation.primitive.multiple_results else [results]


def quick() -> dict[str, int] | None:
    """Returns compiler options for programs that run once, on a CPU.

    Optimising many random draws takes ten times as long as running them. The numbers of states
    depend on it: an optimised program rounds normal numbers otherwise.
    """
    device = jax.config.values['jax_default_device']
    return {'xla_backend_optimization_level': 0} if device == 'cpu' else None


def _draw(
    keys: Sequence[UInt32[Array, '2']],
    limits: Sequence[np.float32],
    shapes: Sequence[tuple[int, ...]],
) -> list[Float[np.ndarray, '...']]:
    """Returns kernels, which are parts of one array of blocks."""
    sizes = [math.prod(shape) for shape in shapes]
    blocks = [-(-size // BLOCK) for size in sizes]
    ends = np.cumsum(blocks)
    owners = np.repeat(np.arange(len(sizes)), blocks)
    first = np.arange(len(owners)) - np.repeat(ends - blocks, blocks)  # of the kernel's blocks
    passes = -(-len(owners) // BLOCKS)
    per_pass = -(-len(owners) // passes)
    spare = (0, passes * per_pass - len(owners))

    def by_pass(of_blocks: np.ndarray) -> np.ndarray:
        return np.pad(of_blocks, spare).reshape(passes, per_pass)

    starts = (first * BLOCK).astype(np.uint32)
    numbers = np.asarray(
        _drawn(
            np.stack([np.asarray(key) for key in keys])[by_pass(owners)],
            by_pass(starts),
            by_pass(np.array(limits)[owners]),
        )
    ).reshape(-1)
    return [
        numbers[(end - count) * BLOCK :][:size].reshape(shape).copy()
        for shape, size, count, end in zip(shapes, sizes, blocks, ends, strict=True)
    ]


@jax.jit
def _drawn(
    keys: UInt32[Array, 'passes per_pass 2'],
    starts: UInt32[Array, 'passes per_pass'],
    limits: Float[Array, 'passes per_pass'],
) -> Float[Array, 'passes per_pass numbers']:
    return jax.lax.map(jax.vmap(_block), (keys, starts, limits))


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
