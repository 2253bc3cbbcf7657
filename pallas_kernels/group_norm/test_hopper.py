"""GroupNorm's Hopper kernels: simulated, lowered for CUDA, and under vmap;
and the shapes that they do not accept.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_names
from support.mosaic import simulated
from support.parity import assert_parity, draw

from jaxunet.ops.activation import Activation
from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.cases import CIFAR10, ELEPHANTS64, Case
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.runtime import device
from pallas_kernels.group_norm import dispatch, hopper, hopper_plan, hopper_program, vjp
from pallas_kernels.group_norm.hopper_plan import Grid, Tile


def in_steps(tile, groups, silu, x, y, dy, scale, offset):
    """Runs every function of `hopper`, as the ops call them."""
    parts = (x, y)
    norm, options = Norm(scale, offset, groups), {'silu': silu, 'tile': tile}
    out, stats = hopper.normalise(parts, norm, **options)
    affine, _ = hopper.affine(parts, norm, tile=tile)
    sums, active = hopper.gradient_sums(parts, dy, norm, stats, activation=True, **options)
    dx = hopper.gradient(parts, dy, norm, stats, sums, **options)
    of_norm = (jnp.sum(sums[:, 1], 0, keepdims=True), jnp.sum(sums[:, 0], 0, keepdims=True))
    return out, active, affine, (*dx, *of_norm), hopper.channel_sums(dy, tile=tile)


@functools.cache  # so that all tiles have one oracle
def plainly(groups, silu):
    def plain(x, y, dy, scale, offset):
        def op(x, y, scale, offset):
            return reference.group_norm(Activation((x, y)), Norm(scale, offset, groups), silu=silu)

        out, pull = jax.vjp(op, x, y, scale, offset)
        moments = jnp.concatenate([reference.channel_moments(part) for part in (x, y)], axis=1)
        affine = reference.group_affine(moments, Norm(scale, offset, groups))
        sums = jnp.sum(dy.astype(out.dtype), axis=(1, 2), dtype=affine[0].dtype)
        return out, out, affine, pull(dy), sums

    return plain


@pytest.mark.parametrize(
    ('image', 'dtype', 'mean', 'tile'),
    [
        ((2, 8, 4), 'bfloat16', 1.0, Tile(1, 1)),
        ((1, 7, 9), 'float32', 1000.0, Tile(2, 3)),  # masks: splits of 16, 16, 16 and 15 pixels
        pytest.param((1, 8, 8), 'float32', 0.0, Tile(2, 2), marks=pytest.mark.long),
        pytest.param((1, 9, 9), 'bfloat16', 1.0, Tile(2, 1), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_kernels_simulated(image, dtype, mean, tile):
    """One step and several, one split and several, and images that are not multiples of a tile."""
    channels = (64, 64) if dtype == 'float32' else (32, 64)
    groups, silu = (32, False) if image[1] == 8 else (8, True)
    inputs = {
        name: (draw((*image, c), dtype, offset=mean), dtype)
        for name, c in zip('xy', channels, strict=True)
    }
    inputs['dy'] = (draw((*image, sum(channels)), dtype), dtype)
    for name in ('scale', 'offset'):
        inputs[name] = (draw((1, sum(channels)), 'float32', offset=1.0), 'float32')

    def kernels(x, y, dy, scale, offset):
        return in_steps(tile, groups, silu, x, y, dy, scale, offset)

    with simulated():
        assert_parity(kernels, plainly(groups, silu), inputs, gradients=False)


def lowered(function, *shapes):
    """Counts the kernels of a program for an H200 with Hopper's kernels."""
    with device.use(device.Target.HOPPER):
        program = jax.jit(function).trace(*shapes).lower(lowering_platforms=('cuda',))
    return kernel_names.count(program)


def shapes_of(case, batch, dtype):
    image, rows = (batch, case.height, case.width), batch if case.per_sample else 1
    vector = jax.ShapeDtypeStruct((rows, case.channels), 'float32')
    parts = tuple(jax.ShapeDtypeStruct((*image, c), dtype) for c in case.parts)
    return parts, vector, vector, jax.ShapeDtypeStruct((*image, case.channels), dtype)


@pytest.mark.parametrize('x64', [False, True])
@pytest.mark.parametrize(
    ('case', 'dtype'),
    [
        (Case(32, 32, (192, 128)), 'bfloat16'),
        (Case(9, 7, (96, 32), groups=8, silu=False, per_sample=True), 'float32'),
        (Case(8, 8, (64,), groups=32), 'float32'),
        (Case(4, 4, (128,), groups=64), 'float16'),
    ],
    ids=str,
)
def test_all_steps_lower(case, dtype, x64):
    def every(parts, scale, offset, dy):
        norm, silu = Norm(scale, offset, case.groups), case.silu
        y, stats = hopper.normalise(parts, norm, silu=silu)
        sums, active = hopper.gradient_sums(parts, dy, norm, stats, silu=silu, activation=True)
        dx = hopper.gradient(parts, dy, norm, stats, sums, silu=silu)
        return y, active, dx, hopper.affine(parts, norm), hopper.channel_sums(dy)

    with jax.enable_x64(x64):
        found = lowered(every, *shapes_of(case, 2, dtype))
    names = ('affine', 'normalise', 'gradient', 'gradient_sums', 'channel_sums')
    expected = dict.fromkeys((f'jaxunet_group_norm_{name}' for name in names), 1)
    assert found == {**expected, 'jaxunet_group_norm_moments': 2}


def test_one_launch_for_a_mapped_batch():
    """Under vmap the mapped axis joins the batch."""
    parts, scale, offset, _ = shapes_of(Case(8, 8, (64,)), 2, 'bfloat16')
    mapped = tuple(jax.ShapeDtypeStruct((3, *p.shape), p.dtype) for p in parts)

    def op(parts, scale, offset):
        return vjp.group_norm(Activation(parts), Norm(scale, offset), silu=True)

    def loss(parts, scale, offset):
        return jnp.sum(jax.vmap(op, (0, None, None))(parts, scale, offset).astype(jnp.float32))

    found = lowered(jax.grad(loss, (0, 1, 2)), mapped, scale, offset)
    names = ('moments', 'normalise', 'gradient_sums', 'gradient')
    assert found == dict.fromkeys((f'jaxunet_group_norm_{name}' for name in names), 1)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'parts': (48,)}, r'multiples of 32 in every part, found \(48,\)'),
        ({'parts': (64, 8)}, r'multiples of 32 in every part, found \(64, 8\)'),
        ({'parts': (4096, 32)}, 'at most 4096 in all'),
        ({'groups': 5}, 'a divisor or a multiple of 32, found 5'),
        ({'height': 3, 'width': 5}, r'at least one sample of 16 pixels, found shape \(2, 3, 5'),
        ({'dtype': 'float64'}, 'expected bfloat16, float16 or float32, found float64'),
    ],
    ids=lambda v: str(v)[:30],
)
def test_other_shapes_go_to_xla(change, message):
    change = {'dtype': 'bfloat16'} | change
    dtype = change.pop('dtype')
    case = Case(8, 8, (64,))._replace(**change)
    with jax.enable_x64(dtype == 'float64'), device.use(device.Target.HOPPER):
        parts, *_ = shapes_of(case, 2, dtype)
        reason = hopper_plan.supports(parts, case.groups)
        assert not dispatch.supports('group_norm', parts, case.groups)
    assert reason is not None
    assert re.search(message, reason)
    if case.groups == 32:
        with pytest.raises(ValueError, match=f'group_norm on Hopper: .*{message}'):
            hopper_plan.grid(parts, 1)


def test_the_shapes_of_the_configs_are_supported():
    for case in ELEPHANTS64 + CIFAR10:
        for dtype in ('bfloat16', 'float16', 'float32'):
            assert hopper_plan.supports(shapes_of(case, 1, dtype)[0], case.groups) is None


@pytest.mark.parametrize('pixels', [16, 35, 64, 196, 4096])
@pytest.mark.parametrize('itemsize', [2, 4])
def test_tiles_cover_every_pixel(pixels, itemsize):
    for parts in ((32,), (64, 128), (96, 64)):
        for batch in (1, 32, 256):
            for tensors in (1, 2):
                p = Grid(batch, pixels, parts, itemsize, Tile(1, 1))
                if pixels < p.rows:
                    continue
                p = Grid(batch, pixels, parts, itemsize, hopper_plan.choose_tile(p, tensors))
                assert p.rows * p.chunk * itemsize == 128 * 16
                assert sum(p.split_pixels()) == pixels
                assert p.tile.splits * p.share * p.rows >= pixels
                assert p.ragged == (p.tile.splits * p.share * p.rows != pixels)


def test_sums_are_pairwise():
    assert hopper_program.total([jnp.float32(v) for v in range(7)]) == 21


@pytest.mark.parametrize(('exact', 'rtol'), [(False, 1e-5), (True, 2**-22)])
def test_the_sigmoid_is_safe(exact, rtol):
    z = np.array([-200.0, -80.0, *np.linspace(-20, 20, 1001), 80.0, 200.0], np.float32)
    found = hopper_program.sigmoid(jnp.asarray(z), exact=exact)
    wanted = 1 / (1 + np.exp(-z.astype(np.float64)))
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-30)
