"""The pieces of the GroupNorm kernels, interpreted; the op under JAX's transformations; and which
kernels a GPU would run.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_names
from support.parity import assert_parity, draw

from jaxunet.ops.activation import Activation, at_least_float32
from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.cases import ELEPHANTS64
from jaxunet.runtime import device
from pallas_kernels.group_norm import backward, dispatch, forward, parameters, statistics, vjp
from pallas_kernels.group_norm.tiles import Tile, fit

# JAX warns at every lowering that it will drop its Triton backend.
pytestmark = pytest.mark.filterwarnings(
    'ignore:The Pallas Triton backend is deprecated:DeprecationWarning'
)

# One step that covers all pixels; several steps; several programs that share the pixels, with a
# last one that has fewer.
TILES = [Tile(8, 64, 1), Tile(16, 4, 2), Tile(8, 4, 1, splits=3)]
SHAPES = [(2, 7, 5, 12), (1, 8, 8, 16), (2, 3, 3, 5)]


@pytest.mark.parametrize(
    ('shape', 'tile'),
    [*zip(SHAPES, TILES, strict=True), (SHAPES[0], TILES[1]), (SHAPES[0], TILES[2])],
    ids=str,
)
@pytest.mark.parametrize(('dtype', 'mean'), [('float32', 3000), ('bfloat16', 1)])
def test_moments(shape, dtype, mean, tile):
    assert_parity(
        lambda x: statistics.moments(x, tile=tile, interpret=True),
        reference.channel_moments,
        {'x': (draw(shape, dtype, offset=mean), dtype)},
        gradients=False,
    )


def plain_sums(x):
    return jnp.sum(x, axis=(1, 2), dtype=at_least_float32(x.dtype))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
    ('shape', 'tile'), [*zip(SHAPES, TILES, strict=True), (SHAPES[0], TILES[2])], ids=str
)
def test_channel_sums(shape, tile, dtype):
    assert_parity(
        lambda x: statistics.channel_sums(x, tile=tile, interpret=True),
        plain_sums,
        {'x': (draw(shape, dtype), dtype)},
        gradients=False,
    )


@pytest.mark.parametrize('batch_of_scale', [1, 3])
def test_affine_from_the_moments_of_two_parts(batch_of_scale):
    known = {
        name: (np.abs(draw((3, c, 2), 'float32')) + 0.5, 'float32')
        for name, c in (('x', 20), ('y', 10))
    }
    affine = {
        name: (draw((batch_of_scale, 30), 'float32'), 'float32') for name in ('scale', 'offset')
    }

    def plain(x, y, scale, offset):
        moments = jnp.concatenate([x, y], axis=1)
        a, b = reference.group_affine(moments, scale, offset, groups=5, eps=1e-5)
        return a, b, a / scale

    def kernel(x, y, scale, offset):
        a, b, _, inverse = statistics.affine(
            [x, y], scale, offset, groups=5, eps=1e-5, interpret=True
        )
        return a, b, inverse

    assert_parity(kernel, plain, known | affine, gradients=False)


@functools.cache  # so that all tiles have one oracle
def plain_both_ways(groups, silu):
    def plain(x, y, dy, scale, offset):
        def op(x, y, scale, offset):
            return reference.group_norm(Activation((x, y)), scale, offset, groups=groups, silu=silu)

        out, pull = jax.vjp(op, x, y, scale, offset)
        return out, out, pull(dy)

    return plain


@pytest.mark.parametrize(
    ('tile', 'silu'), [(TILES[0], True), (TILES[1], False), (TILES[2], True)], ids=str
)
@pytest.mark.parametrize(
    ('channels', 'groups'),
    [((4, 8), 3), *(pytest.param(c, 4, marks=pytest.mark.long) for c in ((8, 16), (16, 24)))],
    ids=str,
)
def test_two_launches_each_way_and_the_recomputed_activation(channels, groups, tile, silu):
    """A fused convolution gets the sums and the activation from one read, then the gradient from
    the sums.

    Groups of 6 and 10 channels cross the boundaries of the programs' 8 or 16 channels.
    """
    parts = {
        name: (draw((2, 5, 4, c), 'bfloat16'), 'bfloat16')
        for name, c in zip('xy', channels, strict=True)
    }
    rest = {'dy': (draw((2, 5, 4, sum(channels)), 'bfloat16'), 'bfloat16')}
    rest |= {
        name: (draw((1, sum(channels)), 'float32', offset=1.0), 'float32')
        for name in ('scale', 'offset')
    }

    def kernel(x, y, dy, scale, offset):
        statistic = [statistics.moments(part, tile=tile, interpret=True) for part in (x, y)]
        options = {'groups': groups, 'silu': silu, 'tile': tile, 'interpret': True}
        out, mean, inverse = forward.normalise(
            (x, y), statistic, scale, offset, eps=1e-5, **options
        )
        known = ((x, y), dy, scale, offset, mean, inverse)
        sums, active = backward.gradient_sums(
            *known, silu=silu, activation=True, tile=tile, interpret=True
        )
        (dx, dz), _ = backward.gradient(*known, sums=sums, **options)
        return out, active, (dx, dz, *parameters.parameter_gradients(sums, scale, offset))

    assert_parity(kernel, plain_both_ways(groups, silu), parts | rest, gradients=False)


@pytest.mark.parametrize('shared', [(True, True), (True, False), (False, False)], ids=str)
def test_gradients_of_parameters(shared):
    """Gradients of a shared parameter are summed over the samples, in its own type; one reduction
    for both.
    """
    sums = jnp.asarray(np.arange(24).reshape(3, 2, 4), jnp.float32)
    scale, offset = (
        jnp.zeros((1 if s else 3, 4), dtype)
        for s, dtype in zip(shared, ('bfloat16', 'float32'), strict=True)
    )
    found = parameters.parameter_gradients(sums, scale, offset)
    for gradient, parameter, number in zip(found, (scale, offset), (1, 0), strict=True):
        expected = (
            sums[:, number].sum(0, keepdims=True) if parameter.shape[0] == 1 else sums[:, number]
        )
        assert gradient.dtype == parameter.dtype
        np.testing.assert_array_equal(gradient.astype(jnp.float32), expected)
    text = jax.jit(parameters.parameter_gradients).lower(sums, scale, offset).compile().as_text()
    assert len(re.findall(r' reduce\(', text)) == any(shared)


def example(batch=2, channels=(8, 4)):
    parts = tuple(jnp.asarray(draw((batch, 4, 4, c), 'float32'), jnp.float32) for c in channels)
    return parts, *(jnp.asarray(draw((1, sum(channels)), 'float32'), jnp.float32) for _ in range(2))


def norm(op, parts, scale, offset, **options):
    return op(Activation(parts), scale, offset, groups=4, silu=True, **options)


def kernel_norm(*args):
    return norm(vjp.group_norm, *args, interpret=True)


def reference_norm(*args):
    return norm(reference.group_norm, *args)


def loss(op, *args):
    return jnp.sum(jnp.sin(op(*args)))


def same(found, expected, tolerance=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        found,
        expected,
    )


def test_under_jit_vmap_and_checkpoint():
    parts, scale, offset = example()
    batches = tuple(jnp.stack([p, 2 * p, p - 1]) for p in parts)

    def gradients(op):
        return jax.jit(
            jax.vmap(jax.grad(lambda *a: loss(jax.checkpoint(op), *a), (0, 1, 2)), (0, None, None))
        )(batches, scale, offset)

    same(gradients(kernel_norm), gradients(reference_norm))


def test_vmap_over_scale_too():
    parts, scale, offset = example()
    stacked = jax.tree.map(lambda v: jnp.stack([v, v + 1]), (parts, scale, offset))
    same(jax.vmap(kernel_norm)(*stacked), jax.vmap(reference_norm)(*stacked))


def test_under_scan():
    (x, y), scale, offset = example()

    def gradients(op):
        def run(x, y, scale, offset):
            def body(x, s):
                return x + op((x, y), scale * s, offset)[..., :8], None

            return jnp.sum(jnp.sin(jax.lax.scan(body, x, jnp.array([0.5, 1.5]))[0]))

        return jax.jit(jax.grad(run, (0, 1, 2, 3)))(x, y, scale, offset)

    same(gradients(kernel_norm), gradients(reference_norm))


def test_float64_stays_float64():
    with jax.enable_x64(True):
        parts, scale, offset = jax.tree.map(lambda v: v.astype(jnp.float64), example())
        value = kernel_norm(parts, scale, offset)
        assert value.dtype == jnp.float64
        same(value, reference_norm(parts, scale, offset), 1e-12)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'scale': jnp.zeros((1, 11))}, r'scale: shape \[1, 11\]; expected \[1, 12\] or \[2, 12\]'),
        (
            {'offset': jnp.zeros((3, 12))},
            r'offset: shape \[3, 12\]; expected \[1, 12\] or \[2, 12\]',
        ),
        ({'parts': ()}, 'x: no parts'),
        (
            {'parts': (jnp.zeros((2, 4, 4, 8)), jnp.zeros((2, 4, 3, 4)))},
            r'x.parts\[1\]: shape \[2, 4, 3, 4\].*differ in channels only',
        ),
        (
            {'parts': (jnp.zeros((2, 4, 4, 8)), jnp.zeros((2, 4, 4, 4), jnp.bfloat16))},
            r'x.parts\[1\]: bfloat16, but .* float32',
        ),
        (
            {'parts': (jnp.zeros((2, 4, 4, 12), jnp.int32),)},
            'x: int32; expected bfloat16, float16 or float32',
        ),
        ({'groups': 5}, '12 channels are not a multiple of 5 groups'),
    ],
)
def test_says_what_is_wrong(change, message):
    parts, scale, offset = example()
    good = {'parts': parts, 'scale': scale, 'offset': offset, 'groups': 4} | change
    x = Activation(good['parts'])
    with pytest.raises(ValueError, match=message):
        vjp.group_norm(x, good['scale'], good['offset'], groups=good['groups'], interpret=True)


def kernels_in(target, function, *shapes):
    """Counts the calls of each kernel in the program for an H200."""
    with device.use(target):
        found = kernel_names.count(
            jax.jit(function).trace(*shapes).lower(lowering_platforms=('cuda',))
        )
    return {name.removeprefix('jaxunet_group_norm_'): count for name, count in found.items()}


def shapes_of(case, batch, dtype):
    parts = tuple(
        jax.ShapeDtypeStruct((batch, case.height, case.width, c), dtype) for c in case.parts
    )
    dy = jax.ShapeDtypeStruct((batch, case.height, case.width, case.channels), dtype)
    return parts, *([jax.ShapeDtypeStruct((1, case.channels), jnp.float32)] * 2), dy


def both_ways(case):
    def run(parts, scale, offset, dy):
        def op(parts, scale, offset):
            return vjp.group_norm(Activation(parts), scale, offset, silu=case.silu)

        y, pull = jax.vjp(op, parts, scale, offset)
        return y, pull(dy)

    return run


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(case, marks=() if i < 3 or i % 4 == 0 else pytest.mark.long)
        for i, case in enumerate(ELEPHANTS64)
    ],
    ids=lambda c: c.name,
)
def test_launches(case):
    """One launch each way, unless the tensor is too large for the cache; on Hopper two if large."""
    two = case.height == 64 and case.channels > 64
    expected = (
        {'moments': len(case.parts), 'normalise': 1, 'gradient_sums': 1, 'gradient': 1}
        if two
        else {'forward': 1, 'backward': 1}
    )
    shapes = shapes_of(case, 32, jnp.bfloat16)
    assert kernels_in(device.Target.TRITON, both_ways(case), *shapes) == expected
    if case.height * case.width >= dispatch.HOPPER_PIXELS:
        expected = {'moments': 1, 'normalise': 1, 'gradient_sums': 1, 'gradient': 1}
    assert kernels_in(device.Target.HOPPER, both_ways(case), *shapes) == expected


def test_a_large_image_is_shared_by_programs():
    case = ELEPHANTS64[0]._replace(height=256, width=256)
    expected = {'moments': 1, 'normalise': 1, 'gradient_sums': 1, 'gradient': 1}
    shapes = shapes_of(case, 1, jnp.float32)
    assert kernels_in(device.Target.TRITON, both_ways(case), *shapes) == expected


@pytest.mark.parametrize(
    'parts', [(64,), (128, 64), (192, 128), (256, 192), (30,), (3, 5, 4), (1536,)], ids=str
)
@pytest.mark.parametrize('pixels', [1, 35, 64, 4096])
@pytest.mark.parametrize(
    'tile', [Tile(16, 64, 4), Tile(64, 128, 1, splits=7), Tile(128, 8, 2, splits=1 << 16)], ids=str
)
def test_grids_cover_every_element_once(parts, pixels, tile):
    channels = sum(parts)
    for group in {
        1,
        channels // 32 or 1,
        channels // 3 if channels % 3 == 0 else channels,
        channels,
    }:
        if channels % group:
            continue
        grid = fit(tile, parts, pixels, group, streamed=True, interpret=False)
        for first in range(0, channels, grid.channels):
            last = min(first + grid.channels, channels) - 1
            assert first // group * group + grid.window >= (last // group + 1) * group
        assert grid.channels <= grid.lanes < 2 * grid.channels
        assert (grid.blocks - 1) * grid.channels < channels <= grid.blocks * grid.channels
        assert sum(grid.split_pixels()) == pixels
        assert min(grid.split_pixels()) > 0
        assert grid.rows & (grid.rows - 1) == grid.lanes & (grid.lanes - 1) == 0
        alone = fit(tile, parts, pixels, group, streamed=False, interpret=False)
        assert alone.channels % group == 0
        assert alone.splits == 1
        assert alone.steps * alone.stride >= pixels
