"""The attention kernels against the float64 oracle.

A CPU interprets the awkward cases; a GPU runs all cases.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import plain
from support.parity import DTYPES, assert_parity, draw, kernel_target, types_in_turn

from jaxunet.ops.attention.cases import AWKWARD, CASES, Case
from pallas_kernels import backend


def check(case: Case, dtype: str, batch: int):
    shape = (case.batch or batch, case.tokens, 3 * case.heads * case.width)
    with kernel_target():
        assert_parity(
            lambda qkv: backend.attention(qkv, num_heads=case.heads),
            plain(case.heads),
            {'qkv': (draw(shape, dtype), dtype)},
        )


@pytest.mark.parametrize(('case', 'dtype'), types_in_turn(AWKWARD))
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
def test_runs_are_identical():
    qkv = jnp.asarray(draw((4, 256, 576), 'bfloat16'), jnp.bfloat16)
    pull = jax.jit(
        jax.grad(lambda x: jnp.sum(jnp.sin(backend.attention(x, num_heads=6).astype(jnp.float32))))
    )
    np.testing.assert_array_equal(np.asarray(pull(qkv)), np.asarray(pull(qkv)))
