"""AdamW over all parameters in one launch, in place, with the averages of the weights; and the gradients' norm in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.adamw.operands import Moved, Rule, Tree

CHUNK = 1 << 14  # elements that a block sums
GRADIENTS = ('float32', 'bfloat16', 'float16')


def sum_of_squares(tree: Tree) -> Float[Array, '']:
    """Of all elements of a tree of float32, bfloat16 and float16 arrays, in float32 and the same order in every run.

    Raises:
      ValueError: an array of another type, or none.
    """
    leaves = _leaves('gradients', tree, GRADIENTS)
    chunks = sum(-(-leaf.size // CHUNK) for leaf in leaves)
    shape = jax.ShapeDtypeStruct((chunks,), jnp.float32)
    call = jax.ffi.ffi_call('jaxunet_sum_of_squares', shape)
    return jnp.sum(call(*leaves, chunk=np.int64(CHUNK), tensors=np.int64(len(leaves))))


def adamw(
    rule: Rule,
    gradients: Tree,
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
) -> Moved:
    """One step of AdamW as `optax.adamw` takes it, and of averages of the weights after it; nothing changes unless `take`.

    Args:
      gradients: a tree of float32 arrays, or of bfloat16 or float16 ones where narrowed weights were trained.
      params, mu, nu, averages: trees of float32 arrays of the same shapes, updated in place where XLA may.
      take: whether to step, a scalar.
      factor: of the gradients, before anything else.
      corrections: of the bias of mu and nu, 1 − b₁ᵗ and 1 − b₂ᵗ.
      follow: for every average, how much of the way to the new parameters it goes.

    Raises:
      ValueError: trees that differ, or an array of another type.
    """
    kinds = [
        _leaves('params', params),
        _leaves('mu', mu),
        _leaves('nu', nu),
        *(_leaves('averages', tree) for tree in averages),
    ]
    leaves = _leaves('gradients', gradients, GRADIENTS)
    for name, found in zip(
        ('params', 'mu', 'nu', *['averages'] * len(averages)), kinds, strict=True
    ):
        if [leaf.shape for leaf in found] != [leaf.shape for leaf in leaves]:
            raise ValueError(f'adamw: {name}: shapes differ from those of the gradients')
    scalars = jnp.stack(
        [jnp.asarray(s, jnp.float32) for s in (take, factor, learning_rate, *corrections, *follow)]
    )
    flat = [leaf for kind in kinds for leaf in kind]
    first = 1 + len(leaves)
    call = jax.ffi.ffi_call(
        'jaxunet_adamw',
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat],
        input_output_aliases={first + i: i for i in range(len(flat))},
    )
    constants = {
        'b1': rule.b1,
        'b2': rule.b2,
        'rest1': 1 - rule.b1,
        'rest2': 1 - rule.b2,
        'eps': rule.eps,
        'decay': rule.weight_decay,
    }
    attributes: dict[str, Any] = {name: np.float32(value) for name, value in constants.items()}
    new = call(
        scalars,
        *leaves,
        *flat,
        averages=np.int64(len(averages)),
        tensors=np.int64(len(leaves)),
        **attributes,
    )
    each = [
        jax.tree.unflatten(jax.tree.structure(tree), new[i * len(leaves) : (i + 1) * len(leaves)])
        for i, tree in enumerate((params, mu, nu, *averages))
    ]
    return Moved(each[0], each[1], each[2], tuple(each[3:]))


def _leaves(name: str, tree: Tree, types: Sequence[str] = ('float32',)) -> list[Array]:
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError(f'adamw: {name}: no arrays')
    if other := [leaf.dtype for leaf in leaves if leaf.dtype not in types]:
        raise ValueError(f'adamw: {name}: expected {" or ".join(types)}, found {other[0]}')
    return leaves
