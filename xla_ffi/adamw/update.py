"""AdamW over all parameters in one launch, and the gradients' sum of squares in another.

Both handlers take a list of tensors (`tensors` of each kind), so that the several hundred
parameters of a UNet need one launch instead of one each. AdamW updates its operands in place if XLA
allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.adamw.operands import (
    AdamWResult,
    Constants,
    Copies,
    Tree,
    check_scalars,
    check_weight_copies,
    gradient_leaves,
    state_leaves,
)
from jaxunet.ops.adamw.packed import Packed
from xla_ffi.call import ffi_call
from xla_ffi.checks import check_arrays

CHUNK = 1 << 14  # elements that one block sums; the handler receives it as an attribute


def sum_of_squares(tree: Tree) -> Float[Array, '']:
    """Sums the squares of all elements of a tree of float32, bfloat16 and float16 arrays.

    The sum is float32. Each block sums one chunk and XLA sums the chunks, in the same order in
    every run.

    Raises:
      ValueError: an array of another type, no arrays, or more than `MAX_ARRAYS`.
    """
    leaves = gradient_leaves(tree)
    check_arrays('sum_of_squares', 'gradients', len(leaves))
    chunks = sum(-(-leaf.size // CHUNK) for leaf in leaves)
    shape = jax.ShapeDtypeStruct((chunks,), jnp.float32)
    call = ffi_call('jaxunet_sum_of_squares', shape)
    return jnp.sum(call(*leaves, chunk=np.int64(CHUNK), tensors=np.int64(len(leaves))))


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
    """Does one step of AdamW, of the averages and of the copies.

    See `jaxunet.ops.adamw.operands.AdamW`.

    Raises:
      ValueError: the trees differ in shapes, an array has another type, or there are more than
        `MAX_ARRAYS` weights.
    """
    check_scalars(
        averages=averages,
        follow=follow,
        corrections=corrections,
        take=take,
        factor=factor,
        learning_rate=learning_rate,
    )
    packed = isinstance(gradients, Packed)
    leaves = list(gradients.arrays) if packed else gradient_leaves(gradients)
    order = gradients.order if packed else range(len(leaves))
    tensors = len(order)
    check_arrays('adamw', 'params', tensors)
    if not packed and all(leaf.dtype == jnp.float32 for leaf in leaves):
        # Without this barrier, XLA's copy insertion takes minutes if hundreds of gradients have the
        # types of the weights that are updated in place (jax 0.11.2).
        leaves = jax.lax.optimization_barrier(leaves)
    trees = state_leaves(None if packed else leaves, params, mu, nu, averages)
    check_weight_copies(copies, trees[0])
    flat = [tree[number] for tree in trees for number in order]
    copied = {i: copies[number] for i, number in enumerate(order) if copies}
    flags: dict[str, Any] = {f'copied_{i}': copy is not None for i, copy in copied.items()}
    flat += [copy for copy in copied.values() if copy is not None]
    values = (take, factor, learning_rate, *corrections, *follow)
    scalars = jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
    first = 1 + len(leaves)  # operands: the scalars, gradients, then the arrays updated in place
    call = ffi_call(
        'jaxunet_adamw',
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat],
        input_output_aliases={first + i: i for i in range(len(flat))},
    )
    counts = {
        'averages': np.int64(len(averages)),
        'tensors': np.int64(tensors),
        'packed': np.int64(len(leaves) if packed else 0),
    }
    flags |= {'copies': bool(copies), **_attributes(constants)}
    new = call(scalars, *leaves, *flat, **counts, **flags)
    places = np.argsort(order)
    rest = iter(new[len(trees) * tensors :])
    written = {i: None if copy is None else next(rest) for i, copy in copied.items()}
    new_copies = tuple(written[int(at)] for at in places if copies)
    each = [
        jax.tree.unflatten(jax.tree.structure(tree), [new[i * tensors + at] for at in places])
        for i, tree in enumerate((params, mu, nu, *averages))
    ]
    return AdamWResult(each[0], each[1], each[2], tuple(each[3:]), new_copies)


def _attributes(constants: Constants) -> dict[str, np.float32]:
    """Returns the attributes of a call that follow from its rule."""
    return {
        'b1': np.float32(constants.b1),
        'b2': np.float32(constants.b2),
        'rest1': np.float32(1 - constants.b1),
        'rest2': np.float32(1 - constants.b2),
        'eps': np.float32(constants.eps),
        'decay': np.float32(constants.weight_decay),
    }
