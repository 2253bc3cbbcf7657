"""Rules for kernels under `jax.vmap` and `jax.shard_map`, which cannot see inside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

Tree = TypeVar('Tree')
Batched = Callable[[PyTree[Array], PyTree[Array]], PyTree[Array]]  # (images, weights) -> results


@functools.cache  # so that equal calls are the same function to JAX
def batched(function: Callable[..., PyTree[Array]], **options: Any) -> Callable[..., PyTree[Array]]:
    """Returns a function of images with the rule of `joins_batch`, for ops without weights.

    It calls function(*images, **options).
    """
    joined = joins_batch(lambda images, _: function(*images, **options))
    return lambda *images: joined(images, ())


def joins_batch(function: Batched) -> Batched:
    """Returns a function of (images, weights) with a rule for `jax.vmap`.

    The mapped axis becomes part of the batch, so there is one launch. With mapped weights, the
    calls run one after the other.

    Args:
      function: takes two trees of arrays and returns a third. The first axis of images and results
        is the batch; an image may have size 1 there, for all samples. Weights have no batch.
    """
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def rule(
        size: int, mapped: PyTree[bool], images: PyTree[Array], weights: PyTree[Array]
    ) -> tuple[PyTree[Array], PyTree[bool]]:
        flags = jax.tree.leaves(mapped)
        leaves, structure = jax.tree.flatten((images, weights))
        of_images, of_weights = mapped
        if any(jax.tree.leaves(of_weights)):

            def one(slices: list[Array]) -> PyTree[Array]:
                rest = iter(slices)
                chosen = [next(rest) if f else x for x, f in zip(leaves, flags, strict=True)]
                return call(*jax.tree.unflatten(structure, chosen))

            results = jax.lax.map(one, [x for x, f in zip(leaves, flags, strict=True) if f])
            return results, jax.tree.map(lambda _: True, results)
        batch = max(
            x.shape[int(f)]
            for x, f in zip(jax.tree.leaves(images), jax.tree.leaves(of_images), strict=True)
        )

        def merge(x: Array, is_mapped: bool) -> Array:
            whole = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            whole = jnp.broadcast_to(whole, (size, batch, *whole.shape[2:]))
            return whole.reshape(size * batch, *whole.shape[2:])

        results = call(jax.tree.map(merge, images, of_images), weights)
        split = jax.tree.map(lambda y: y.reshape(size, batch, *y.shape[1:]), results)
        return split, jax.tree.map(lambda _: True, split)

    return call


def varying_axes(tree: PyTree[Array]) -> frozenset[str]:
    """Returns the mesh axes over which arrays vary inside a `jax.shard_map` that checks it."""
    types = (jax.typeof(leaf) for leaf in jax.tree.leaves(tree))
    return frozenset().union(*(t.manual_axis_type.varying for t in types))


def vary(tree: Tree, axes: frozenset[str]) -> Tree:
    """Returns a tree whose arrays all vary over the mesh axes; the transpose sums over them."""

    def cast(leaf: Array) -> Array:
        missing = axes - varying_axes(leaf)
        return jax.lax.pcast(leaf, tuple(sorted(missing)), to='varying') if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree


def is_checked() -> bool:
    """Returns True if a surrounding `jax.shard_map` has `check_vma=True`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return False
    # An axis index varies over its own axis; only with check_vma=True does its type say so.
    index = jax.eval_shape(lambda: jax.lax.axis_index(axes[0]))
    return bool(index.manual_axis_type and index.manual_axis_type.varying)
