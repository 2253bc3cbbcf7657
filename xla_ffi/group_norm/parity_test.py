"""The GroupNorm handlers against the float64 oracle.

The CPU handlers run the awkward cases, the GPU handlers all cases.
"""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_names
from support.group_norm import inputs, op, with_dropout
from support.parity import DTYPES, assert_parity, assert_runs_are_identical, types_in_turn

from jaxunet.ops.activation import Activation
from jaxunet.ops.dropout import drop
from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.cases import AWKWARD, CASES, ELEPHANTS64, Case
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.references import XLA
from xla_ffi.group_norm import vjp


def check(case: Case, dtype: str, batch: int):
    if case.mean and dtype != 'float32':
        pytest.skip('such a mean leaves no deviations in 16 bits')
    assert_parity(
        op(vjp.group_norm, case),
        op(reference.group_norm, case),
        inputs(case, dtype, case.batch or batch),
    )


@pytest.mark.parametrize(('case', 'dtype'), types_in_turn(AWKWARD, (*DTYPES, 'float16')))
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


def check_copies(case: Case, dtype: str, copies: int):
    """Random cotangents of the copies are added to x's own gradient."""
    ops = (
        op(group_norm, case, copies=copies)
        for group_norm in (vjp.group_norm_and_input, XLA.group_norm_and_input)
    )
    assert_parity(*ops, inputs(case, dtype, case.batch or 3))


@pytest.mark.parametrize('copies', [1, 2])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', [AWKWARD[2], AWKWARD[3]], ids=lambda c: c.name)
def test_gradients_of_other_readers_are_added(case, dtype, copies):
    check_copies(case, dtype, copies)


# Large samples. On Hopper, forward, the registers of a cluster hold most of them; the others take
# two kernels.
STREAMING = (
    Case(64, 64, (64,), batch=16),
    Case(33, 35, (128, 64), batch=13, silu=False),
    Case(57, 57, (33, 30), groups=9, batch=16),
    Case(34, 33, (256, 192), batch=15, per_sample=True),
    Case(48, 45, (96,), batch=16, mean=1000.0),
    # Two kernels even without clusters: 128 blocks of some of the channels, in vectors of eight
    # channels or one.
    Case(64, 64, (64,), batch=32),
    Case(57, 57, (34, 30), groups=8, batch=32),
    Case(96, 96, (64,), batch=16),  # more pixels than the registers of a cluster hold
)
# More pixels than the shared memory of a cluster holds.
LONG = Case(61, 41, (128, 64), groups=1, batch=2)
# Backward: one block fills the shared memory; a cluster shares an odd number of pixels.
RESIDENT = (Case(32, 31, (64, 64), batch=40), Case(31, 33, (192,), batch=2, per_sample=True))


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', [*STREAMING, LONG, *RESIDENT], ids=lambda c: c.name)
def test_large_images(case, dtype):
    check(case, dtype, case.batch)


def check_parts(side: int, channels: int, batch: int, parts: int):
    """A batch has the same dx as its parts, and its parameter gradients are the sums of theirs."""
    shape = (batch, side, side, channels)
    x, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
    scale, offset = (1 + jax.random.normal(jax.random.key(i), (1, channels)) for i in (2, 3))

    @jax.jit
    def gradients(x, dy):
        def call(x, scale, offset):
            return vjp.group_norm(Activation.of(x), Norm(scale, offset), silu=True)

        dx, *rows = jax.vjp(call, x, scale, offset)[1](dy)
        return [dx, *rows]

    whole = gradients(x, dy)
    each = [gradients(*pair) for pair in zip(*(jnp.split(a, parts) for a in (x, dy)), strict=True)]
    dx, *rows = zip(*each, strict=True)
    wanted = [jnp.concatenate(dx).astype(jnp.float32), *(sum(row) for row in rows)]
    for found, want, limit in zip(whole, wanted, (1e-3, 1e-5, 1e-5), strict=True):
        difference = found.astype(jnp.float32) - want
        assert jnp.linalg.norm(difference) <= limit * jnp.linalg.norm(want)
        assert jnp.abs(difference).max() <= 2**-7 * jnp.abs(want).max()  # dx may round differently


@pytest.mark.gpu
def test_a_batch_beyond_l2_has_the_gradients_of_its_parts():
    """Its parts are tested above, with the tilings of small batches."""
    check_parts(64, 64, 256, 8)


# Blocks that keep 2, 4 and 8 pixels per thread in registers, including threads that have fewer.
IN_REGISTERS = (
    Case(8, 8, (256, 192), batch=2),
    Case(13, 15, (64, 32), batch=7, silu=False),
    Case(16, 16, (192,), batch=32),
    Case(8, 8, (256, 192), batch=40, per_sample=True),
    Case(32, 32, (128,), batch=36),
)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', IN_REGISTERS, ids=lambda c: c.name)
def test_small_images_in_registers(case, dtype):
    check(case, dtype, case.batch)


def check_dropout(case: Case, dtype: str, batch: int):
    """Compares with the reference, and with dropout applied to the op's result.

    In the second comparison, the CPU handlers' results have equal bits. On a GPU the same elements
    are zero and the others almost equal: the kernels round at the same places, but the compiler may
    fuse other multiplications and additions.
    """
    drawn = inputs(case, dtype, case.batch or batch)
    inside, plain, after = (
        op(with_dropout(group_norm, 0.3), case)
        for group_norm in (vjp.group_norm, reference.group_norm, _dropout_after)
    )
    assert_parity(inside, plain, drawn)
    arrays = {name: jnp.asarray(value, kind) for name, (value, kind) in drawn.items()}
    dy = jax.random.normal(jax.random.key(0), jax.eval_shape(inside, **arrays).shape).astype(dtype)

    def results(call):
        def both(arrays, dy):
            y, pull = jax.vjp(lambda a: call(**a), arrays)
            return {'y': y} | pull(dy)[0]

        return {name: np.float64(value) for name, value in jax.jit(both)(arrays, dy).items()}

    found, want = results(inside), results(after)
    np.testing.assert_array_equal(found['y'] == 0, want['y'] == 0)
    for name, value in want.items():
        if jax.default_backend() == 'cpu':
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        rows = name in ('scale', 'offset') or dtype == 'float32'
        rounding = 1e-5 if rows else 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            found[name], value, rtol=rounding, atol=1e-5 * np.abs(value).max(), err_msg=name
        )


def _dropout_after(x, norm, *, dropout, **options):
    return drop(vjp.group_norm(x, norm, **options), dropout)


@pytest.mark.parametrize(('case', 'dtype'), types_in_turn(AWKWARD, (*DTYPES, 'float16')))
def test_dropout_of_awkward_shapes(case, dtype):
    if case.mean and dtype != 'float32':
        pytest.skip('such a mean leaves no deviations in 16 bits')
    check_dropout(case, dtype, 2)


# Second norms of the blocks of configs/cifar10.py, then cases for every kernel with dropout:
# register-resident, streaming and smem-resident, with and without clusters, and groups of an odd
# number of channels.
DROPPING = (
    *(
        Case(side, side, (channels,))
        for side, channels in ((32, 128), (16, 256), (8, 256), (4, 256))
    ),
    *(
        case
        for case in (*STREAMING, *IN_REGISTERS, *RESIDENT)
        if case.silu and len(case.parts) == 1
    ),
    Case(34, 33, (320,), batch=15, per_sample=True),
    Case(61, 41, (192,), groups=1, batch=2),
    Case(12, 11, (120,), groups=24, batch=3),
)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', DROPPING, ids=lambda c: c.name)
def test_dropout_inside_of_every_kernel(case, dtype):
    if case.mean and dtype != 'float32':
        pytest.skip('such a mean leaves no deviations in 16 bits')
    check_dropout(case, dtype, 5)


@pytest.mark.parametrize(
    ('case', 'inside'),
    [
        (Case(4, 4, (16,), groups=4), True),
        (Case(4, 4, (16,), groups=4, silu=False), False),
        (Case(4, 4, (8, 8), groups=4), False),
        (Case(4, 4, (20,), groups=4), False),
    ],
    ids=lambda c: c.name if isinstance(c, Case) else None,
)
def test_which_calls_have_dropout_inside(case, inside):
    """Dropout is inside for bfloat16 with SiLU, one part, and vectors of eight channels."""
    shapes = {
        name: jax.ShapeDtypeStruct(value.shape, kind)
        for name, (value, kind) in inputs(case, 'bfloat16', 2).items()
    }
    call = op(with_dropout(vjp.group_norm, 0.3), case)

    def both(**arrays):
        y, pull = jax.vjp(lambda a: call(**a), arrays)
        return y, pull(y)

    names = kernel_names.count(jax.jit(both).lower(**shapes))
    for drops in (False, True):
        for direction in ('forward', 'gradient'):
            name = f'jaxunet_group_norm_{"dropout_" * drops}{direction}'
            assert names[name] == (drops == inside), names


# The mean is compared as mean + deviation, so that its error is relative to the size of the numbers
# and not to the mean itself, which may be close to zero.
def _statistics(x, norm, *, silu):
    affine, (mean, inverse) = vjp.statistics(x, norm)
    return *affine, mean + 1 / inverse, inverse


def _plain_statistics(x, norm, *, silu):
    moments = jnp.concatenate([reference.channel_moments(part) for part in x.parts], axis=1)
    a, b = reference.group_affine(moments, norm)
    one = jnp.ones_like(norm.scale)
    inverse, shift = reference.group_affine(moments, Norm(one, 0 * one, norm.groups))
    return a, b, (1 - shift) / inverse, inverse


# Clusters of 8 and 2 blocks, and single blocks; blocks with all or some channels of a sample;
# groups of an odd number of channels, and vectors of one channel.
STATISTICS = (
    Case(64, 64, (64,), batch=1),
    Case(64, 64, (64,), batch=8),
    Case(64, 64, (64,), batch=32),
    Case(32, 32, (128, 64), batch=64),
    Case(23, 22, (256, 192), batch=3, per_sample=True),
    Case(17, 13, (48, 24), groups=24, batch=3),
    Case(33, 35, (33, 30), groups=9, batch=5),
    Case(48, 45, (96,), batch=2, mean=1000.0),
)


def check_statistics(case: Case, dtype: str):
    if case.mean and dtype != 'float32':
        pytest.skip('such a mean leaves no deviations in 16 bits')
    ops = (op(call, case) for call in (_statistics, _plain_statistics))
    assert_parity(*ops, inputs(case, dtype, case.batch), gradients=False)


@pytest.mark.parametrize('dtype', DTYPES)
def test_statistics_alone(dtype):
    check_statistics(AWKWARD[0], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', STATISTICS, ids=lambda c: c.name)
def test_statistics_of_every_tiling(case, dtype):
    check_statistics(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize('copies', [1, 2])
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize(
    'case', [*STREAMING[:4], LONG, *RESIDENT, *CASES[::3]], ids=lambda c: c.name
)
def test_gradients_of_other_readers_are_added_by_every_kernel(case, dtype, copies):
    check_copies(case, dtype, copies)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', ELEPHANTS64[::4], ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    assert_runs_are_identical(op(vjp.group_norm, case), inputs(case, dtype, 32))


@pytest.mark.gpu
def test_threads_launch_one_kernel_with_different_shared_memory():
    """No thread lowers the shared-memory limit that another thread has raised for its launch."""

    def run(side):
        x = jax.random.normal(jax.random.key(side), (2, side, side, 64), jnp.bfloat16)
        row = jnp.ones((1, 64))
        op = jax.jit(lambda x: vjp.group_norm(Activation.of(x), Norm(row, row, 8)))
        first = op(x)
        return all(bool(jnp.array_equal(op(x), first)) for _ in range(500))

    with concurrent.futures.ThreadPoolExecutor() as threads:
        assert all(threads.map(run, [4, 8, 16, 32] * 2))


@pytest.mark.parametrize('case', AWKWARD[:4], ids=lambda c: c.name)
def test_the_backward_pass_writes_the_activation_again(case):
    """Equal to the forward result up to a rounding or two: both compute in float32 or more."""
    drawn = {
        name: jnp.asarray(value, dtype)
        for name, (value, dtype) in inputs(case, 'float32', case.batch or 2).items()
    }
    parts = tuple(value for name, value in drawn.items() if name.startswith('x'))
    x, norm = Activation(parts), Norm(drawn['scale'], drawn['offset'], case.groups)
    y = vjp.group_norm(x, norm, silu=case.silu)
    _, stats = vjp.statistics(x, norm)
    gradient = functools.partial(vjp.gradient, parts, jnp.ones_like(y), norm, stats, silu=case.silu)
    found, plain = gradient(activation=True), gradient()
    (active,) = found.active
    np.testing.assert_allclose(active, y, rtol=0, atol=4e-7 * float(jnp.max(jnp.abs(y))))
    assert plain.active == ()
    jax.tree.map(np.testing.assert_array_equal, (found.dx, found.norm), (plain.dx, plain.norm))


def test_there_are_at_most_two_copies():
    x, row = Activation.of(jnp.ones((1, 2, 2, 8))), jnp.ones((1, 8))
    norm = Norm(row, row, 4)
    for variant in (vjp.group_norm_and_input, XLA.group_norm_and_input):
        assert len(variant(x, norm, copies=2).copies) == 2
        for copies in (0, 3):
            with pytest.raises(
                ValueError, match=f'group_norm_and_input: copies={copies}; expected 1 to 2'
            ):
                variant(x, norm, copies=copies)
