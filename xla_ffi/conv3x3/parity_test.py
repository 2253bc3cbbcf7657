"""The convolution handlers against the float64 oracle.

The CPU handlers run the awkward cases, the GPU handlers all cases.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conv3x3 import inputs, op
from support.parity import DTYPES, assert_parity, assert_runs_are_identical, types_in_turn

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3 import reference
from jaxunet.ops.conv3x3.cases import AWKWARD, CASES, Case
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.references import XLA
from xla_ffi.conv3x3 import vjp
from xla_ffi.conv3x3.calls import call_handler
from xla_ffi.conv3x3.parameter_gradients import parameter_gradients

# Shortcuts of several parts. Some parts begin at whole tiles of 64 channels, so that one launch
# writes all gradients; others do not. One shortcut has more channels than a block of the weight
# gradient handles; others belong to convolutions that take the kernels for few channels or
# features.
SHORTCUTS = (
    Case(8, 12, (64,), 64, (128, 64, 40), batch=3),
    Case(6, 9, (16,), 24, (72, 8, 40), groups=4, batch=2),
    Case(8, 8, (64,), 72, (384, 72), batch=2),
    Case(4, 5, (8,), 16, (8, 16), norm=False, batch=2),
    Case(4, 5, (16,), 8, (24,), groups=4, batch=2),
    Case(3, 4, (5,), 7, (3, 2, 4, 1), norm=False, batch=2),
)

MOST_UNSHIFTED = 4096  # kMostUnshifted in dispatch.h

# Images of four rows. The weight gradient reads two samples at a time, or four of 4 × 4; these
# batches are not multiples of that. The cases have two strips across, channels that fill whole
# tiles and channels that do not, and so many samples of one strip that several blocks share the
# sums of dy.
SMALL = (
    Case(4, 4, (64, 64), 128, batch=7, per_sample=True),
    Case(4, 4, (64, 72), 72, (40, 64), norm=False, batch=3, per_sample=True),
    Case(4, 12, (64,), 72, (40,), batch=5, per_sample=True),
    Case(8, 8, (128, 64), 64, batch=37, per_sample=True),
)


# Images smaller than a strip, which the multistage kernels of portable/ compute on every GPU.
# Channels and features of 8 times an odd number end in the middle of tiles and of steps of K.
SMALLEST = (
    Case(1, 1, (8,), 24, (16,), norm=False, batch=3),
    Case(3, 5, (24, 40), 72, (8, 64), norm=False, batch=1),
    Case(2, 3, (40,), 104, (104,), norm=False, batch=3, per_sample=True),
    Case(1, 5, (72, 8), 56, (56,), groups=8, batch=1),
    Case(3, 3, (8, 24), 136, (40, 72), groups=4, batch=3, per_sample=True),
)

# Images of 4 × 4 with so many samples, and features or channels, that the Hopper kernel packs four
# samples in a strip (with 19, the last strip has three) or eight (with 59, it has three). Some
# parts are not whole chunks.
PACKED = (
    Case(4, 4, (40, 64), 520, (520,), norm=False, batch=19, per_sample=True),
    Case(4, 4, (40, 64), 520, (16, 72), norm=False, batch=59, per_sample=True),
    Case(4, 4, (104,), 520, (520,), groups=8, batch=59, per_sample=True),
    Case(4, 4, (520,), 72, (64, 456), norm=False, batch=19),
    Case(4, 4, (520,), 72, (64, 456), norm=False, batch=59),
)

# Every tile of the Hopper kernel for the input gradient, images that are whole strips or not,
# channels that fill tiles or not, and parts of one chunk or several.
TILES = (
    Case(32, 32, (64,), 64, (64,), batch=7, per_sample=True),
    Case(33, 35, (64, 64), 72, batch=3),
    Case(64, 64, (64,), 64, batch=9),
    Case(40, 28, (64, 128, 8), 64, (72, 8), groups=8, batch=2),
    Case(32, 32, (128,), 128, (128,), batch=36, per_sample=True),
    Case(49, 33, (192,), 40, batch=5),
    Case(32, 40, (192, 128), 128, batch=7),
    Case(36, 44, (256, 192), 64, batch=2, per_sample=True),
    Case(32, 32, (256,), 256, batch=9),
    Case(41, 39, (40,), 16, groups=4, batch=2),
)

# So many tiles that the blocks of the Hopper kernel draw them (hopper/tile_choices_test.cc), from
# single and packed strips.
DRAWN = (
    Case(64, 48, (64,), 64, (64,), batch=48, per_sample=True),
    Case(4, 4, (72,), 520, norm=False, batch=480),
)


def check(case: Case, dtype: str, batch: int):
    assert_parity(op(vjp, case), op(reference, case), inputs(case, dtype, case.batch or batch))


@pytest.mark.parametrize(
    ('case', 'dtype'), types_in_turn(AWKWARD + SHORTCUTS + SMALL, (*DTYPES, 'float16'))
)
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', SMALLEST, ids=lambda c: c.name)
def test_awkward_shapes_of_the_smallest_images(case, dtype):
    check(case, dtype, 3)


@pytest.mark.parametrize('flipped', [False, True])
@pytest.mark.parametrize('side', [3, 7])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_awkward_parts_of_a_residual_are_added_where_they_lie(dtype, side, flipped):
    """Includes parts without channels. The ops join parts that no shortcut projects."""
    shapes = {'x': 40, 'first': 24, 'second': 48}
    arrays = {
        name: jax.random.normal(jax.random.key(i), (3, side, side, channels), dtype)
        for i, (name, channels) in enumerate(shapes.items())
    }
    kernel = 0.1 * jax.random.normal(
        jax.random.key(3), (3, 3, *((72, 40) if flipped else (40, 72)))
    )
    shift, none = jnp.arange(72.0)[None], jnp.zeros((3, side, side, 0), dtype)

    def call(images, residual):
        return call_handler((images, (shift,), residual, ()), (kernel,), flipped=flipped)

    x, first, second = arrays.values()
    got = call((none, x), (first, none, second))
    want = call((x,), (jnp.concatenate([first, second], axis=3),))
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7, atol=1e-3
    )


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize(
    'case',
    [c for c in AWKWARD if c.norm and all(n % 8 == 0 for n in c.parts)],
    ids=lambda c: c.name,
)
def test_activation_inside_the_convolution(case, dtype, monkeypatch):
    monkeypatch.setattr(vjp, 'FUSED_PIXELS', 0)
    check(case, dtype, 2)


@pytest.mark.parametrize('keeps', [True, False])
@pytest.mark.parametrize('case', AWKWARD[1:3], ids=lambda c: c.name)
def test_an_activation_is_kept_or_recomputed(case, keeps, monkeypatch):
    monkeypatch.setattr(vjp, '_keeps_activation', lambda: keeps)
    call, arrays = op(vjp, case), inputs(case, 'float32', 2)
    given = {name: jnp.asarray(value, kind) for name, (value, kind) in arrays.items()}
    gradient = jax.jit(jax.grad(lambda arrays: jnp.sum(call(**arrays))))
    # The other handlers have the attribute, too; it is true only where an activation is written.
    assert ('activation = true' in gradient.lower(given).as_text()) == (not keeps)
    # Another function than in the other case, which may have been compiled already.
    assert_parity(functools.partial(call), op(reference, case), arrays)


@pytest.mark.gpu
@pytest.mark.parametrize('fused_pixels', [0, vjp.FUSED_PIXELS], ids=['fused', 'default'])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', TILES, ids=lambda c: c.name)
def test_every_tile(case, dtype, fused_pixels, monkeypatch):
    monkeypatch.setattr(vjp, 'FUSED_PIXELS', fused_pixels)
    check(case, dtype, case.batch)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', [TILES[i] for i in (0, 4, 7)], ids=lambda c: c.name)
def test_runs_of_tiles_are_identical(case, dtype):
    assert_runs_are_identical(op(vjp, case), inputs(case, dtype, 32))


@pytest.mark.parametrize('copies', [1, 2])
@pytest.mark.parametrize(
    ('case', 'dtype'),
    [(AWKWARD[1], 'float32'), (AWKWARD[2], 'bfloat16')],
    ids=lambda c: getattr(c, 'name', c),
)
def test_gradients_of_other_readers_are_added(case, dtype, copies):
    ops = [op(module, case, copies=copies) for module in (vjp, XLA)]
    assert_parity(*ops, inputs(case, dtype, case.batch or 2))


@pytest.mark.parametrize('rows', [('scale',), ('offset',), ('scale', 'offset')], ids='+'.join)
def test_samples_with_scale_or_offset_of_their_own(rows):
    """Their gradients come from the norm; the gradients of shared rows come from the weight
    gradient.
    """
    case, batch = AWKWARD[1], 3

    again = [inputs(case, 'float32', batch) for _ in range(batch)]
    arrays = again[0] | {
        name: (np.concatenate([a[name][0] for a in again]), 'float32') for name in rows
    }
    assert_parity(op(vjp, case), op(reference, case), arrays)


@pytest.mark.parametrize(('batch', 'height'), [(0, 3), (2, 0), (3, 4)])
def test_without_pixels_the_weight_gradient_is_zero_and_still_adds_the_sums_of_a_norm(
    batch, height
):
    x, dy, sums = (
        jnp.ones((batch, height, 5, 6)),
        jnp.zeros((batch, height, 5, 7)),
        jnp.arange(batch * 12.0).reshape(batch, 2, 6),
    )
    kernel, shift = jnp.ones((3, 3, 6, 7)), jnp.ones((1, 7))
    conv = Convolution(image=Activation.of(x), kernel=kernel, shift=shift)
    found, of_norm = parameter_gradients(conv, dy, sums)
    offset, scale = jnp.split(jnp.sum(sums, axis=0), 2)
    for gradient, wanted in zip(
        (*of_norm, found.kernel, found.shift),
        (scale, offset, 0 * kernel, 0 * shift),
        strict=True,
    ):
        np.testing.assert_array_equal(gradient, wanted)
    assert found.residual is found.shortcut is None


def test_under_vmap_the_mapped_axis_joins_the_batch(monkeypatch):
    """One call per sample gives the same bits. The convolution applies the norm itself here."""
    monkeypatch.setattr(vjp, 'FUSED_PIXELS', 0)
    case = Case(32, 32, (8,), 8, (16,), groups=2, batch=6)
    arrays = {name: jnp.asarray(v, t) for name, (v, t) in inputs(case, 'bfloat16', 6).items()}
    batched = {name: v.shape[0] == 6 for name, v in arrays.items()}
    split = {n: v.reshape(3, 2, *v.shape[1:]) if batched[n] else v for n, v in arrays.items()}
    call = op(vjp, case)
    mapped = jax.vmap(
        lambda a: call(**a), in_axes=({name: 0 if b else None for name, b in batched.items()},)
    )
    lowered = jax.jit(mapped).lower(split)
    assert 'stablehlo.while' not in lowered.as_text()
    assert 'activation = true' in lowered.as_text()
    got, want = lowered.compile()(split), jax.jit(lambda a: call(**a))(arrays)
    np.testing.assert_array_equal(got.reshape(want.shape), want)


@pytest.mark.parametrize(
    ('channels', 'features'), [(3, 64), (64, 3), (64, 72), (5, 7), (3, MOST_UNSHIFTED)]
)
def test_without_a_shift_the_results_are_those_of_zeros(channels, features):
    """The shapes take the kernels for few channels, for few features, for eights and for any."""
    x = jax.random.normal(jax.random.key(0), (2, 7, 5, channels))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, channels, features))
    zeros = jnp.zeros((1, features))

    @jax.jit
    def both(x, kernel):
        """Calls with all types and directions: one program compiles sooner than twelve."""
        return {
            (dtype, flipped): [
                call_handler(
                    ((x.astype(dtype),), shifts, (), ()),
                    (kernel.swapaxes(2, 3) if flipped else kernel,),
                    flipped=flipped,
                )
                for shifts in ((), (zeros,))
            ]
            for dtype in (*DTYPES, 'float16')
            for flipped in (False, True)
        }

    for name, (got, want) in both(x, kernel).items():
        np.testing.assert_array_equal(got, want, err_msg=str(name))


def test_with_more_features_than_zeros_another_kernel_takes_the_shiftless_call():
    x = jax.random.normal(jax.random.key(0), (1, 4, 4, 3), 'bfloat16')
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, MOST_UNSHIFTED + 8))
    got, want = (
        call_handler(((x,), shifts, (), ()), (kernel,)).astype(jnp.float32)
        for shifts in ((), (jnp.zeros((1, kernel.shape[3])),))
    )
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
def test_more_samples_than_a_grid_has_blocks_in_y():
    """The sums of dy then take several launches; the sums over one pixel are dy itself."""
    x, dy = (jax.random.normal(jax.random.key(seed), (2 * 65535 + 1, 1, 1, 8)) for seed in range(2))
    kernel, shift = jnp.ones((3, 3, 8, 8)), jnp.ones((x.shape[0], 8))
    conv = Convolution(image=Activation.of(x), kernel=kernel, shift=shift)
    found, _ = parameter_gradients(conv, dy)
    np.testing.assert_array_equal(found.shift, dy[:, 0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES + SHORTCUTS + SMALL, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', PACKED, ids=lambda c: c.name)
def test_images_of_several_samples_side_by_side(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('fused_pixels', [0, vjp.FUSED_PIXELS], ids=['fused', 'default'])
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', DRAWN, ids=lambda c: c.name)
def test_tiles_drawn_from_a_counter(case, dtype, fused_pixels, monkeypatch):
    monkeypatch.setattr(vjp, 'FUSED_PIXELS', fused_pixels)
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', [*CASES[:36:7], CASES[6], CASES[44]], ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    """There are more pixels than one block sums, as in training."""
    assert_runs_are_identical(op(vjp, case), inputs(case, dtype, 32))
