"""Loads, stores and a view of shared memory for the Mosaic GPU kernels of all ops.

They hide the differences between versions of JAX, and provide a view for which Pallas has no public
function. `tools/matrix` runs them on every version of JAX that pyproject.toml allows.
"""

from __future__ import annotations

import inspect

from jaxtyping import Array

from pallas_kernels.jax_modules import TransformedRef, UntilingTransform
from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from pallas_kernels.types import Layout, Ref

_INDEX = inspect.signature(plgpu.load).parameters.get('idx')
LOAD_INDEX = ((),) if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else ()


def matrix(ref: Ref) -> Ref:
    """Returns swizzled rows (r, 1, 8, c) as the matrix (8r, c) that wgmma and stores expect.

    The public views of a matrix must start at a whole 8-row tile. Here the rows of one tile may
    start anywhere, with any stride between tiles, so nine taps can read one haloed strip: a start
    and a stride are all that wgmma's descriptor needs.
    """
    return TransformedRef(ref.ref, (*ref.transforms, UntilingTransform((8, ref.shape[-1]))))


def load(ref: Ref, layout: Layout) -> Array:
    """Loads a reference into registers, laid out as `layout`.

    JAX 0.10 requires a separate index argument; 0.11 deprecates it, and 0.12 removes it.
    """
    return plgpu.load(ref, *LOAD_INDEX, layout=layout, optimized=False)


def store(ref: Ref, value: Array) -> None:
    """Stores registers to a reference.

    From JAX 0.12 on, an assignment requires a layout that writes whole cache lines; earlier
    versions have only the assignment.
    """
    if hasattr(plgpu, 'store'):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
