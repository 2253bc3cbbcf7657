"""Power-function averages of the weights, and how to compute one from others.

The average with exponent γ after t updates gives the weights θ(τ) after update τ a factor τ^γ:
    θ̂(t) = (γ+1)/t^(γ+1) ∫₀ᵗ τ^γ θ(τ) dτ.
A run updates it by θ̂(t) = β θ̂(t−1) + (1−β) θ(t) with β = (1 − 1/t)^(γ+1). Its width (sigma_rel)
is the standard deviation of τ under this weighting, as a fraction of t:
    width² = (γ+1) / ((γ+2)² (γ+3)).
Source: Karras et al. 2023, arXiv 2312.02696, section 3 and appendix C.

An average of another width or time is approximated by Σ xᵢ θ̂ᵢ over the stored averages. The paper
chooses x to minimise the squared difference of the weight functions. Here x minimises the expected
error for weights that move as a random walk, plus the rounding of stored averages, subject to
Σ xᵢ = 1, so that constant weights are exact. Both choices solve a linear system of inner products;
the choice here also predicts the relative error of the result. Let
    T(u) = ∫ᵤᵗ (γ+1) τ^γ / t^(γ+1) dτ = 1 − (u/t)^(γ+1)
be the part of the weight function after time u. A step of the walk at u moves the average by T(u)
times the step, so the inner product of two averages is ∫ T₁(u) T₂(u) du.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxunet.config.relations import MAX_WIDTH

# Relative rounding errors (root mean square) of values stored in these types.
ROUNDING = {'float16': 2.1e-4, 'float32': 6e-8}
TOLERANCE = 1e-3  # largest predicted error of an average that may be used

Vector = Float[np.ndarray, ' n']


class Profiles(NamedTuple):
    """The weight functions of averages.

    Attributes:
      times: number of updates t of each average, more than 0.
      exponents: exponent γ of each average.
    """

    times: Vector
    exponents: Vector


class Combination(NamedTuple):
    """A sum of averages that approximates another one.

    Attributes:
      coefficients: x, which sum to 1.
      error: predicted root mean square error, relative to the average itself.
    """

    coefficients: Vector
    error: float


def exponent(width: float) -> float:
    """Returns the exponent γ of the average with this width, 0 < width <= `MAX_WIDTH`."""
    if not 0 < width <= MAX_WIDTH * (1 + 1e-12):
        raise ValueError(f'width: expected more than 0, up to {MAX_WIDTH:.4f}, found {width}')
    inverse = width**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return max(float(roots.real.max()), 0.0)


def inner_products(a: Profiles, b: Profiles) -> Float[np.ndarray, 'n m']:
    """Returns ∫ T₁(u) T₂(u) du in float64, for each of `a` with each of `b`."""
    t1, p1 = a.times[:, None], a.exponents[:, None] + 1
    t2, p2 = b.times[None], b.exponents[None] + 1
    end = np.minimum(t1, t2)
    r1, r2 = (end / t1) ** p1, (end / t2) ** p2
    return end * (1 - r1 / (p1 + 1) - r2 / (p2 + 1) + r1 * r2 / (p1 + p2 + 1))


def combine(
    kept: Profiles, rounding: Vector, time: float, widths: Sequence[float]
) -> list[Combination]:
    """Returns the combination of the kept averages that is nearest to each of these widths.

    Args:
      kept: the stored averages, none later than `time`.
      rounding: relative rounding error of each stored average.
      time: number of updates t of the wanted averages.
      widths: their widths.
    """
    exponents = np.array([exponent(width) for width in widths])
    wanted = Profiles(np.full(len(exponents), time), exponents)
    norms = np.diag(inner_products(wanted, wanted)) / time
    gram = inner_products(kept, kept) / time + np.diag(rounding**2)
    mixed = inner_products(kept, wanted) / time
    # A Lagrange multiplier for Σ x = 1. The system is scaled by the size of its averages.
    count = len(gram)
    system = np.ones((count + 1, count + 1))
    system[:count, :count], system[count, count] = gram, 0.0
    scale = np.append(1 / np.sqrt(np.diag(gram)), 1.0)[:, None]
    right = np.concatenate([mixed, np.ones((1, len(exponents)))])
    x = (np.linalg.solve(system * scale * scale.T, right * scale) * scale)[:count]
    squared = norms + ((gram @ x - 2 * mixed) * x).sum(axis=0)
    errors = np.sqrt(np.maximum(squared, 0) / norms)
    return [Combination(x[:, i], float(error)) for i, error in enumerate(errors)]


def allowed_widths(kept: Profiles, rounding: Vector, time: float) -> list[tuple[float, float]]:
    """Returns the ranges of widths whose predicted error is at most `TOLERANCE`, to 0.001."""
    grid = (np.arange(5, int(MAX_WIDTH * 1000) + 1) / 1000).tolist()
    good = [combination.error <= TOLERANCE for combination in combine(kept, rounding, time, grid)]
    edges = np.flatnonzero(np.diff([0, *map(int, good), 0]))
    return [
        (grid[first], grid[end - 1]) for first, end in zip(edges[::2], edges[1::2], strict=True)
    ]
