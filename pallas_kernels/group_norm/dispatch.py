"""GroupNorm's kernels for this device; gives them a rule for `jax.vmap`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from jaxunet.ops.transformations import batched
from pallas_kernels import jax_modules
from pallas_kernels.types import Shaped

if jax_modules.missing() is None:
    from pallas_kernels.group_norm import hopper, hopper_plan

Image = Float[Array, 'batch height width _']
Vector = Float[Array, '#batch channels']  # one number per channel, for a sample or for all
Norm = tuple[Vector, Vector, Vector, Vector]  # scale, offset, mean, inverse deviation


def takes(op: str, parts: Sequence[Shaped], groups: int = 32) -> bool:
    """Returns True if the kernels take an image; otherwise the log says why not.

    Args:
      op: the name in the log.
      parts: of the image.
      groups: 32 for functions without groups.

    Raises:
      UserError: the kernels do not run here.
    """
    jax_modules.check_runs()
    return jax_modules.takes(op, hopper_plan.supports(parts, groups))


def channel_sums(x: Image) -> Float[Array, 'batch channels']:
    """Returns the sum over the pixels of each sample and channel, in float32.

    This is the gradient of a bias or of a shift per sample.
    """
    return batched(hopper.channel_sums)(x)


def affine(
    parts: tuple[Image, ...], scale: Vector, offset: Vector, *, groups: int, eps: float
) -> tuple[Vector, Vector, Vector, Vector]:
    """Returns a, b, mean and inverse deviation; see `hopper.affine`."""
    return batched(hopper.affine, groups=groups, eps=eps)(parts, scale, offset)


def normalise(
    parts: tuple[Image, ...], scale: Vector, offset: Vector, *, groups: int, eps: float, silu: bool
) -> tuple[Image, Vector, Vector]:
    """Returns act(norm(x) · scale + offset), and the group's mean and inverse deviation."""
    return batched(hopper.normalise, groups=groups, eps=eps, silu=silu)(parts, scale, offset)


def gradient_sums(
    parts: tuple[Image, ...], dy: Image, norm: Norm, *, silu: bool, activation: bool = False
) -> tuple[Float[Array, 'batch 2 channels'], Image | None]:
    """Returns s₁ and s₂ of `hopper`'s formulas; with `activation` also act(z), in x's type."""
    return batched(hopper.gradient_sums, silu=silu, activation=activation)(parts, dy, *norm)


def gradient(
    parts: tuple[Image, ...],
    dy: Image,
    norm: Norm,
    sums: Float[Array, 'batch 2 channels'],
    *,
    groups: int,
    silu: bool,
) -> tuple[Image, ...]:
    """Returns the gradient of every part, in x's type, from s₁ and s₂."""
    return batched(hopper.gradient, groups=groups, silu=silu)(parts, dy, *norm, sums)
