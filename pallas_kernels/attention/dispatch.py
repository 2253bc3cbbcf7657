"""Chooses attention's kernels for this device and shape; gives Hopper's a rule for `jax.vmap`.

It takes the Mosaic GPU kernels on Hopper for the shapes that `hopper_plan.supports`, else the
Triton kernels, which support all shapes.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxunet.ops.transformations import batched
from pallas_kernels import jax_modules
from pallas_kernels.attention.tiles import Tiles, default_tiles
from pallas_kernels.types import Shaped

if jax_modules.missing(jax_modules.TRITON) is None:
    from pallas_kernels.attention import triton, triton_backward
if jax_modules.missing(jax_modules.MOSAIC) is None:
    from pallas_kernels.attention import hopper, hopper_plan

Kept = tuple[Array, Array, Array]  # qkv, and what `backward` needs of a forward pass


def choose(qkv: Shaped, num_heads: int, *, interpret: bool) -> Tiles | None:
    """Returns the tiles of the Triton kernels; None if the Hopper kernels run.

    Args:
      interpret: take the Triton kernels, which the caller interprets.

    Raises:
      UserError: this version of JAX lacks what the kernels need.
    """
    if jax_modules.on_hopper(
        'attention', lambda: hopper_plan.supports(qkv, num_heads), interpret=interpret
    ):
        return None
    return default_tiles(qkv.shape[1], qkv.shape[2] // (3 * num_heads), qkv.dtype)


def forward(
    qkv: Float[Array, 'batch tokens packed'],
    num_heads: int,
    tiles: Tiles | None,
    *,
    interpret: bool,
) -> Float[Array, 'batch tokens channels']:
    """Returns the heads' outputs.

    Args:
      tiles: from `choose`; below too.
    """
    if tiles is None:
        return batched(hopper.forward, num_heads=num_heads)(qkv)
    return triton.forward(qkv, num_heads, tiles.forward, interpret=interpret)[0]


def forward_for_training(
    qkv: Float[Array, 'batch tokens packed'],
    num_heads: int,
    tiles: Tiles | None,
    *,
    interpret: bool,
) -> tuple[Float[Array, 'batch tokens channels'], Kept]:
    """Returns the heads' outputs, and what `backward` needs."""
    if tiles is None:
        out, lse, kept = batched(hopper.forward_for_training, num_heads=num_heads)(qkv)
        return out, (qkv, kept, lse)
    exact = triton_backward.wants_exact(tiles.backward, qkv.shape[1], qkv.dtype)
    out, lse, kept = triton.forward(qkv, num_heads, tiles.forward, exact=exact, interpret=interpret)
    return out, (qkv, kept, lse)


def backward(
    kept: Kept,
    grad: Float[Array, 'batch tokens channels'],
    tiles: Tiles | None,
    *,
    interpret: bool,
) -> Float[Array, 'batch tokens packed']:
    """Returns the gradient of qkv, given the gradient of the output."""
    if tiles is None:
        return batched(hopper.backward)(*kept, grad)
    return triton_backward.backward(*kept, grad, tiles.backward, interpret=interpret)
