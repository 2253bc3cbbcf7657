"""Views of shared memory for which Pallas Mosaic GPU has no public function, loads and stores.

The one file that uses JAX's private classes. `tests/matrix` runs it on every version of JAX that
pyproject.toml admits.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from jaxtyping import Array

from pallas_kernels.jax_modules import TransformedRef, UntilingTransform
from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.jax_modules import SomeLayout

_INDEX = inspect.signature(plgpu.load).parameters.get('idx')
LOAD_INDEX = ((),) if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else ()


def matrix(ref: Ref) -> Ref:
    """Returns swizzled rows (r, 1, 8, c) as the matrix (8r, c) that wgmma and stores expect.

    The public views of a matrix must start at a whole 8-row tile. Here the rows of one tile may
    start anywhere, with any stride between tiles, so nine taps can read one haloed strip: wgmma's
    descriptor holds exactly a start and a stride.
    """
    return TransformedRef(ref.ref, (*ref.transforms, UntilingTransform((8, ref.shape[-1]))))


def load(ref: Ref, layout: SomeLayout) -> Array:
    """Loads a reference into registers.

    JAX 0.10 requires an index apart from the reference; 0.11 deprecates it, and 0.12 has none.
    """
    return plgpu.load(ref, *LOAD_INDEX, layout=layout, optimized=False)


def store(ref: Ref, value: Array) -> None:
    """Stores registers to a reference.

    From JAX 0.12 on an assignment wants a pattern of whole cache lines; before, there is no other.
    """
    if hasattr(plgpu, 'store'):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
