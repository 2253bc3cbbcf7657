"""Attention's Hopper kernels: in JAX's interpreter of Mosaic GPU, lowered for CUDA, and under vmap;
and the shapes that they do not accept.
"""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_names
from support.attention import plain
from support.parity import assert_parity, draw
from support.turns import in_turn

from jaxunet.ops.attention.cases import ADM, AWKWARD, CIFAR10, ELEPHANTS64, LONG
from jaxunet.runtime import device
from pallas_kernels import hopper_views
from pallas_kernels.attention import dispatch, hopper, hopper_kernels, hopper_plan, vjp
from pallas_kernels.jax_modules import mosaic_gpu as plgpu

TYPES = (('bfloat16',), ('float16',))


@pytest.fixture
def interpreted(monkeypatch):
    """Runs Mosaic GPU kernels in JAX's interpreter on the CPU."""
    params = pytest.importorskip('jax._src.pallas.mosaic_gpu.interpret.params')

    def products(*operands):
        # The interpreter's wgmma takes no left operands from registers, and in JAX 0.10 no
        # transposes.
        found = []
        for kind, left, right in operands:
            a = (left if isinstance(left, jax.Array) else left[...]).astype(jnp.float32)
            b = right[...].astype(jnp.float32)
            b = b.T if kind == hopper_kernels.NT else b
            found.append(jnp.matmul(a, b, precision='highest'))
        return tuple(found)

    monkeypatch.setattr(hopper_kernels, 'products', products)
    if inspect.signature(plgpu.load).parameters.get('idx') is not None:
        # JAX 0.10's interpreter has no layouts.
        monkeypatch.setattr(hopper_views, 'load', lambda ref, _: ref[...])
        monkeypatch.setattr(plgpu, 'layout_cast', lambda x, _: x)
    jax.clear_caches()  # drops functions that were traced for CUDA, and below for the interpreter
    with params.force_gpu_interpret_mode():
        yield
    jax.clear_caches()


def op(heads):
    def call(qkv):
        with device.use(device.Target.HOPPER):
            return vjp.attention(qkv, num_heads=heads)

    return call


@pytest.mark.parametrize(
    ('shape', 'dtype'),
    in_turn(
        {
            'one block': (2, 64, 2, 32),
            'two blocks': (1, 128, 1, 64),
            'more blocks than slots': (1, 192, 2, 32),
        },
        *TYPES,
    ),
)
def test_kernels_interpreted(interpreted, shape, dtype):
    batch, tokens, heads, width = shape
    qkv = draw((batch, tokens, 3 * heads * width), dtype)
    assert_parity(op(heads), plain(heads), {'qkv': (qkv, dtype)})


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_large_logits_interpreted(interpreted, dtype):
    """Whole numbers whose exponentials overflow: gradients are finite, and as exact as the type
    allows at the scale of the summands. If one key has all the weight, the sums cancel almost
    completely.
    """
    values = np.round(draw((1, 128, 96), 'bfloat16', scale=10))

    def gradient(call):
        return jax.grad(lambda qkv: jnp.sum(call(qkv).astype(jnp.float32)))

    found = np.asarray(gradient(op(1))(jnp.asarray(values, dtype)), np.float64)
    with jax.enable_x64(True):
        exact = np.asarray(gradient(plain(1))(jnp.asarray(values)))
    summed = np.abs(values).max() ** 2 * 32 * 32**-0.5  # the largest k, times a row's Σ |dO·v|
    assert np.abs(found - exact).max() <= float(jnp.finfo(dtype).eps) * summed


def test_log_sum_exp_interpreted(interpreted):
    """Its two terms, as `triton` states them; and the outputs in float32."""
    qkv = jnp.asarray(draw((2, 64, 192), 'bfloat16'), jnp.bfloat16)
    out, lse, exact = hopper.forward_for_training(qkv, 2)
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
def test_other_shapes_go_to_triton(shape, dtype, message):
    qkv, heads = packed(*shape, dtype), shape[2]
    reason = hopper_plan.supports(qkv, heads)
    assert reason is not None
    assert re.search(message, reason)
    with pytest.raises(ValueError, match=f'attention on Hopper: .*{message}'):
        hopper_plan.plan(qkv, heads)
    with device.use(device.Target.HOPPER):
        assert dispatch.choose(qkv, heads, interpret=False) is not None


def test_other_targets_go_to_triton():
    qkv = packed(2, 64, 2, 32)
    with device.use(device.Target.HOPPER):
        assert dispatch.choose(qkv, 2, interpret=False) is None
        assert dispatch.choose(qkv, 2, interpret=True) is not None
    for target in (device.Target.TRITON, device.Target.INTERPRET):
        with device.use(target):
            assert dispatch.choose(qkv, 2, interpret=False) is not None


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
    p = hopper_plan.Plan(2, blocks * hopper_plan.BLOCK, 3, 32)
    with jax.ensure_compile_time_eval():
        found = [tuple(map(int, p.place(jnp.int32(n), 2))) for n in range(2 * blocks * 3 * 2)]
    assert sorted(found) == sorted(np.ndindex(2, blocks, 3, 2))
    # The heads of all parts are consecutive in a row of the packed array.
    columns = [p.column(h, part) for part in range(3) for h in range(3)]
    assert columns == list(range(0, 3 * 3 * 32, 32))
