"""Checks the ops of other packages' backends while they are traced, and names what does not fit.

Without this, an op that returns another shape or type fails far away, in the UNet or in XLA. The
backends that come with jaxunet are compared with the references by tests instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxunet.config import OPS
from jaxunet.ops.activation import Activation
from jaxunet.ops.references import UPDATE, VARIANTS, XLA, Op
from jaxunet.ops.vocabulary import FusedUpdate
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.plugins import Backend, blamed, is_shipped, unchanged
from jaxunet.runtime.untrusted import FLAT, shown


@functools.cache  # so that equal ops are the same function to JAX
def checked_ops(backend: Backend) -> Mapping[str, Any]:
    """Returns the ops of a backend; those of another package check what they return.

    Raises:
      UserError: an op that jaxunet does not have, or that is no function.
    """
    if is_shipped(backend.name):
        return backend.ops
    known, checked = (*OPS, *VARIANTS), dict[str, Any]()
    for name, op in backend.ops.items():
        where = f'backend={backend.name}: ops'
        if name not in known:
            raise UserError(f'{where}: expected some of {", ".join(known)}, found {shown(name)}')
        if name != 'adamw':
            _check_callable(f'{where}[{name!r}]', op)
            checked[name] = _checked(backend.name, name, op, getattr(XLA, name))
            continue
        if not isinstance(op, FusedUpdate):
            raise UserError(f'{where}[{name!r}]: expected a FusedUpdate, found {shown(op)}')
        parts = {part: getattr(op, part) for part in ('sum_of_squares', 'adamw', 'narrow', 'pack')}
        for part, call in parts.items():
            _check_callable(f'{where}[{name!r}].{part}', call)
        guarded: dict[str, Any] = {
            part: _compared(backend.name, f'adamw.{part}', call, getattr(UPDATE, part))
            for part, call in parts.items()
        }
        checked[name] = op._replace(**guarded)
    return checked


def checked_transform(backend: Backend) -> Callable[..., Callable[..., Any]]:
    """Returns `Backend.transform_gradients`; that of another package checks what it returns."""
    if is_shipped(backend.name) or backend.transform_gradients is unchanged:
        return backend.transform_gradients

    def transform(function: Callable[..., Any], devices: int = 1) -> Callable[..., Any]:
        with blamed(backend.name, 'transform_gradients'):
            faster = backend.transform_gradients(function, devices)
        if faster is function:
            return function
        _check_callable(f'backend={backend.name}: transform_gradients(...)', faster)
        return _compared(backend.name, 'transform_gradients(...)', faster, function)

    return transform


def _check_callable(where: str, value: object) -> None:
    if not callable(value):
        raise UserError(f'{where}: expected a function, found {shown(value)}')


def _compared(backend: str, name: str, call: Op, reference: Op) -> Op:
    """Returns a function that checks that its results are like those of the reference."""

    def compared(*operands: Any, **options: Any) -> Any:
        # First, so that operands that do not fit are refused as they are by every backend.
        expected = jax.eval_shape(lambda: reference(*operands, **options))
        with blamed(backend, name):
            result = call(*operands, **options)
            wrong = _difference(result, expected)
        if wrong:
            raise UserError(
                f'backend={backend}: {name} returned something else than its reference: {wrong}; '
                'mend or update its package, or use backend=xla'
            )
        return result

    return compared


def _checked(backend: str, name: str, op: Op, reference: Op) -> Op:
    """Returns an op that checks its results, and names itself if its gradient fails."""
    compared = _compared(backend, name, op, reference)

    def checked(*operands: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((operands, options))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

        # JAX has zeros of a type of their own as the gradients of whole numbers.
        expected = tuple(
            jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else jax.dtypes.float0,
            )
            for leaf in (leaves[i] for i in places)
        )

        def of_arrays(*arrays: Any) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            operands, options = jax.tree.unflatten(tree, filled.values())
            return compared(*operands, **options)

        def forward(*arrays: Any) -> tuple[Any, Any]:
            with blamed(backend, f'the gradient of {name}'):
                return jax.vjp(of_arrays, *arrays)

        def backward(pull: Callable[..., Any], cotangents: Any) -> Any:
            with blamed(backend, f'the gradient of {name}'):
                gradients = pull(cotangents)
                if wrong := _difference(gradients, expected):
                    raise TypeError(wrong)
            return gradients

        named = jax.custom_vjp(of_arrays)
        named.defvjp(forward, backward)
        return named(*(leaves[i] for i in places))

    checked.__name__ = checked.__qualname__ = name
    return checked


def _difference(actual: PyTree, expected: PyTree) -> str:
    """Returns the first difference in structure, shape or type; '' if there is none."""
    actual, expected = (
        jax.tree.map(_joined, tree, is_leaf=lambda node: isinstance(node, Activation))
        for tree in (actual, expected)
    )
    structures: list[Any] = [jax.tree.structure(tree) for tree in (actual, expected)]
    if structures[0] != structures[1]:
        return f'expected {_described(expected)}, found {_described(actual)}'
    for (path, want), have in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        if _described(want) != _described(have):
            where = f'{jax.tree_util.keystr(path)}: ' if path else ''
            return f'{where}expected {_described(want)}, found {_described(have)}'
    return ''


def _joined(value: Any) -> Any:
    """Returns an activation whose parts fit each other as one part; anything else as it is."""
    if not isinstance(value, Activation) or not all(hasattr(p, 'shape') for p in value.parts):
        return value
    rows = {(part.shape[:-1], str(part.dtype)) for part in value.parts}
    if len(rows) != 1 or () in {part.shape for part in value.parts}:
        return value
    (shape, dtype), channels = rows.pop(), sum(part.shape[-1] for part in value.parts)
    joined: Any = jax.ShapeDtypeStruct((*shape, channels), dtype)
    return Activation((joined,))


def _described(value: Any) -> str:
    if isinstance(value, Activation) and len(value.parts) == 1:
        return f'an Activation of {_described(value.parts[0])}'
    if hasattr(value, 'shape') and hasattr(value, 'dtype'):
        return f'{value.dtype}{list(value.shape)}'
    if isinstance(value, tuple | list) and len(value) <= FLAT:
        name = '' if type(value) is tuple else type(value).__name__
        return f'{name}({", ".join(map(_described, value))})'
    return shown(value)
