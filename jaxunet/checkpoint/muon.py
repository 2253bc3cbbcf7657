"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): orthogonal steps for matrices.

optax's Muon runs separate matrix products for each weight: thousands of small kernels in a step of
a UNet, and XLA compiles each for long. Here, weights of similar shapes are transposed and padded to
one shape, stacked, and share their products. The state is that of optax.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jaxunet.config import Config
from jaxunet.model.unet import Params

BLOCKS = ('down_', 'middle_', 'up_')  # first names of the weights of residual and attention blocks
MUON, ADAM = 'muon', 'adam'  # the optimizers of the parts
BETA = 0.95  # decay of the momentum
ITERATIONS = 5
PADDING = 0.08  # work that padding may add to the products, as a share of them
STEP_RMS = 0.2  # root mean square of a step, in learning rates; about that of AdamW


def muon(
    matrices: optax.GradientTransformation, others: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns the optimizer of all weights, for training a UNet (Schaipp 2025, arXiv 2510.19376).

    Args:
      matrices: optimizer of the matrices and convolutions of the blocks: `matrix_steps`.
      others: optimizer of all other weights (first and last layers, embeddings of time and labels,
        norms, biases): AdamW.
    """
    return optax.partition({MUON: matrices, ADAM: others}, _labels)


def matrix_steps(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns Muon for matrices and convolutions.

    A step of a matrix is its momentum with all singular values moved close to 1. Its size is scaled
    to that of AdamW, so that both take the same learning rate and decay (Liu et al. 2025, arXiv
    2502.16982, section 2.2). A convolution counts as a matrix with a row for each tap and input
    channel, and a column for each output channel. Matrix products are in bfloat16, unless the
    config's precision is float32.
    """
    return optax.chain(
        orthogonal_momentum(jnp.float32 if config.precision == 'float32' else jnp.bfloat16),
        optax.stateless_with_tree_map(
            lambda update, _: update * (STEP_RMS * math.sqrt(max(_matrix_shape(update))))
        ),
        optax.add_decayed_weights(config.optimizer.weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def part(label: str, tree: Params) -> Params:
    """Returns the tree with only the weights of the optimizer `label`, as `muon` passes it on."""
    return jax.tree.map(
        lambda leaf, of_leaf: leaf if of_leaf == label else optax.MaskedNode(), tree, _labels(tree)
    )


def join(one: Params, other: Params) -> Params:
    """Returns the tree whose parts are `one` and `other`."""

    def is_masked(node: object) -> bool:
        return isinstance(node, optax.MaskedNode)

    return jax.tree.map(lambda a, b: b if is_masked(a) else a, one, other, is_leaf=is_masked)


def orthogonal_momentum(dtype: DTypeLike) -> optax.GradientTransformation:
    """Returns the transformation of gradients into orthogonal matrices near their momentum.

    Like `optax.contrib.scale_by_muon`, with the same state. The momentum is Nesterov's, with its
    bias corrected.

    Args:
      dtype: type of the matrix products.
    """

    def update(
        grads: Params, state: optax.contrib.MuonState, params: Params | None = None
    ) -> tuple[Params, optax.contrib.MuonState]:
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: BETA * m + (1 - BETA) * g, state.mu, grads)
        ahead = BETA / (1 - BETA ** (count.astype(jnp.float32) + 1))
        now = (1 - BETA) / (1 - BETA ** count.astype(jnp.float32))
        leaves, structure = jax.tree.flatten(
            jax.tree.map(lambda m, g: ahead * m + now * g, mu, grads)
        )
        for shape, numbers in stacks([_matrix_shape(leaf) for leaf in leaves]).items():
            stacked = jnp.stack([_tall(leaves[i].astype(dtype), shape) for i in numbers])
            for i, matrix in zip(numbers, orthogonal(stacked, state.ns_coeffs), strict=True):
                leaves[i] = _as_before(matrix, leaves[i])
        return jax.tree.unflatten(structure, leaves), state._replace(count=count, mu=mu)

    return optax.GradientTransformation(optax.contrib.scale_by_muon().init, update)


def stacks(shapes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """Returns the numbers of the matrices of each stack, by the shape of its padded matrices.

    Matrices of one shape, or of its transpose, are in one stack. The two stacks whose padding to
    one shape adds the least work are joined, again and again, until all padding would add more than
    `PADDING` to the work without any.

    Args:
      shapes: rows and columns of each matrix. Those of a stack have rows ≥ columns.
    """
    found = collections.defaultdict(list)
    for number, shape in enumerate(shapes):
        found[max(shape), min(shape)].append(number)
    left = PADDING * sum(len(numbers) * _work(shape) for shape, numbers in found.items())
    while len(found) > 1:
        joins = []
        for one, other in itertools.combinations(sorted(found), 2):
            both = max(one[0], other[0]), max(one[1], other[1])
            added = sum(len(found[s]) * (_work(both) - _work(s)) for s in (one, other))
            joins.append((added, both, one, other))
        added, both, one, other = min(joins)
        left -= added
        if left < 0:
            break
        found[both] = found.pop(one) + found.pop(other) + found.pop(both, [])
    return dict(found)


def orthogonal(
    matrices: Float[Array, 'n rows columns'], coefficients: Float[Array, '3']
) -> Float[Array, 'n rows columns']:
    """Returns matrices with the same singular vectors and values of about 1 (0.7 to 1.2).

    Applies the polynomial a·x + b·x³ + c·x⁵ to the singular values `ITERATIONS` times, by matrix
    products (Newton-Schulz). Rows and columns of zeros stay zero and change no other element.

    Args:
      matrices: least work if rows ≥ columns.
      coefficients: a, b and c.
    """
    a, b, c = coefficients.astype(matrices.dtype)
    square = jnp.square(matrices.astype(jnp.float32)).sum((1, 2), keepdims=True)
    x = matrices / (jnp.sqrt(square) + 1e-8).astype(matrices.dtype)
    for _ in range(ITERATIONS):
        gram = jnp.swapaxes(x, 1, 2) @ x
        x = a * x + x @ (b * gram + c * (gram @ gram))
    return x


def _matrix_shape(weights: Array) -> tuple[int, int]:
    """Returns the rows (inputs) and columns (outputs) of a weight array as a matrix."""
    return math.prod(weights.shape[:-1]), weights.shape[-1]


def _work(shape: tuple[int, int]) -> int:
    """Returns the multiplications of an iteration of `orthogonal` for a matrix."""
    rows, columns = shape
    return 2 * rows * columns**2 + columns**3


def _tall(weights: Array, shape: tuple[int, int]) -> Float[Array, 'rows columns']:
    """Returns weights as a matrix with rows ≥ columns, padded with zeros to `shape`."""
    matrix = weights.reshape(_matrix_shape(weights))
    tall = matrix.T if matrix.shape[0] < matrix.shape[1] else matrix
    return jnp.pad(tall, [(0, shape[axis] - tall.shape[axis]) for axis in range(2)])


def _as_before(tall: Float[Array, 'rows columns'], weights: Array) -> Array:
    """Returns the matrix of `_tall` in the shape and type of `weights`, without the padding."""
    rows, columns = _matrix_shape(weights)
    matrix = tall[:columns, :rows].T if rows < columns else tall[:rows, :columns]
    return matrix.reshape(weights.shape).astype(weights.dtype)


def _labels(params: Params) -> PyTree:
    """Returns the label of the optimizer that updates each weight, `MUON` or `ADAM`."""

    def label(path: tuple[jax.tree_util.DictKey, ...], leaf: Array) -> str:
        return MUON if path[0].key.startswith(BLOCKS) and leaf.ndim >= 2 else ADAM

    return jax.tree_util.tree_map_with_path(label, params)
