"""The one tolerance for kernels: at most twice the error of the plain op in the same type.

Both are compared with the reference in float64, on inputs that every type represents exactly. The
plain op's error is measured on the CPU, with the products that JAX uses by default on this
machine's device (`support.products`), so that XLA's GPU autotuner cannot change the bound. It is
the largest error over several draws of the inputs, so that one lucky draw cannot change the bound
either. If a kernel exceeds the bound a little, more draws are made before it fails, because the
largest error of few numbers, such as the gradient of a bias of three features, may be small by
luck. The plain op's error counts at least as much as rounding a result to its type can cost. If
the largest value is just above a power of two, few values are rounded as coarsely as that one, and
the plain op may round all of these well by luck.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxunet.runtime.device import family
from support.products import Arrays, Both, Op, with_gradients, with_tf32_products
from support.turns import in_turn

Inputs = dict[str, tuple[np.ndarray, str]]
Results = dict[str, np.ndarray]
Run = Callable[[Arrays, PyTree], Both]  # (arguments, cotangent) -> results and gradients
DTYPES = ('float32', 'bfloat16')
# Number of draws over which the plain op's largest error is taken. The largest error of few
# elements varies more from draw to draw than that of many.
DRAWS_OF_FEW, FEW, DRAWS, DRAWS_OF_MANY, MANY = 32, 2**10, 8, 2, 2**16
NEAR = 3.0  # an error above this share of the allowed one fails at once, without more draws


class Named(Protocol):
    """A case of an op."""

    @property
    def name(self) -> str: ...


def draw(
    shape: tuple[int, ...], dtype: str, *, scale: float = 1.0, offset: float = 0.0
) -> np.ndarray:
    """Returns fresh normal numbers in float64, rounded so that `dtype` holds them exactly."""
    values = offset + scale * np.random.default_rng().standard_normal(shape)
    return _rounded(values, dtype).astype(np.float64)


def assert_parity(
    kernel: Op, reference: Op, inputs: Inputs, *, gradients: bool = True
) -> dict[str, float]:
    """Compares values and gradients of `kernel` with those of `reference`.

    The gradients are those of every input under a random cotangent.

    Args:
      kernel, reference: functions of keyword arrays, with the same results.
      inputs: name -> (float64 values, type in which the op receives them). The float64 oracle gets
        them all in float64. Further draws permute these values.
      gradients: False to compare values only.

    Returns: for each output and gradient, its error as a share of the allowed error.

    Raises:
      AssertionError: an error exceeds 2 × m + 4 · eps_f32 · max|exact|, where m is the plain op's
        largest error or the error of rounding max|exact|, whichever is larger; or there is a NaN,
        or another shape or type.
    """
    device, cpu = jax.devices()[0], jax.local_devices(backend='cpu')[0]
    typed = _as_types(inputs, device)
    shapes = jax.eval_shape(reference, **typed)
    cotangent = jax.tree.map(lambda s: draw(s.shape, str(s.dtype)), shapes)
    oracle, plain = _runs(reference, gradients, family() is not None)

    def exact_and_plain(inputs: Inputs, cotangent: PyTree) -> tuple[Results, Results]:
        with jax.default_device(cpu):
            found = plain(_as_types(inputs, cpu), _typed_like(cotangent, shapes, cpu))
            with jax.enable_x64(True):
                wide = {name: value for name, (value, _) in inputs.items()}
                exact = oracle(*jax.device_put((wide, cotangent), cpu))
        return exact, found

    exact, expected = exact_and_plain(inputs, cotangent)
    largest = _errors(expected, exact)

    def draw_again() -> None:
        other_exact, other = exact_and_plain(*_in_another_order(inputs, cotangent))
        for name, error in _errors(other, other_exact).items():
            largest[name] = max(largest[name], error)

    elements = sum(value.size for value in exact.values())
    draws = DRAWS_OF_FEW if elements < FEW else DRAWS if elements < MANY else DRAWS_OF_MANY
    for _ in range(1, draws):
        draw_again()
    _poison(shapes, typed)
    got = _Run(kernel, gradients)(typed, _typed_like(cotangent, shapes, device))
    _check_outlines(got, expected)
    shares = _shares(got, exact, largest)
    while draws < DRAWS_OF_FEW and 1 < max(shares.values()) <= NEAR:
        draw_again()
        draws += 1
        shares = _shares(got, exact, largest)
    wrong = {name: round(share, 3) for name, share in shares.items() if not share <= 1}
    assert not wrong, f'error as a share of what is allowed: {wrong}'
    return shares


def types_in_turn(cases: Sequence[Named], dtypes: Sequence[str] = DTYPES) -> list[object]:
    """Returns test parameters (case, dtype) for named cases; see `turns.in_turn`."""
    return in_turn({case.name: case for case in cases}, *((dtype,) for dtype in dtypes))


class _Run:
    """An op, with its gradients unless told otherwise; compiled once, called with each draw."""

    def __init__(self, op: Op, gradients: bool | None):
        """`gradients`: None = `op` takes (arguments, cotangent) and returns gradients, too."""

        def both(arguments: Arrays, cotangent: PyTree) -> Both:
            return with_gradients(op, arguments, cotangent, gradients=bool(gradients))

        # Forbids XLA to compute in more precision than the types have. Otherwise the plain op would
        # not really compute in the same type.
        self._call = jax.jit(
            op if gradients is None else both,
            compiler_options={'xla_allow_excess_precision': False},
        )

    def __call__(self, arguments: Arrays, cotangent: PyTree) -> Results:
        out, pulled = self._call(arguments, cotangent)
        named = {
            f'output{jax.tree_util.keystr(path)}': leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(out)
        }
        named |= {f'gradient of {name}': leaf for name, leaf in (pulled or {}).items()}
        return {name: np.asarray(leaf) for name, leaf in named.items()}


@functools.lru_cache(maxsize=8)
def _runs(reference: Op, gradients: bool, tf32: bool) -> tuple[_Run, _Run]:
    """Returns the oracle and the plain op of a reference.

    They are cached for the next types and kernels with the same function and shapes.
    """
    oracle = plain = _Run(reference, gradients)
    if tf32:
        plain = _Run(with_tf32_products(reference, gradients=gradients), gradients=None)
    return oracle, plain


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    # With numpy, because JAX would compile a program for every shape.
    return np.asarray(values, np.float32).astype(jnp.dtype(dtype))


def _as_types(inputs: Inputs, device: jax.Device) -> dict[str, jax.Array]:
    return {
        name: jax.device_put(_rounded(value, dtype), device)
        for name, (value, dtype) in inputs.items()
    }


def _typed_like(tree: PyTree, shapes: PyTree, device: jax.Device) -> PyTree:
    return jax.tree.map(lambda v, s: jax.device_put(_rounded(v, s.dtype), device), tree, shapes)


def _in_another_order(inputs: Inputs, cotangent: PyTree) -> tuple[Inputs, PyTree]:
    def shuffled(values: np.ndarray) -> np.ndarray:
        return np.random.default_rng().permutation(values.ravel()).reshape(values.shape)

    values = {name: (shuffled(value), dtype) for name, (value, dtype) in inputs.items()}
    return values, jax.tree.map(shuffled, cotangent)


def _errors(found: Results, exact: Results) -> dict[str, float]:
    """Returns the largest error of each result, as a share of its largest exact value."""
    return {
        name: float(np.abs(np.asarray(found[name], np.float64) - want).max(initial=0) / scale)
        if (scale := np.abs(want).max(initial=0))
        else 0.0
        for name, want in exact.items()
    }


def _rounding(exact: np.ndarray, dtype: np.dtype) -> float:
    """Returns the largest error of rounding the largest value to a type, as a share of it."""
    scale = np.abs(exact).max(initial=0)
    if not scale:
        return 0.0
    spacing = float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(scale))
    return float(spacing / 2 / scale)


def assert_runs_are_identical(
    kernel: Op, inputs: dict[str, tuple[np.ndarray, str]], runs: int = 5
) -> None:
    """Checks that values and gradients of several runs agree bit for bit; see `assert_parity`."""

    def both(arguments: Arrays) -> Both:
        out, pull = jax.vjp(lambda a: kernel(**a), arguments)
        return out, pull(jax.tree.map(jnp.ones_like, out))[0]

    typed = {
        name: jnp.asarray(value, jnp.float32).astype(dtype)
        for name, (value, dtype) in inputs.items()
    }
    call = jax.jit(both)
    first = jax.tree.map(np.asarray, call(typed))
    for _ in range(runs - 1):
        jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, call(typed)))


def _check_outlines(got: Results, expected: Results) -> None:
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, (
            f'{name}: expected {value.dtype}, found {got[name].dtype}'
        )
        assert got[name].shape == value.shape, (
            f'{name}: expected shape {value.shape}, found {got[name].shape}'
        )


def _shares(got: Results, exact: Results, largest: dict[str, float]) -> dict[str, float]:
    """Returns the error of each result as a share of the error that `largest` allows."""
    return {
        name: _share(
            np.asarray(got[name], np.float64),
            want,
            max(largest[name], _rounding(want, got[name].dtype)),
        )
        for name, want in exact.items()
    }


def _share(got: np.ndarray, exact: np.ndarray, plain: float) -> float:
    if not np.isfinite(got).all():
        return float('nan')
    scale = np.abs(exact).max(initial=0)
    allowed = (2 * plain + 4 * float(np.finfo(np.float32).eps)) * scale
    error = np.abs(got - exact).max(initial=0)
    return float(error / allowed) if allowed else float(error > 0)


def _poison(*trees: PyTree) -> None:
    """Leaves NaN in memory that the next results are likely to get.

    Elements that a kernel does not write are then noticed.
    """
    filled = [
        jax.device_put(np.full(leaf.shape, np.nan, leaf.dtype), may_alias=False)
        for leaf in jax.tree.leaves(trees)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        for _ in range(2)
    ]
    jax.block_until_ready(filled)
