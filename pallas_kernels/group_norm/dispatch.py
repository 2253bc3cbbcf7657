"""GroupNorm's kernels for this device; gives them a rule for `jax.vmap`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from jaxunet.ops.group_norm.operands import Affine, Norm, Statistics
from jaxunet.ops.transformations import batched
from pallas_kernels import jax_modules
from pallas_kernels.types import Shaped

if jax_modules.missing() is None:
    from pallas_kernels.group_norm import hopper, hopper_plan

Image = Float[Array, 'batch height width _']


def supports(op: str, parts: Sequence[Shaped], groups: int = 32) -> bool:
    """Returns True if the kernels take an image; otherwise the log says why not.

    Args:
      op: the name in the log.
      parts: of the image.
      groups: 32 for functions without groups.

    Raises:
      UserError: the kernels do not run here.
    """
    jax_modules.check_runs()
    return jax_modules.supports(op, hopper_plan.supports(parts, groups))


def channel_sums(x: Image) -> Float[Array, 'batch channels']:
    """Returns the sum over the pixels of each sample and channel, in float32.

    This is the gradient of a bias or of a shift per sample.
    """
    return batched(hopper.channel_sums)(x)


def affine(parts: tuple[Image, ...], norm: Norm) -> tuple[Affine, Statistics]:
    """Returns a and b of SiLU(a · x + b), and the statistics."""
    return batched(hopper.affine)(parts, norm)


def normalise(parts: tuple[Image, ...], norm: Norm, *, silu: bool) -> tuple[Image, Statistics]:
    """Returns act(norm(x) · scale + offset), and the statistics."""
    return batched(hopper.normalise, silu=silu)(parts, norm)


def gradient_sums(
    parts: tuple[Image, ...],
    dy: Image,
    norm: Norm,
    stats: Statistics,
    *,
    silu: bool,
    activation: bool = False,
) -> tuple[Float[Array, 'batch 2 channels'], Image | None]:
    """Returns s₁ and s₂ of `hopper`'s formulas; with `activation` also act(z), in x's type."""
    call = batched(hopper.gradient_sums, silu=silu, activation=activation)
    return call(parts, dy, norm, stats)


def gradient(
    parts: tuple[Image, ...],
    dy: Image,
    norm: Norm,
    stats: Statistics,
    sums: Float[Array, 'batch 2 channels'],
    *,
    silu: bool,
) -> tuple[Image, ...]:
    """Returns the gradient of every part, in x's type, from s₁ and s₂."""
    return batched(hopper.gradient, silu=silu)(parts, dy, norm, stats, sums)
