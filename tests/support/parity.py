"""The one tolerance for kernels: a kernel may err at most twice as much as XLA's own op does in the
same type.

Both are held against the reference in float64 on the CPU, on inputs that every type represents
exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxunet.runtime.device import Target, use

Op = Callable[..., Any]  # arrays in, one array or a tree of arrays out
DTYPES = ('float32', 'bfloat16')


def draw(
    shape: tuple[int, ...], dtype: str, *, scale: float = 1.0, offset: float = 0.0
) -> np.ndarray:
    """Fresh normal numbers, float64, rounded so that `dtype` holds them exactly."""
    values = offset + scale * np.random.default_rng().standard_normal(shape)
    return np.asarray(
        jnp.asarray(values, jnp.float32).astype(dtype).astype(jnp.float32), np.float64
    )


def assert_parity(
    kernel: Op, reference: Op, inputs: dict[str, tuple[np.ndarray, str]], *, gradients: bool = True
) -> dict[str, float]:
    """Values, and the gradient of every input under a random cotangent, of `kernel` against
    `reference`.

    Args:
      kernel, reference: functions of keyword arrays, with the same results.
      inputs: name -> (float64 values, type in which the op receives them). The float64 oracle gets
      them all in float64.

    Returns: for each output and gradient, its error as a share of what is allowed.

    Raises:
      AssertionError: an error above 2 × that of the plain op + 4 · eps_f32 · max|exact|, a NaN, or
      another shape or type.
    """
    device = jax.devices()[0]
    typed = {
        name: jax.device_put(jnp.asarray(value, jnp.float32).astype(dtype), device)
        for name, (value, dtype) in inputs.items()
    }
    shapes = jax.eval_shape(reference, **typed)
    cotangent = jax.tree.map(lambda s: draw(s.shape, str(s.dtype)), shapes)

    def run(op: Op, arguments: dict[str, Any], cotangent: Any) -> dict[str, np.ndarray]:
        def both(arguments: dict[str, Any], cotangent: Any) -> Any:
            if not gradients:
                return op(**arguments), None
            out, pull = jax.vjp(lambda a: op(**a), arguments)
            return out, pull(cotangent)[0]

        # Without leave to keep more precision than the types say, which would make "the same type"
        # mean nothing for the plain op.
        out, pulled = jax.jit(both, compiler_options={'xla_allow_excess_precision': False})(
            arguments, cotangent
        )
        named = {
            f'output{jax.tree_util.keystr(path)}': leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(out)
        }
        return named | {f'gradient of {name}': leaf for name, leaf in (pulled or {}).items()}

    def typed_like(tree: Any) -> Any:
        return jax.tree.map(
            lambda v, s: jax.device_put(jnp.asarray(v, jnp.float32).astype(s.dtype), device),
            tree,
            shapes,
        )

    plain = run(reference, typed, typed_like(cotangent))
    _poison(plain)
    got = run(kernel, typed, typed_like(cotangent))
    cpu = jax.local_devices(backend='cpu')[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        wide = {name: jnp.asarray(value, jnp.float64) for name, (value, _) in inputs.items()}
        exact = {
            k: np.asarray(v)
            for k, v in run(
                reference, wide, jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), cotangent)
            ).items()
        }

    shares = {}
    for name, want in exact.items():
        assert got[name].dtype == plain[name].dtype, (
            f'{name}: expected {plain[name].dtype}, found {got[name].dtype}'
        )
        assert got[name].shape == want.shape, (
            f'{name}: expected shape {want.shape}, found {got[name].shape}'
        )
        shares[name] = _share(
            np.asarray(got[name], np.float64), np.asarray(plain[name], np.float64), want
        )
    wrong = {name: round(share, 3) for name, share in shares.items() if not share <= 1}
    assert not wrong, f'error as a share of what is allowed: {wrong}'
    return shares


def assert_parity_in_some_draw(
    kernel: Op,
    reference: Op,
    inputs: Callable[[], dict[str, tuple[np.ndarray, str]]],
    **options: Any,
) -> None:
    """`assert_parity` on fresh inputs, up to three times.

    Where a few elements carry the largest error, as in softmax rows that one key dominates, that
    error is itself a draw, for kernel and plain op alike, and 2 × between two such draws happens by
    chance. A kernel that is less accurate than allowed fails every time.
    """
    for last in (False, False, True):
        try:
            assert_parity(kernel, reference, inputs(), **options)
            return
        except AssertionError:
            if last:
                raise


def assert_runs_are_identical(
    kernel: Op, inputs: dict[str, tuple[np.ndarray, str]], runs: int = 5
) -> None:
    """Values and gradients of several runs, bit for bit; inputs as `assert_parity` takes them."""

    def both(arguments: dict[str, Any]) -> Any:
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


def _share(got: np.ndarray, plain: np.ndarray, exact: np.ndarray) -> float:
    if not np.isfinite(got).all():
        return float('nan')
    allowed = (
        2 * np.abs(plain - exact).max() + 4 * float(np.finfo(np.float32).eps) * np.abs(exact).max()
    )
    error = np.abs(got - exact).max()
    return float(error / allowed) if allowed else float(error > 0)


def _poison(results: dict[str, Any]) -> None:
    """Leaves NaN in the memory that the next results are likely to get, so that what a kernel does
    not write shows.
    """
    filled = [
        jnp.full(leaf.shape, jnp.nan, leaf.dtype) for leaf in results.values() for _ in range(2)
    ]
    jax.block_until_ready(filled)


def kernel_target() -> contextlib.AbstractContextManager[None]:
    """Kernels of this machine's GPU, or interpreted ones where there is none."""
    return contextlib.nullcontext() if jax.default_backend() == 'gpu' else use(Target.INTERPRET)
