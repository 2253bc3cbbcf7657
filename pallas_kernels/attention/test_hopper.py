"""Attention's Hopper kernels: lowered for CUDA, and under vmap;
and the shapes that they do not accept.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_names
from support.mosaic import simulated
from support.parity import draw
from support.turns import in_turn

from jaxunet.ops.attention.cases import ADM, AWKWARD, CIFAR10, ELEPHANTS64, LONG
from jaxunet.runtime import device
from pallas_kernels.attention import dispatch, hopper, hopper_kernels, hopper_plan, vjp

TYPES = (('bfloat16',), ('float16',))


def test_log_sum_exp():
    """Its two terms, as `hopper_kernels` states them; and the outputs in float32."""
    qkv = jnp.asarray(draw((2, 64, 192), 'bfloat16'), jnp.bfloat16)
    with simulated():
        out, lse, exact = map(np.asarray, hopper.forward_for_training(qkv, 2))
    q, k, _ = np.moveaxis(np.asarray(qkv, np.float64).reshape(2, 64, 3, 2, 32), 2, 0)
    logits = np.einsum('bqhd,bkhd->bhqk', q, k)
    largest, log_sum = np.moveaxis(np.asarray(lse, np.float64), 2, 0)
    np.testing.assert_allclose(largest, logits.max(-1), rtol=1e-5)
    shifted = (logits - logits.max(-1, keepdims=True)) * 32**-0.5
    np.testing.assert_allclose(log_sum, np.log2(np.exp(shifted).sum(-1)), rtol=1e-5)
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))
    assert lse.dtype == exact.dtype == jnp.float32


def lowered(function, *shapes):
    """Counts the kernels of a program for an H200 with Hopper's kernels."""
    with device.use(device.Target.HOPPER):
        program = jax.jit(function).trace(*shapes).lower(lowering_platforms=('cuda',))
    assert 'stablehlo.transpose' not in program.as_text()
    return kernel_names.count(program)


def packed(batch, tokens, heads, width, dtype='bfloat16'):
    return jax.ShapeDtypeStruct((batch, tokens, 3 * heads * width), dtype)


def gradient(heads):
    def pulled(qkv):
        return jnp.sum(vjp.attention(qkv, num_heads=heads).astype(jnp.float32))

    return jax.grad(pulled)


TRAINING = {hopper_kernels.FORWARD: 1, hopper_kernels.DELTA: 1, hopper_kernels.BACKWARD: 1}


@pytest.mark.parametrize('x64', [False, True])
@pytest.mark.parametrize(
    ('shape', 'dtype'),
    in_turn(
        {'64 wide': (2, 128, 3, 64), '32 wide': (2, 256, 6, 32), 'short': (1, 64, 8, 32)}, *TYPES
    ),
)
def test_lowers_for_hopper(shape, dtype, x64):
    """Forward is one kernel, backward two, and nothing is transposed between them."""
    heads, qkv = shape[2], packed(*shape, dtype)
    with jax.enable_x64(x64):
        found = lowered(lambda x: vjp.attention(x, num_heads=heads), qkv)
        assert found == {hopper_kernels.FORWARD: 1}
        assert lowered(gradient(heads), qkv) == TRAINING


def test_one_launch_for_a_mapped_batch():
    """Under vmap the mapped axis joins the batch."""
    mapped = jax.ShapeDtypeStruct((3, *packed(2, 64, 2, 32).shape), 'bfloat16')
    assert lowered(jax.vmap(gradient(2)), mapped) == TRAINING


@pytest.mark.parametrize(
    ('shape', 'dtype', 'message'),
    [
        ((2, 64, 2, 32), 'float32', 'expected bfloat16 or float16, found float32'),
        ((2, 64, 1, 256), 'bfloat16', 'expected heads of 32 or 64 channels, found 256'),
        ((2, 64, 2, 48), 'bfloat16', 'expected heads of 32 or 64 channels, found 48'),
        ((2, 77, 2, 32), 'bfloat16', r'a multiple of 64 tokens, found shape \(2, 77, 192\)'),
        ((0, 64, 2, 32), 'bfloat16', r'a multiple of 64 tokens, found shape \(0, 64, 192\)'),
        ((65535, 64, 65535, 32), 'bfloat16', 'at most 2147483647 programs, found 8589672450'),
    ],
    ids=lambda v: str(v)[:20],
)
def test_other_shapes_go_to_xla(shape, dtype, message):
    qkv, heads = packed(*shape, dtype), shape[2]
    reason = hopper_plan.supports(qkv, heads)
    assert reason is not None
    assert re.search(message, reason)
    with pytest.raises(ValueError, match=f'attention on Hopper: .*{message}'):
        hopper_plan.sizes(qkv, heads)
    with device.use(device.Target.HOPPER):
        assert not dispatch.supports(qkv, heads)


def test_the_cases_that_run_on_hopper_kernels():
    def supported(cases):
        return [
            hopper_plan.supports(packed(c.batch or 1, *c[:3], dtype='bfloat16'), c.heads) is None
            for c in cases
        ]

    assert all(supported([*ELEPHANTS64, *ADM[:2], *LONG]))
    assert not any(supported([*CIFAR10, *AWKWARD]))


@pytest.mark.parametrize('blocks', [1, 3])
def test_programs_cover_every_block_once(blocks):
    p = hopper_plan.Sizes(2, blocks * hopper_plan.BLOCK, 3, 32)
    with jax.ensure_compile_time_eval():
        found = [tuple(map(int, p.place(jnp.int32(n), 2))) for n in range(2 * blocks * 3 * 2)]
    assert sorted(found) == sorted(np.ndindex(2, blocks, 3, 2))
    # The heads of all parts are consecutive in a row of the packed array.
    columns = [p.column(h, part) for part in range(3) for h in range(3)]
    assert columns == list(range(0, 3 * 3 * 32, 32))
