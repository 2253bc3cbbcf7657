"""The attention handlers against the float64 oracle.

The CPU's handlers run the awkward cases; the GPU's run all cases.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import plain
from support.parity import DTYPES, assert_parity, assert_runs_are_identical, draw

from jaxunet.ops.attention.cases import AWKWARD, CASES, Case
from xla_ffi import backend


def check(case: Case, dtype: str, batch: int):
    assert_parity(
        lambda qkv: backend.attention(qkv, num_heads=case.heads),
        plain(case.heads),
        {
            'qkv': (
                draw((case.batch or batch, case.tokens, 3 * case.heads * case.width), dtype),
                dtype,
            )
        },
    )


@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
def test_runs_are_identical(dtype):
    assert_runs_are_identical(
        lambda qkv: backend.attention(qkv, num_heads=6),
        {'qkv': (draw((4, 256, 576), dtype), dtype)},
    )


def test_under_vmap_the_mapped_axis_joins_the_batch():
    qkv = jnp.asarray(draw((3, 2, 5, 24), 'float32'), jnp.float32)

    def loss(x):
        return jnp.sum(jnp.sin(backend.attention(x, num_heads=2)))

    mapped = jax.vmap(jax.grad(loss))(qkv)
    np.testing.assert_array_equal(mapped.reshape(6, 5, 24), jax.grad(loss)(qkv.reshape(6, 5, 24)))


@pytest.mark.parametrize('qkv', [(1, 4, 25), (1, 4, 6 * 257)], ids=['indivisible', 'too_wide'])
def test_mistakes_are_named(qkv):
    with pytest.raises(
        ValueError, match=r'attention: (25 packed channels are not 3 x 2|heads of width 257)'
    ):
        backend.attention(jnp.zeros(qkv), num_heads=2)
