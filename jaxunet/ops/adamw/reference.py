"""AdamW, sums of squares and 16-bit copies of many arrays, in plain JAX.

The reference that kernels are tested against. With `backend=xla`, training runs optax's AdamW,
which computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxunet.ops.activation import at_least_float32
from jaxunet.ops.adamw.operands import (
    AdamWResult,
    Constants,
    Copies,
    Tree,
    check_scalars,
    check_weight_copies,
)
from jaxunet.ops.adamw.packed import Packed, unpack


def sum_of_squares(tree: Tree) -> Float[Array, '']:
    """Returns the sum of the squares of all elements, in at least float32.

    Raises:
      ValueError: the tree has no arrays.
    """
    leaves = [leaf.astype(at_least_float32(leaf.dtype)) for leaf in jax.tree.leaves(tree)]
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in leaves]))


def adamw(
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
) -> AdamWResult:
    """One step of AdamW, of the averages and of the copies; see `jaxunet.ops.adamw.operands.AdamW`.

    Computes in the type of the parameters, which is that of all numbers but the gradients.

    Raises:
      ValueError: the trees differ, or a number is not a scalar.
    """
    check_scalars(
        averages=averages,
        follow=follow,
        corrections=corrections,
        take=take,
        factor=factor,
        learning_rate=learning_rate,
    )

    if isinstance(gradients, Packed):
        gradients = unpack(gradients, params)

    def taken(new: Array, old: Array) -> Array:
        return jnp.where(take, new, old)

    scaled = jax.tree.map(lambda g, p: g.astype(p.dtype) * factor, gradients, params)
    new_mu = jax.tree.map(lambda m, g: constants.b1 * m + (1 - constants.b1) * g, mu, scaled)
    new_nu = jax.tree.map(
        lambda v, g: constants.b2 * v + (1 - constants.b2) * jnp.square(g), nu, scaled
    )

    def stepped(p: Array, m: Array, v: Array) -> Array:
        direction = m / corrections[0] / (jnp.sqrt(v / corrections[1]) + constants.eps)
        return p - learning_rate * (direction + constants.weight_decay * p)

    new_params = jax.tree.map(stepped, params, new_mu, new_nu)
    new_averages = tuple(
        jax.tree.map(lambda e, p, f=f: taken(e + f * (p - e), e), average, new_params)
        for average, f in zip(averages, follow, strict=True)
    )
    leaves = jax.tree.leaves(new_params)
    check_weight_copies(copies, leaves)
    new_copies = tuple(
        None if copy is None else taken(p.astype(copy.dtype), copy)
        for copy, p in zip(copies, leaves[: len(copies)], strict=True)
    )
    return AdamWResult(
        jax.tree.map(taken, new_params, params),
        jax.tree.map(taken, new_mu, mu),
        jax.tree.map(taken, new_nu, nu),
        new_averages,
        new_copies,
    )


def narrow(arrays: Sequence[Array], dtype: DTypeLike) -> tuple[Array, ...]:
    """Returns the arrays in another type, rounded to nearest even."""
    return tuple(array.astype(dtype) for array in arrays)
