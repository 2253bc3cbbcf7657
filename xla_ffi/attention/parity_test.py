"""The attention handlers against the float64 oracle.

The CPU handlers run the awkward cases, the GPU handlers all cases and those of the Hopper kernels.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import plain
from support.parity import DTYPES, assert_parity, assert_runs_are_identical, draw

from jaxunet.ops.attention.cases import AWKWARD, CASES, Case
from jaxunet.runtime import device, gpu_time
from xla_ffi.attention.vjp import attention

# Heads that the Hopper kernels accept (hopper/shapes.cuh): one, several, and slightly more than the
# persistent kernels run at once on an H200.
HOPPER = (
    Case(64, 3, 32, batch=1),
    Case(64, 3, 32, batch=177),
    Case(256, 3, 32, batch=1),
    Case(256, 1, 32, batch=133),
    Case(64, 1, 64, batch=1),
    Case(64, 12, 64, batch=47),
    Case(256, 3, 64, batch=1),
    Case(256, 1, 64, batch=133),
    Case(128, 3, 64, batch=5),
    Case(384, 2, 64, batch=3),
    Case(128, 2, 256, batch=67),
    Case(128, 1, 256, batch=3),
    Case(256, 1, 256, batch=1),
    Case(256, 2, 256, batch=3),
    Case(256, 3, 256, batch=13),
    Case(384, 1, 256, batch=2),  # a flash kernel computes the backward pass
)

# The backward kernel of some of them, and its launches.
BACKWARD_KERNELS = {
    Case(256, 6, 32, batch=2): ('hopper_attention_backward_kernel', 1),
    Case(256, 1, 256, batch=2): ('hopper_cluster_attention_backward_kernel', 1),
    Case(256, 3, 256, batch=3): ('hopper_cluster_attention_backward_kernel', 1),
    Case(128, 1, 256, batch=2): ('hopper_streaming_attention_backward_kernel', 3),
}


def check(case: Case, dtype: str, batch: int):
    assert_parity(
        lambda qkv: attention(qkv, num_heads=case.heads),
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
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', HOPPER, ids=lambda c: c.name)
def test_hopper_shapes(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', BACKWARD_KERNELS, ids=lambda c: c.name)
def test_gradients_take_these_launches(case, dtype):
    """The handler chooses the kernel, so only a trace of the GPU tells which one ran."""
    if device.portable():
        pytest.skip('needs the kernels for Hopper')
    channels = case.heads * case.width
    qkv, grad = (
        jnp.asarray(draw((case.batch, case.tokens, width), dtype), dtype)
        for width in (3 * channels, channels)
    )

    def gradients(qkv, grad):
        return jax.vjp(lambda x: attention(x, num_heads=case.heads), qkv)[1](grad)

    program = gpu_time.named('attention_gradients', gradients)
    traced = gpu_time.trace_times({'attention_gradients': lambda _: program(qkv, grad)}, rounds=2)
    names = [name for name in traced['attention_gradients'].kernels if 'backward' in name]
    kernel, launches = BACKWARD_KERNELS[case]
    assert [re.findall(r'\w+_kernel\b', name) for name in names] == [[kernel]] * launches


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    ('tokens', 'width'), [(256, 32), (64, 32), (64, 64), (256, 64), (1024, 64), (256, 256)]
)
def test_runs_are_identical(tokens, width, dtype):
    assert_runs_are_identical(
        lambda qkv: attention(qkv, num_heads=6),
        {'qkv': (draw((4, tokens, 18 * width), dtype), dtype)},
    )


def test_under_vmap_the_mapped_axis_joins_the_batch():
    qkv = jnp.asarray(draw((3, 2, 5, 24), 'float32'), jnp.float32)

    def loss(x):
        return jnp.sum(jnp.sin(attention(x, num_heads=2)))

    mapped = jax.vmap(jax.grad(loss))(qkv)
    np.testing.assert_array_equal(mapped.reshape(6, 5, 24), jax.grad(loss)(qkv.reshape(6, 5, 24)))


@pytest.mark.parametrize('qkv', [(1, 4, 25), (1, 4, 6 * 257)], ids=['indivisible', 'too_wide'])
def test_mistakes_are_named(qkv):
    with pytest.raises(
        ValueError, match=r'attention: (25 packed channels are not 3 x 2|heads of width 257)'
    ):
        attention(jnp.zeros(qkv), num_heads=2)
