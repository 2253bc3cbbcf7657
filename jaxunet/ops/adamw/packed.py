"""The gradients of many weights in a few flat arrays, each of which takes one all-reduce.

XLA combines single gradients for an all-reduce, too, but copies each into the combined array and
out of it again, in a launch of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

ALIGNMENT = 32  # elements at whose multiples a gradient begins; xla_ffi/adamw/plan.h has it too
# Bytes from which an array is full, if gradients are computed one by one. Larger transfers use the
# links between GPUs better, but a transfer begins only when all of its gradients are computed.
FULL = 16 * 2**20

Groups = tuple[tuple[int, ...], ...]
Join = Callable[[Sequence[Array], DTypeLike], Array]  # `joined`, or a kernel that does the same


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """The leaves of a tree of gradients, one after the other, with zeros between them.

    Attributes:
      arrays: float32 or bfloat16, of one dimension each.
      groups: the numbers of the leaves that each array holds, in its order.
    """

    arrays: tuple[Array, ...]
    groups: Groups = dataclasses.field(metadata={'static': True})

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of all leaves, in the order of the arrays."""
        return tuple(number for group in self.groups for number in group)


def room(size: int) -> int:
    """Returns the elements that a gradient of `size` elements takes in its array."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def joined(arrays: Sequence[Array], dtype: DTypeLike = jnp.float32) -> Float[Array, ' elements']:
    """Returns arrays one after the other as float32 or bfloat16; zeros follow each (`room`)."""
    return jnp.concatenate([_padded(array.astype(dtype)) for array in arrays])


def pack(
    tree: PyTree[Array],
    late: Sequence[bool],
    join: Join = joined,
    full: int | None = FULL,
    dtype: DTypeLike = jnp.float32,
) -> Packed:
    """Returns the gradients, packed in the order of the tree's leaves.

    Args:
      late: True for leaves that the backward pass computes last. They have an array of their own,
        so that the others are not kept waiting.
      full: the bytes from which an array gets no further leaf; None = no limit.
      dtype: of the arrays, float32 or bfloat16.
    """
    leaves = jax.tree.leaves(tree)
    groups = _groups([leaf.size for leaf in leaves], late, full, jnp.dtype(dtype).itemsize)
    arrays = tuple(join([leaves[number] for number in group], dtype) for group in groups)
    return Packed(arrays, groups)


def unpack(packed: Packed, like: PyTree[Array]) -> PyTree[Array]:
    """Returns the gradients as a tree of the structure and shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    gradients = list(leaves)
    for array, group in zip(packed.arrays, packed.groups, strict=True):
        at = 0
        for number in group:
            leaf = leaves[number]
            gradients[number] = array[at : at + leaf.size].reshape(leaf.shape)
            at += room(leaf.size)
    return jax.tree.unflatten(structure, gradients)


def _groups(sizes: Sequence[int], late: Sequence[bool], full: int | None, itemsize: int) -> Groups:
    groups: list[list[int]] = [[]]
    bytes_ = 0
    for number, size in enumerate(sizes):
        if late[number]:
            continue
        if full is not None and bytes_ >= full:
            groups.append([])
            bytes_ = 0
        groups[-1].append(number)
        bytes_ += itemsize * room(size)
    groups.append([number for number, flag in enumerate(late) if flag])
    return tuple(tuple(group) for group in groups if group)


def _padded(x: Array) -> Array:
    return jnp.pad(x.reshape(-1), (0, room(x.size) - x.size))
