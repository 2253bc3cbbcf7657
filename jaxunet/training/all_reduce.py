"""Sums the gradients of a step over devices while the backward pass still computes others.

If kernels update the weights, the gradients are packed into a few arrays
(`jaxunet.ops.adamw.packed`), and each array is summed when all of its gradients are computed.
Otherwise `psum` is one operation per gradient. On several GPUs the options `OVERLAP` let XLA run
these operations beside the backward pass, and combine small ones. A backend that merges the calls
of many layers (`Backend.transform_gradients`) leaves out the first level of the network, so that
the other gradients are summed while it computes those.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxunet.model.encoder import LABEL_EMBEDDING, TIME_EMBEDDING
from jaxunet.model.unet import Params
from jaxunet.ops.adamw.packed import FULL, Join, Packed, pack

# Compiler options of XLA for several GPUs.
OVERLAP: dict[str, str | bool] = {
    # Schedules computations to run while transfers are in flight.
    'xla_gpu_enable_latency_hiding_scheduler': True,
    # Bytes up to which gradients are combined. Larger transfers use the links better, but the last
    # one can only start when all of its gradients are computed.
    'xla_gpu_all_reduce_combine_threshold_bytes': str(16 * 2**20),
}


def summed(
    grads: Params, axis_name: str, join: Join | None, dtype: DTypeLike, *, simultaneous: bool
) -> Params | Packed:
    """Returns the sum of gradients over the devices; if there are several, in `dtype`.

    Several devices pack the gradients by `join`, unless it is None. Each gradient is cast, or each
    array packed, on its own, so that the first can be summed while others are still computed.
    If most gradients are `simultaneous` (`Gradients`), they are packed in one array, and summed
    while those at the network's input are computed.
    """
    single = jax.lax.axis_size(axis_name) == 1
    if single or join is None:
        grads = grads if single else cast(grads, dtype)
        with jax.named_scope('all_reduce'):
            return jax.lax.psum(grads, axis_name)
    with jax.named_scope('backward'):
        full = None if simultaneous else FULL
        packed = pack(grads, computed_last(grads), join, full, dtype)
    with jax.named_scope('all_reduce'):
        if not simultaneous:
            return jax.lax.psum(packed, axis_name)
        return _summed_in_order(packed, axis_name)


def _summed_in_order(packed: Packed, axis_name: str) -> Packed:
    """Returns the sum of packed gradients, array by array.

    Without the order, XLA begins with the array that is ready last, and computes nothing while it
    sums the others.
    """
    sums: list[Array] = []
    for array in packed.arrays:
        ready = array
        if sums:
            ready, sums[-1] = jax.lax.optimization_barrier((array, sums[-1]))
        sums.append(jax.lax.psum(ready, axis_name))
    return dataclasses.replace(packed, arrays=tuple(sums))


def cast(grads: Params, dtype: DTypeLike) -> Params:
    """Casts gradients to a type."""
    with jax.named_scope('backward'):
        return jax.tree.map(lambda g: g.astype(dtype), grads)


def computed_last(gradients: Params) -> list[bool]:
    """Returns True for leaves whose gradients the backward pass computes at its end.

    These are the embeddings of time and class, their projections, the biases of the first
    convolutions of residual blocks, which `project` adds, and the first layers of the network, up
    to those of its first level.
    """
    names = [[key.key for key in path] for path, _ in jax.tree.leaves_with_path(gradients)]
    return [
        name[0].startswith(('conv_in', 'down_0_', TIME_EMBEDDING, LABEL_EMBEDDING))
        or 'embed' in name
        or name[-2:] == ['conv_1', 'bias']
        for name in names
    ]
