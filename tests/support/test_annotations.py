"""The check of array annotations is at work in tests."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jaxunet.profile.intervals import union
from pallas_kernels.attention.vjp import attention


def test_an_array_of_another_type_is_an_error():
    spans = np.array([[0, 2], [1, 3]])
    assert union(spans.astype(float)).tolist() == [[0, 3]]
    with pytest.raises(TypeCheckError, match=r'intervals\.union'):
        union(spans)


def test_the_error_of_a_function_comes_first():
    with pytest.raises(ValueError, match='int32'):
        attention(jnp.zeros((1, 2, 12), jnp.int32), num_heads=1)
