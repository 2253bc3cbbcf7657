"""The Triton kernels of attention, interpreted against the float64 oracle and lowered for a GPU:
values, gradients, transformations, mistakes.
"""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import plain
from support.parity import assert_parity, draw
from support.turns import in_turn

from jaxunet.ops.attention import reference
from jaxunet.ops.checks import KERNEL_TYPES as DTYPES
from jaxunet.runtime import device
from pallas_kernels.attention import triton, triton_backward
from pallas_kernels.attention.tiles import (
    KERNELS,
    Tile,
    Tiles,
    candidates,
    default_tile,
    default_tiles,
    dot_size,
)
from pallas_kernels.attention.vjp import attention

# JAX 0.11 announces that the Triton lowering will leave Pallas.
pytestmark = pytest.mark.filterwarnings(
    'ignore:The Pallas Triton backend is deprecated:DeprecationWarning'
)

# Small tiles, so that every size has several blocks of queries and keys, and every loop and tail
# runs.
SMALL = Tile(32, 16, 4), (Tile(16, 32, 4), Tile(32, 16, 4))


def small(tokens: int, *, one_kernel: bool = False) -> Tiles:
    return Tiles(SMALL[0], Tile(16, dot_size(tokens), 4) if one_kernel else SMALL[1])


def check(batch, tokens, heads, width, dtype, tiles=None, *, values=None, gradients=True):
    def kernel(qkv):
        return attention(qkv, num_heads=heads, interpret=True, tiles=tiles)

    qkv = draw((batch, tokens, 3 * heads * width), dtype) if values is None else values
    assert_parity(kernel, plain(heads), {'qkv': (qkv, dtype)}, gradients=gradients)


def example(*shape, dtype='float32'):
    return jnp.asarray(draw(shape, dtype), dtype)


def loss(qkv, heads=2, tiles=None, op=None):
    op = op or (lambda qkv: attention(qkv, num_heads=heads, interpret=True, tiles=tiles))
    return jnp.sum(jnp.sin(op(qkv).astype(jnp.float32)))


def same(found, expected):
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('one_kernel', [True, False], ids=['one_kernel', 'two_kernels'])
def test_types(dtype, one_kernel):
    check(2, 64, 2, 32, dtype, small(64, one_kernel=one_kernel))


@pytest.mark.parametrize(
    ('tokens', 'dtype', 'one_kernel'),
    in_turn(
        {'1': 1, '16': 16, '49': 49, '77': 77},
        *itertools.product(('float32', 'bfloat16'), (True, False)),
    ),
)
def test_tokens_that_fill_no_block(tokens, dtype, one_kernel):
    check(1, tokens, 2, 16, dtype, small(tokens, one_kernel=one_kernel))


@pytest.mark.parametrize(
    ('dtype', 'tokens', 'width'), in_turn({dtype: dtype for dtype in DTYPES}, (40, 32), (33, 256))
)
def test_dk_and_dv_of_two_programs(tokens, width, dtype):
    check(2, tokens, 1, width, dtype, Tiles(SMALL[0], (SMALL[1][0], Tile(32, 16, 4, split=2))))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_wide_heads_of_few_tokens_in_one_kernel(dtype):
    check(2, 16, 1, 256, dtype, small(16, one_kernel=True))


@pytest.mark.parametrize(
    ('width', 'dtype'), [(32, 'float16'), (64, 'float32'), (128, 'bfloat16'), (256, 'float32')]
)
def test_head_widths(width, dtype):
    check(1, 33, 2, width, dtype)


@pytest.mark.parametrize(
    ('head', 'one_kernel'),
    in_turn({'2x1': (2, 1), '3x8': (3, 8), '2x24': (2, 24), '1x80': (1, 80)}, (True,), (False,)),
)
def test_padded_head_widths(head, one_kernel):
    heads, width = head
    check(2, 20, heads, width, 'float32', small(20, one_kernel=one_kernel))


@pytest.mark.parametrize(
    ('tokens', 'heads', 'width'), [(64, 8, 32), (256, 1, 32), (256, 1, 64)], ids=str
)
def test_default_tiles_of_the_unet(tokens, heads, width):
    check(1, tokens, heads, width, 'bfloat16')


def large(tokens, width):
    """Whole numbers, so that the logits are exact in every type; some hundreds, so that their
    exponentials overflow.
    """
    return np.round(draw((1, tokens, 3 * width), 'bfloat16', scale=10))


@pytest.mark.parametrize('dtype', DTYPES)
def test_large_logits(dtype):
    check(1, 40, 1, 16, dtype, small(40), values=large(40, 16), gradients=False)


@pytest.mark.parametrize(
    ('backward', 'dtype'),
    in_turn(
        {
            'one_kernel': Tile(16, 64, 4),
            'two_kernels': (Tile(16, 64, 4), Tile(32, 16, 4)),
            'many_blocks': SMALL[1],
        },
        *((dtype,) for dtype in DTYPES),
    ),
)
def test_gradients_of_large_logits(backward, dtype):
    """Gradients are finite, and as exact as the type allows at the scale of the summands: if one
    key has all the weight, the sums cancel almost completely.
    """
    values = large(40, 16)
    op = functools.partial(attention, num_heads=1, interpret=True, tiles=Tiles(SMALL[0], backward))
    found = np.asarray(
        jax.grad(lambda qkv: jnp.sum(op(qkv).astype(jnp.float32)))(jnp.asarray(values, dtype)),
        np.float64,
    )
    with jax.enable_x64(True):
        exact = np.asarray(
            jax.grad(lambda qkv: jnp.sum(reference.attention(qkv, num_heads=1)))(
                jnp.asarray(values)
            )
        )
    summed = np.abs(values).max() ** 2 * 16 * 16**-0.5  # the largest k, times a row's sum of |dO·v|
    assert np.abs(found - exact).max() <= float(jnp.finfo(dtype).eps) * summed


@pytest.mark.parametrize('one_kernel', [True, False], ids=['one_kernel', 'two_kernels'])
def test_very_negative_logits_and_padding(one_kernel):
    """Every logit is far below zero, so padded keys (with logit zero) would dominate if they were
    not masked: weights must stay uniform.
    """
    q, v = np.ones((1, 20, 16)), draw((1, 20, 16), 'float32')
    qkv = jnp.asarray(np.concatenate([30 * q, -30 * q, v], axis=-1), jnp.float32)
    tiles = small(20, one_kernel=one_kernel)
    out, pull = jax.vjp(lambda qkv: attention(qkv, num_heads=1, interpret=True, tiles=tiles), qkv)
    same(out, np.broadcast_to(v.mean(1, keepdims=True), v.shape))
    _, dk, dv = np.split(np.asarray(pull(jnp.ones_like(out))[0]), 3, axis=-1)
    same(dv, np.ones_like(dv))
    assert np.isfinite(dk).all()


def test_log_sum_exp():
    qkv = example(2, 40, 3 * 2 * 16)
    _, lse, _ = triton.forward(qkv, 2, SMALL[0], interpret=True)
    q, k, _ = np.moveaxis(np.asarray(qkv, np.float64).reshape(2, 40, 3, 2, 16), 2, 0)
    logits = np.einsum('bqhd,bkhd->bhqk', q, k) / 4
    largest, log_sum = np.moveaxis(np.asarray(lse), 2, 0)
    same(largest, 4 * logits.max(-1))
    same(largest / 4 * np.log2(np.e) + log_sum, np.log2(np.exp(logits).sum(-1)))
    assert lse.dtype == jnp.float32


@pytest.mark.parametrize('one_kernel', [True, False], ids=['one_kernel', 'two_kernels'])
def test_vmap(one_kernel):
    qkv, tiles = example(2, 3, 20, 96), small(20, one_kernel=one_kernel)
    gradient = jax.value_and_grad(lambda x: loss(x, tiles=tiles))
    for found, expected in zip(
        jax.jit(jax.vmap(gradient))(qkv), zip(*map(gradient, qkv), strict=True), strict=True
    ):
        same(found, np.stack(expected))
    nested = jax.vmap(
        jax.vmap(lambda x: attention(x[None], num_heads=2, interpret=True, tiles=tiles)[0])
    )(qkv)
    same(
        nested,
        attention(qkv.reshape(6, 20, 96), num_heads=2, interpret=True, tiles=tiles).reshape(
            nested.shape
        ),
    )


def test_scan_and_checkpoint():
    """Two layers, each rematerialised, in a scan over weights, give the same as the plain op."""
    weights, x = example(2, 16, 48) / 4, example(1, 20, 16)

    def deep(weights, op):
        def layer(x, w):
            return x + op(jnp.matmul(x, w, precision='highest')), None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, weights)[0]))

    found, expected = (
        jax.jit(jax.grad(lambda w, op=op: deep(w, op)))(weights)
        for op in (
            lambda qkv: attention(qkv, num_heads=1, interpret=True, tiles=small(20)),
            lambda qkv: reference.attention(qkv, num_heads=1),
        )
    )
    same(found, expected)


def test_identical_from_run_to_run():
    qkv, gradient = example(2, 40, 96), jax.jit(jax.grad(lambda x: loss(x, tiles=small(40))))
    np.testing.assert_array_equal(gradient(qkv), gradient(qkv))


def kernels_in(function, *shapes):
    """Counts the calls of each kernel in the program for an H200, and checks that nothing is
    transposed or multiplied outside of them.
    """
    unchecked = [jax.export.DisabledSafetyCheck.custom_call('__gpu$xla.gpu.triton')]
    with device.use(device.Target.TRITON):
        exported = jax.export.export(
            jax.jit(function), platforms=['cuda'], disabled_checks=unchecked
        )(*shapes)
    text = exported.mlir_module()
    assert 'stablehlo.transpose' not in text
    assert 'stablehlo.dot_general' not in text
    return collections.Counter(re.findall(r'name = "(jaxunet_\w+)"', text))


WORKLOADS = [
    (256, 6, 32),
    (64, 8, 32),
    (256, 1, 256),
    (1024, 4, 64),
    (256, 8, 64),
    (4096, 8, 64),
    (1024, 8, 128),
    (77, 2, 24),
]


@pytest.mark.parametrize(
    ('workload', 'dtype'),
    in_turn(
        {'x'.join(map(str, workload)): workload for workload in WORKLOADS},
        *((dtype,) for dtype in DTYPES),
    ),
)
def test_lowers_for_a_gpu(workload, dtype):
    """Forward is one kernel, backward one or two, and nothing is transposed between them."""
    tokens, heads, width = workload
    shape = jax.ShapeDtypeStruct((2, tokens, 3 * heads * width), dtype)
    assert kernels_in(lambda x: attention(x, num_heads=heads), shape) == {triton.FORWARD: 1}
    backward = default_tiles(tokens, width, dtype).backward
    names = (
        [triton_backward.BACKWARD]
        if isinstance(backward, Tile)
        else [triton_backward.BACKWARD_DQ, triton_backward.BACKWARD_DKV]
    )
    found = kernels_in(
        lambda x, g: jax.vjp(lambda x: attention(x, num_heads=heads), x)[1](g),
        shape,
        _output(shape),
    )
    assert found == dict.fromkeys([triton.FORWARD, *names], 1)


def _output(shape):
    return jax.ShapeDtypeStruct((*shape.shape[:2], shape.shape[2] // 3), shape.dtype)


def test_lowers_for_a_gpu_under_vmap():
    shape = jax.ShapeDtypeStruct((3, 2, 64, 192), jnp.bfloat16)
    pull = jax.vmap(
        lambda x, g: jax.vjp(lambda x: attention(x, num_heads=2, tiles=small(64)), x)[1](g)
    )
    assert kernels_in(
        pull, shape, jax.ShapeDtypeStruct((3, 2, 64, 64), jnp.bfloat16)
    ) == dict.fromkeys(
        [triton.FORWARD, triton_backward.BACKWARD_DQ, triton_backward.BACKWARD_DKV], 1
    )


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize(
    ('tokens', 'width'),
    sorted({(t, d) for t, _, d in WORKLOADS} | {(1, 1), (9, 256), (10_000, 80)}),
    ids=str,
)
def test_tiles(kernel, tokens, width, dtype):
    """Every default, and every candidate, is a valid tile of its kernel."""
    for tile in [
        default_tile(kernel, tokens, width, dtype),
        *candidates(kernel, tokens, width, dtype),
    ]:
        assert tile.queries <= dot_size(tokens)
        assert tile.keys >= tokens if kernel == 'backward' else tile.keys <= dot_size(tokens)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (
            lambda: attention(jnp.zeros((1, 4, 10)), num_heads=2, interpret=True),
            r'10 packed channels are not 3 x 2 heads',
        ),
        (
            lambda: attention(jnp.zeros((1, 4, 12)), num_heads=0, interpret=True),
            r'12 packed channels are not 3 x 0 heads',
        ),
        (
            lambda: attention(jnp.zeros((1, 4, 3 * 320)), num_heads=1, interpret=True),
            r'width 320.*up to 256',
        ),
        (
            lambda: attention(jnp.zeros((1, 4, 12), jnp.int32), num_heads=1, interpret=True),
            r'int32.*bfloat16, float16 or float32',
        ),
        (lambda: Tile(24, 32, 4), r'queries=24.*power of two'),
        (lambda: Tile(32, 8, 4), r'keys=8.*at least 16'),
        (lambda: Tile(32, 32, 3), r'warps=3'),
        (lambda: Tile(32, 32, 4, 0), r'stages=0'),
        (lambda: default_tile('sideways', 64, 32, 'float32'), r"'sideways'.*forward, backward"),
        (lambda: candidates('sideways', 64, 32, 'float32'), r"'sideways'.*forward, backward"),
        (
            lambda: jax.grad(lambda x: loss(x, tiles=Tiles(SMALL[0], Tile(16, 16, 4))))(
                jnp.zeros((1, 20, 96))
            ),
            r'keys=16.*all 20 tokens',
        ),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
