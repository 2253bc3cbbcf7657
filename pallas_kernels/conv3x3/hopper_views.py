"""Views of shared memory for which Pallas Mosaic GPU has no public function.

The one file that uses JAX's private modules. `tests/matrix` runs it on every version of JAX that
pyproject.toml admits.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.types import Ref

try:
    from jax._src.pallas.mosaic_gpu.core import UntilingTransform
    from jax._src.state.types import TransformedRef
except ImportError as error:
    raise ImportError(
        f'the Pallas kernels use private modules of JAX that {jax.__version__} does not have '
        f'({error}); install jax>=0.10.2,<=0.12.0.1, or use another backend'
    ) from error

if TYPE_CHECKING:
    from jax._src.pallas.mosaic_gpu.core import SomeLayout

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
