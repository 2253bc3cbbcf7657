"""Attention's kernels for this device; gives them a rule for `jax.vmap`."""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxunet.ops.transformations import batched
from pallas_kernels import jax_modules
from pallas_kernels.types import Shaped

if jax_modules.missing() is None:
    from pallas_kernels.attention import hopper, hopper_plan

Kept = tuple[Array, Array, Array]  # qkv, and what `backward` needs of a forward pass


def supports(qkv: Shaped, num_heads: int) -> bool:
    """Returns True if the kernels take qkv; otherwise the log says why not.

    Raises:
      UserError: the kernels do not run here.
    """
    jax_modules.check_runs()
    return jax_modules.supports('attention', hopper_plan.supports(qkv, num_heads))


def forward(
    qkv: Float[Array, 'batch tokens packed'], num_heads: int
) -> Float[Array, 'batch tokens channels']:
    """Returns the heads' outputs."""
    return batched(hopper.forward, num_heads=num_heads)(qkv)


def forward_for_training(
    qkv: Float[Array, 'batch tokens packed'], num_heads: int
) -> tuple[Float[Array, 'batch tokens channels'], Kept]:
    """Returns the heads' outputs, and what `backward` needs."""
    out, lse, exact = batched(hopper.forward_for_training, num_heads=num_heads)(qkv)
    return out, (qkv, exact, lse)


def backward(
    kept: Kept, grad: Float[Array, 'batch tokens channels']
) -> Float[Array, 'batch tokens packed']:
    """Returns the gradient of qkv, given the gradient of the output."""
    return batched(hopper.backward)(*kept, grad)
