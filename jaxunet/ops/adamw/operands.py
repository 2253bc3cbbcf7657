"""The fused AdamW step: its operands, its result, and the checks that every backend makes.

Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2; as `optax.adamw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxunet.ops.adamw.packed import Packed

Tree: TypeAlias = PyTree  # a tree of arrays
GRADIENT_TYPES = ('float32', 'bfloat16', 'float16')
MAX_AVERAGES = 64  # that kernels take in one call; the reference takes any number


# 16-bit copies of the arrays of a tree, in their order; None = no copy of that one. () = no copies.
Copies: TypeAlias = Sequence[Array | None]


class Constants(NamedTuple):
    """The constants of AdamW."""

    b1: float
    b2: float
    eps: float
    weight_decay: float


class AdamWResult(NamedTuple):
    """The updated trees: float32 arrays, each shaped as its argument; and the updated copies."""

    params: Tree
    mu: Tree
    nu: Tree
    averages: tuple[Tree, ...]
    copies: Copies = ()


class AdamW(Protocol):
    """One step of AdamW, of the averages of the weights and of the copies.

    Changes nothing unless `take`.

    Args:
      gradients: a tree of float32 arrays, or of 16-bit ones when narrowed weights were trained; or
        `Packed`.
      params, mu, nu, averages: trees of float32 arrays of the same shapes, at most `MAX_AVERAGES`
        of averages. XLA may reuse their buffers for the results.
      take: a bool scalar; False changes nothing.
      factor: scales the gradients before anything else.
      corrections: the bias corrections 1 − b₁ᵗ and 1 − b₂ᵗ of mu and nu.
      follow: for each average e, the factor f of its step: e += f · (p − e), p the new parameters.
      copies: of the parameters, all of one type; they become the new parameters, rounded to nearest
        even. XLA may reuse their buffers.

    Raises:
      ValueError: the trees differ in shapes, or an array has another type.
    """

    def __call__(
        self,
        constants: Constants,
        gradients: Tree | Packed,
        params: Tree,
        mu: Tree,
        nu: Tree,
        averages: Sequence[Tree],
        *,
        take: Array,
        factor: Array,
        learning_rate: Array,
        corrections: tuple[Array, Array],
        follow: Sequence[Array],
        copies: Copies = (),
    ) -> AdamWResult: ...


def gradient_leaves(gradients: Tree) -> list[Array]:
    """Returns the arrays of a tree of gradients.

    Raises:
      ValueError: there are none, or one is not of `GRADIENT_TYPES`.
    """
    return _leaves('gradients', gradients, GRADIENT_TYPES)


def state_leaves(
    gradients: Sequence[Array] | None, params: Tree, mu: Tree, nu: Tree, averages: Sequence[Tree]
) -> list[list[Array]]:
    """Returns the arrays of params, mu, nu and of each average, one list per tree.

    Args:
      gradients: None if they are packed.

    Raises:
      ValueError: a tree has an array that is not float32, or other shapes than the gradients or,
        if these are packed, than the parameters.
    """
    trees = [('params', params), ('mu', mu), ('nu', nu), *(('averages', a) for a in averages)]
    leaves = [_leaves(name, tree, ('float32',)) for name, tree in trees]
    first, of_what = (leaves[0], 'parameters') if gradients is None else (gradients, 'gradients')
    shapes = [array.shape for array in first]
    for (name, _), arrays in zip(trees, leaves, strict=True):
        if [leaf.shape for leaf in arrays] != shapes:
            raise ValueError(f'adamw: {name}: shapes differ from those of the {of_what}')
    return leaves


def check_weight_copies(copies: Copies, params: Sequence[Array]) -> None:
    """Checks that the copies fit the arrays of the parameters.

    Raises:
      ValueError: there are fewer or more of them, or one has another shape, or they are not of one
        16-bit type.
    """
    if not copies:
        return
    if len(copies) != len(params):
        raise ValueError(f'adamw: copies: {len(copies)} for {len(params)} arrays; give one each')
    for i, (copy, p) in enumerate(zip(copies, params, strict=True)):
        if copy is not None and copy.shape != p.shape:
            raise ValueError(
                f'adamw: copies[{i}]: shape {list(copy.shape)}; expected {list(p.shape)}'
            )
    types = {str(copy.dtype) for copy in copies if copy is not None}
    if len(types) > 1 or not types <= set(GRADIENT_TYPES[1:]):
        listed = ', '.join(sorted(types))
        raise ValueError(f'adamw: copies: expected bfloat16 or float16, all alike, found {listed}')


def check_scalars(
    *,
    averages: Sequence[Tree] = (),
    follow: Sequence[Array] = (),
    corrections: Sequence[Array] = (),
    **scalars: Array,
) -> None:
    """Checks the numbers that all weights share.

    Raises:
      ValueError: the averages and `follow` differ in names, or a number is not a scalar.
    """
    if len(averages) != len(follow):
        raise ValueError(
            f'adamw: follow: {len(follow)} shares for {len(averages)} averages; give one each'
        )
    for name, values in {'corrections': corrections, 'follow': follow}.items():
        scalars |= {f'{name}[{i}]': value for i, value in enumerate(values)}
    for name, value in scalars.items():
        if jnp.shape(value):
            raise ValueError(f'adamw: {name}: shape {list(jnp.shape(value))}; expected a scalar')


def _leaves(name: str, tree: Tree, types: Sequence[str]) -> list[Array]:
    leaves: list[Array] = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError(f'adamw: {name}: no arrays')
    if other := [leaf.dtype for leaf in leaves if leaf.dtype not in types]:
        raise ValueError(f'adamw: {name}: expected {" or ".join(types)}, found {other[0]}')
    return leaves
