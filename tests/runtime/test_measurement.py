"""Inputs and gradients of the functions that are measured."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxunet.runtime.measurement import Inputs, Measurement, with_gradients


def test_inputs() -> None:
    inputs = Inputs()
    like = {
        'x': (jax.ShapeDtypeStruct((64, 9), 'bfloat16'),),
        'kernel': jax.ShapeDtypeStruct((3, 3, 64, 32), 'bfloat16'),
    }
    like['dy'] = jax.ShapeDtypeStruct((64, 9), 'bfloat16')
    m = Measurement('op', 'case', 'forward', 1, {}, like, None)
    first, second = inputs.of(m, 0), inputs.of(m, 1)
    assert first['x'][0] is inputs.of(m, 2)['x'][0]
    assert (np.asarray(first['x'][0]) != np.asarray(second['x'][0])).any()
    assert (np.asarray(first['x'][0]) != np.asarray(first['dy'])).any()
    kernel = np.asarray(first['kernel'].astype(jnp.float32))
    np.testing.assert_allclose(kernel.std(), (9 * 64) ** -0.5, rtol=0.05)
    large = Measurement(
        'op', 'case', 'forward', 1, {}, {'x': jax.ShapeDtypeStruct((4_100_000,), 'float32')}, None
    )
    assert abs(float(jnp.std(inputs.of(large, 0)['x'])) - 1) < 0.01


def test_gradients() -> None:
    function = with_gradients(lambda i: i['a'] * i['b'] + i['c'], fixed=('c',))
    y, (gradients,) = function(
        {'a': jnp.float32(2), 'b': jnp.float32(3), 'c': jnp.float32(1), 'dy': jnp.float32(10)}
    )
    assert (y, gradients) == (7, {'a': 30, 'b': 20})


def test_bytes() -> None:
    """Inputs and results count, but not an input of which only the memory is used."""
    like = {
        name: jax.ShapeDtypeStruct((5,), kind) for name, kind in (('x', 'float32'), ('y', 'int8'))
    }
    m = Measurement(
        'op', 'case', 'forward', 1, {'xla': lambda i: i['x'].astype('int8')}, like, None, ('y',)
    )
    assert m.bytes_needed() == 20 + 5 + 5
    assert m._replace(unread=('y',)).bytes_needed() == 20 + 5
