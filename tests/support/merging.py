"""A network with weight gradients to merge, and what its gradient function calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.transformations import vary, varying_axes
from support import kernel_names
from xla_ffi.conv3x3.vjp import conv3x3, norm_silu_conv3x3
from xla_ffi.group_norm.vjp import group_norm_and_input
from xla_ffi.linear.vjp import linear
from xla_ffi.weight_gradients import selection
from xla_ffi.weight_gradients.grouping import TARGET, grouped
from xla_ffi.weight_gradients.selection import CONVOLUTION, LINEAR, NORMS

CHANNELS, BATCH = 8, 3
Weights = dict[str, jax.Array]


def weights(dtype: str = 'bfloat16') -> Weights:
    """Returns the weights of `network`: of three convolutions and two linear layers."""
    c = CHANNELS
    shapes = {
        'first': (3, 3, 4, c),
        'joined': (3, 3, 2 * c, c),
        'shortcut': (2 * c, c),
        'last': (3, 3, 2 * c, c),
        'linear': (c, c),
        'linear_2': (c, 3),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    found = {
        name: (0.2 * jax.random.normal(key, shape)).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    rows = {'row': c, 'norm': c, 'scale': 2 * c}
    return found | {name: jnp.ones((1, size)) for name, size in rows.items()}


def images(dtype: str = 'bfloat16', batch: int = BATCH) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, 5, 6, 4)).astype(dtype)


def network(w: Weights, x: jax.Array) -> jax.Array:
    """Returns a loss: inputs of two parts, a shortcut, norms, shifts per sample, linear layers."""
    w = vary(w, varying_axes(x))
    rows = w['row'] * jnp.arange(1.0, 1.0 + x.shape[0])[:, None]
    with jax.named_scope('first'):
        h = conv3x3(Convolution(image=Activation.of(x), kernel=w['first'], shift=rows))
    both = Activation((*h.parts, jnp.sin(h.value)))
    with jax.named_scope('joined'):
        y = norm_silu_conv3x3(
            Convolution(
                image=both,
                norm=Norm(w['scale'], w['scale'], 2),
                kernel=w['joined'],
                shift=w['row'],
                residual=both,
                shortcut=w['shortcut'],
            )
        )
    with jax.named_scope('linear'):
        normed, (passed,) = group_norm_and_input(y, Norm(w['norm'], w['norm'], 2))
        y = Activation.of(linear(normed, w['linear'], w['row'], residual=passed.value))
    y = conv3x3(Convolution(image=y.join(h), kernel=w['last'], shift=w['row'], residual=y))
    out = linear(y.value, w['linear_2'], w['row'][:, :3])
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


gradient = jax.grad(network)
SINGLE = {CONVOLUTION: 3, LINEAR: 2}  # the calls of `gradient`


def calls(function: Callable[..., Any], *arguments: Any) -> dict[str, int]:
    """Returns how often the lowered function calls the handlers of weight gradients."""
    found = kernel_names.count(jax.jit(function).lower(*arguments))
    return {name: found[name] for name in (TARGET, CONVOLUTION, LINEAR) if found[name]}


def assert_equal(function: Callable[..., Any], *arguments: Any) -> None:
    """Checks that a function and its merged form return the same bits."""
    wanted, found = (jax.jit(f)(*arguments) for f in (function, grouped(function)))
    assert jax.tree.structure(wanted) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_array_equal(a, b)
        assert jnp.any(b != 0)


def attributes(
    function: Callable[..., Any], *arguments: Any, targets: Sequence[str] = (TARGET,)
) -> list[dict[str, Any]]:
    """Returns the attributes of the calls of some handlers, of the merged calls by default."""
    equations = jax.make_jaxpr(function)(*arguments).jaxpr.eqns
    found = [e for e in equations if e.params.get('target_name') in targets]
    return [dict(e.params['attributes']) for e in found]


def weight_gradients(
    function: Callable[..., Any], *arguments: Any
) -> list[selection.WeightGradient]:
    """Returns the calls of a function that are merged."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    found = selection.merged(jaxpr.eqns, set(jaxpr.outvars), last_apart=False)
    return [gradient for call in found for gradient in call.weight_gradients]


def samples(function: Callable[..., Any], *arguments: Any) -> list[bool]:
    """Returns which norms' gradients are added by their own calls, in the order of the calls."""
    return [found['samples'] for found in attributes(function, *arguments, targets=NORMS)]
