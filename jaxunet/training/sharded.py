"""Each device keeps and updates its share of the training state: `parallel.shard_optimizer`.

ZeRO, stages 1 and 2 of the optimizer state (Rajbhandari et al. 2020, arXiv 1910.02054), with the
float32 weights and their averages divided as well. Every array of the weights, averages and
optimizer state is flattened, padded with zeros to a multiple of the number of devices, and cut into
one part per device (`Sharded`). A step gathers the weights in the type that the network computes
with, sums the gradients so that each device gets those of its parts alone, and updates these:
AdamW and the averages are elementwise, and zeros of the padding remain zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jaxunet.checkpoint.state import TrainState
from jaxunet.model.unet import Params
from jaxunet.ops.adamw.operands import Copies

Tree = TypeVar('Tree')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded:
    """An array of which each device has a part.

    Attributes:
      part: in a step, this device's elements, of one dimension. Outside, those of all devices: with
        `parallel.mode=jit` of one dimension, with pmap an axis of devices in front.
      shape: of the whole array.
    """

    part: Any  # an array, or what a tree may hold in place of one, such as its shape
    shape: tuple[int, ...] = dataclasses.field(metadata={'static': True})

    def whole(self) -> np.ndarray:
        """Returns the whole array, if `part` has the elements of all devices on the host."""
        size = int(np.prod(self.shape))
        return np.asarray(self.part).reshape(-1)[:size].reshape(self.shape)


def is_sharded(x: object) -> bool:
    """Returns True if x is an array of which each device has a part."""
    return isinstance(x, Sharded)


def any_sharded(tree: PyTree) -> bool:
    """Returns True if an array of the tree is sharded."""
    return any(map(is_sharded, jax.tree.leaves(tree, is_leaf=is_sharded)))


def marked(state: TrainState) -> TrainState:
    """Returns the state with a `Sharded` for each array that is to be divided, still whole.

    Args:
      state: arrays, or their shapes and types.
    """

    def mark(x: Array | jax.ShapeDtypeStruct) -> object:
        return Sharded(x, x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else x  # not counters

    divided = {name: getattr(state, name) for name in ('params', 'ema', 'opt_state', 'teacher')}
    return dataclasses.replace(state, **jax.tree.map(mark, divided))


def part_size(shape: tuple[int, ...], devices: int) -> int:
    """Returns the elements that each device has of an array of this shape."""
    return -(-int(np.prod(shape)) // devices)


def as_parts(x: np.ndarray, devices: int) -> np.ndarray:
    """Returns the parts of a whole array, one row per device."""
    size = part_size(x.shape, devices)
    return np.pad(x.reshape(-1), (0, devices * size - x.size)).reshape(devices, size)


# Inside a step, on every device:


def parts_of(tree: Tree) -> Tree:
    """Returns the tree with this device's parts in place of the sharded arrays."""
    return jax.tree.map(lambda x: x.part if is_sharded(x) else x, tree, is_leaf=is_sharded)


def gathered(params: Params, copies: Copies, axis_name: str) -> Params:
    """Returns the whole weights.

    Args:
      params: sharded.
      copies: 16-bit copies of the parts, which are gathered in their place; () = none.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=is_sharded)

    def whole(leaf: Sharded, copy: Array | None) -> Array:
        part = leaf.part if copy is None else copy
        elements = jax.lax.all_gather(part, axis_name, tiled=True)
        return elements[: int(np.prod(leaf.shape))].reshape(leaf.shape)

    with jax.named_scope('all_reduce'):
        arrays = map(whole, leaves, copies or [None] * len(leaves))
        return jax.tree.unflatten(structure, arrays)


def scattered(grads: Params, params: Params, axis_name: str, dtype: DTypeLike) -> Params:
    """Returns this device's parts of the sum of gradients over the devices, in `dtype`.

    Args:
      grads: whole.
      params: the sharded weights that they belong to.
    """
    devices = jax.lax.axis_size(axis_name)

    def one(leaf: Sharded, grad: Array) -> Sharded:
        flat = grad.astype(dtype).reshape(-1)
        flat = jnp.pad(flat, (0, devices * leaf.part.size - flat.size))
        return Sharded(jax.lax.psum_scatter(flat, axis_name, tiled=True), leaf.shape)

    with jax.named_scope('all_reduce'):
        return jax.tree.map(one, params, grads, is_leaf=is_sharded)


def whole_norm(norm: Float[Array, ''], grads: PyTree, axis_name: str | None) -> Float[Array, '']:
    """Returns the norm of the whole gradients from that of this device's parts.

    Gradients that are not sharded are whole already.
    """
    if not any_sharded(grads):
        return norm
    with jax.named_scope('all_reduce'):
        return jnp.sqrt(jax.lax.psum(jnp.square(norm), axis_name))
