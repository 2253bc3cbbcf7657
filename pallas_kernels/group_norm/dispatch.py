"""Chooses GroupNorm's kernels for this device and shape; gives Hopper's a rule for `jax.vmap`.

It takes the Mosaic GPU kernels on Hopper for large 16-bit images that `hopper_plan.supports`, else
the Triton kernels, which support all shapes. If JAX lacks Triton, it takes the Mosaic GPU kernels
for all shapes that they support. Both sets have the same formats of operands and results, so every
function here chooses on its own, by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.transformations import batched
from pallas_kernels import jax_modules
from pallas_kernels.types import Shaped

if jax_modules.missing(jax_modules.TRITON) is None:
    from pallas_kernels.group_norm import backward, forward, statistics
if jax_modules.missing(jax_modules.MOSAIC) is None:
    from pallas_kernels.group_norm import hopper, hopper_plan

Image = Float[Array, 'batch height width _']
Vector = Float[Array, '#batch channels']  # one number per channel, for a sample or for all
Norm = tuple[Vector, Vector, Vector, Vector]  # scale, offset, mean, inverse deviation

# Smallest images, in pixels, for which the Hopper kernels are faster than Triton's. For smaller
# ones, Triton takes one launch each way, the Hopper kernels two. To refit, set this to 0 and
# compare the two rows of each shape of `python -m pallas_kernels.group_norm.tune --kernels
# both,both_triton`.
HOPPER_PIXELS = 1024


def on_hopper(
    parts: Sequence[Shaped], groups: int = 32, *, op: str = 'group_norm', interpret: bool = False
) -> bool:
    """Returns True for Hopper's kernels, False for the Triton kernels.

    Args:
      parts: of the image.
      groups: 32 for functions without groups.
      op: the name in errors.
      interpret: take the Triton kernels, which the caller interprets.

    Raises:
      UserError: this version of JAX lacks what the kernels need.
    """

    def problem() -> str | None:
        if jax_modules.missing(jax_modules.TRITON) is None:
            pixels = parts[0].shape[1] * parts[0].shape[2]
            if pixels < HOPPER_PIXELS:
                return f'x: expected {HOPPER_PIXELS} pixels or more, found {pixels}'
            if parts[0].dtype == jnp.float32:  # the Triton kernels' gradients are more accurate
                return 'x: expected bfloat16 or float16, found float32'
        return hopper_plan.supports(parts, groups)

    return jax_modules.on_hopper(op, problem, interpret=interpret)


def channel_sums(x: Image, *, interpret: bool) -> Float[Array, 'batch channels']:
    """Returns the sum over the pixels of each sample and channel, in at least float32.

    This is the gradient of a bias or of a shift per sample.
    """
    if on_hopper([x], op="conv3x3's gradient of shift", interpret=interpret):
        return batched(hopper.channel_sums)(x)
    return statistics.channel_sums(x, interpret=interpret)


def affine(
    parts: tuple[Image, ...],
    scale: Vector,
    offset: Vector,
    *,
    groups: int,
    eps: float,
    interpret: bool,
) -> tuple[Vector, Vector, Vector, Vector]:
    """Returns a, b, mean and inverse deviation of each sample and channel.

    norm(x) · scale + offset = a · x + b; mean and inverse deviation are the group's.

    Raises:
      ValueError: the channels are not a multiple of `groups`.
    """
    options: dict[str, Any] = {'groups': groups, 'eps': eps}
    if on_hopper(parts, groups, interpret=interpret):
        return batched(hopper.affine, **options)(parts, scale, offset)
    known = [statistics.moments(part, interpret=interpret) for part in parts]
    return statistics.affine(known, scale, offset, **options, interpret=interpret)


def normalise(
    parts: tuple[Image, ...],
    scale: Vector,
    offset: Vector,
    *,
    groups: int,
    eps: float,
    silu: bool,
    owns: bool = True,
    interpret: bool,
) -> tuple[Image, Vector, Vector]:
    """Returns act(norm(x) · scale + offset), and the group's mean and inverse deviation.

    Args:
      parts: x, joined along channels.
      owns: True if a program of the Triton kernels owns all pixels of its groups, False if several
        programs share them; below too.

    Raises:
      ValueError: the channels are not a multiple of `groups`.
    """
    options: dict[str, Any] = {'groups': groups, 'eps': eps, 'silu': silu}
    if on_hopper(parts, groups, interpret=interpret):
        return batched(hopper.normalise, **options)(parts, scale, offset)
    known = None if owns else tuple(statistics.moments(x, interpret=interpret) for x in parts)
    return forward.normalise(parts, known, scale, offset, **options, interpret=interpret)


def gradient_sums(
    parts: tuple[Image, ...],
    dy: Image,
    norm: Norm,
    *,
    silu: bool,
    activation: bool = False,
    interpret: bool,
) -> tuple[Float[Array, 'batch 2 channels'], Image | None]:
    """Returns s₁ and s₂ of `backward`'s formulas; with `activation` also act(z), in x's type."""
    options: dict[str, Any] = {'silu': silu, 'activation': activation}
    if on_hopper(parts, interpret=interpret):
        return batched(hopper.gradient_sums, **options)(parts, dy, *norm)
    return backward.gradient_sums(parts, dy, *norm, **options, interpret=interpret)


def gradient(
    parts: tuple[Image, ...],
    dy: Image,
    norm: Norm,
    *,
    groups: int,
    silu: bool,
    sums: Float[Array, 'batch 2 channels'] | None = None,
    owns: bool = True,
    interpret: bool,
) -> tuple[tuple[Image, ...], Float[Array, 'batch 2 channels']]:
    """Returns the gradient of every part, in x's type, and s₁ and s₂.

    Args:
      sums: s₁ and s₂; None computes them.

    Raises:
      ValueError: the channels are not a multiple of `groups`.
    """
    if on_hopper(parts, groups, interpret=interpret):
        found = sums
        if found is None:
            found, _ = gradient_sums(parts, dy, norm, silu=silu, interpret=interpret)
        dx = batched(hopper.gradient, groups=groups, silu=silu)(parts, dy, *norm, found)
        return dx, found
    options: dict[str, Any] = {'silu': silu, 'interpret': interpret}
    if sums is None and not owns:
        sums, _ = backward.gradient_sums(parts, dy, *norm, **options)
    return backward.gradient(parts, dy, *norm, groups=groups, sums=sums, **options)
