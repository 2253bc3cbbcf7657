"""Weights in 16 bits: a sampler casts them before its loop over evaluations, not in it."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.sampling.generator import Generator, Inputs, Others
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import sample_keys

BATCH = 2


def equations(jaxpr, *, looped: bool = False) -> Iterator:
    """Yields every equation, and whether it is in a loop."""
    for equation in jaxpr.eqns:
        yield equation, looped
        inside = looped or equation.primitive.name in ('while', 'scan')
        for inner in _inner(equation):
            yield from equations(inner, looped=inside)


def _inner(equation) -> Iterator:
    for value in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')
    ):
        if hasattr(value, 'eqns'):
            yield value
        elif hasattr(value, 'jaxpr'):
            yield value.jaxpr


@pytest.mark.parametrize('precision', ['bfloat16', 'float32'])
def test_no_kernel_is_cast_in_the_loop(precision):
    config = tiny_config(precision=precision)
    sampler = SamplerConfig(steps=3)
    generator = Generator(config, sampler, batch_size=BATCH, devices=jax.devices()[:1])
    keys = sample_keys(0, np.arange(BATCH))
    inputs = Inputs(keys, jnp.zeros(BATCH, jnp.int32), None)
    state = jax.eval_shape(lambda: generator._initial_state(keys, None))
    params = fresh_state(config).params
    arguments = (params, state, inputs, jnp.int32(0), jnp.int32(3), None, Others(None, None))
    casts = [
        looped
        for equation, looped in equations(jax.make_jaxpr(generator._segment)(*arguments).jaxpr)
        if equation.primitive.name == 'convert_element_type'
        and equation.invars[0].aval.dtype == jnp.float32
        and equation.outvars[0].aval.dtype == jnp.bfloat16
        and equation.invars[0].aval.shape[:2] == (3, 3)
    ]
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 4]
    assert casts == [False] * (len(kernels) if precision == 'bfloat16' else 0)
