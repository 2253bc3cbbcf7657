"""Float32 arrays as bfloat16 terms."""

import jax
import jax.numpy as jnp
import pytest

from jaxunet.ops.terms import bfloat16_terms


@pytest.mark.parametrize('terms', [2, 3])
def test_each_term_has_8_bits(terms: int) -> None:
    """XLA may keep more of a cast pair. Three terms are exact."""
    x = jax.random.normal(jax.random.key(0), (1000,)) * 1e3
    split = jax.jit(lambda x: bfloat16_terms(x, terms))(x)
    assert [t.dtype for t in split] == [jnp.bfloat16] * terms
    error = jnp.abs(sum(t.astype(jnp.float32) for t in reversed(split)) - x) / jnp.abs(x)
    assert float(error.max()) <= (2.0**-16 if terms == 2 else 0)
