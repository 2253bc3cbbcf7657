"""The Hopper convolution lowers for CUDA on any machine, to one kernel of its name per call, and
says which operands it does not support.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from support.turns import in_turn

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from pallas_kernels.conv3x3 import dispatch, hopper
from pallas_kernels.conv3x3.schedule import Tile

NAME = 'jaxunet_conv3x3_forward'
# Batch, height, width; channels of the parts; output channels; options; tile.
CALLS = {
    'resident transposed': (
        (2, 64, 64),
        (64,),
        64,
        {},
        Tile(16, 64, taps=9, ring=0, transposed=True),
    ),
    'two parts': ((2, 32, 32), (192, 128), 128, {'affine': True}, Tile(16, 128, taps=1, ring=4)),
    'residual': ((1, 16, 16), (192,), 192, {'residual': (192,)}, Tile(8, 96)),
    'input gradient': ((2, 8, 8), (128,), 64, {'flipped': True}, Tile(8, 64, groups=1)),
    'input gradient transposed': (
        (2, 16, 8),
        (64,),
        72,
        {'flipped': True},
        Tile(16, 64, transposed=True),
    ),
    'resident shortcut': (
        (1, 16, 8),
        (64,),
        64,
        {'residual': (64, 32)},
        Tile(16, 64, taps=9, ring=0, transposed=True),
    ),
    'two activators': ((1, 16, 16), (64,), 64, {'affine': True}, Tile(8, 64, activators=2)),
    'shortcut, odd': (
        (3, 9, 7),
        (64, 24),
        40,
        {'residual': (32, 8), 'dtype': 'float16', 'affine': True},
        None,
    ),
    'float32': (
        (2, 8, 8),
        (64,),
        64,
        {'residual': (64,), 'affine': True, 'dtype': 'float32'},
        None,
    ),
}


def call_of(
    image: tuple[int, int, int], channels: tuple[int, ...], features: int, options: dict
) -> hopper.Call:
    dtype, total = options.get('dtype', 'bfloat16'), sum(channels)
    array, flipped = jax.ShapeDtypeStruct, options.get('flipped', False)

    def images(channels: tuple[int, ...]) -> Activation:
        return Activation(tuple(array((*image, c), dtype) for c in channels))

    residual = options.get('residual', ())
    projected = residual not in ((), (features,))
    conv = Convolution(
        image=images(channels),
        kernel=array((3, 3, *((features, total) if flipped else (total, features))), dtype),
        shift=array((1, features), 'float32'),
        residual=images(residual) if residual else None,
        shortcut=array((sum(residual), features), dtype) if projected else None,
    )
    affine = (array((image[0], total), 'float32'),) * 2 if options.get('affine') else None
    return hopper.Call(conv, affine, flipped)


@pytest.mark.parametrize(('name', 'x64'), in_turn({n: n for n in CALLS}, (False,), (True,)))
def test_lowers_to_one_kernel(name: str, x64: bool) -> None:
    image, channels, features, options, tile = CALLS[name]
    call = call_of(image, channels, features, options)
    function = jax.jit(lambda call: hopper.forward(call, tile))
    with jax.enable_x64(x64):
        program = function.trace(call).lower(lowering_platforms=('cuda',))
    out = program.out_info
    assert (out.shape, out.dtype) == (
        (*image, features),
        jnp.dtype(options.get('dtype', 'bfloat16')),
    )
    calls = [line for line in program.as_text().splitlines() if 'custom_call @mosaic_gpu' in line]
    assert len(calls) == 1
    assert NAME in calls[0]


def test_unsupported_arguments_say_why() -> None:
    def reason(image=(2, 8, 8), channels=(64,), features=64, tile=None, **options) -> str:
        changed, affine = options.pop('changed', {}), options.pop('scales', None)
        call = call_of(image, channels, features, options)
        call = hopper.Call(dataclasses.replace(call.conv, **changed), affine or call.affine)
        found = hopper.supports(call, tile)
        if found:
            with pytest.raises(ValueError, match='conv3x3 on Hopper'):
                jax.eval_shape(lambda call: hopper.forward(call, tile), call)
        return found or ''

    array = jax.ShapeDtypeStruct
    assert not reason()
    assert 'multiples of 8' in reason(channels=(3,))
    assert 'multiples of 8' in reason(features=3)
    assert 'multiples of 8' in reason(residual=(4, 4))
    assert 'bfloat16, float16 or float32' in reason(dtype='float8_e5m2')
    assert 'empty' in reason(image=(0, 8, 8))
    assert 'M of whole 64s' in reason(tile=Tile(4, 64))
    assert 'kernel: expected (3, 3, 64, 64)' in reason(
        changed={'kernel': array((3, 3, 32, 64), 'bfloat16')}
    )
    other = Activation((array((2, 8, 4, 64), 'bfloat16'),))
    assert 'agree in all but channels' in reason(changed={'residual': other})
    narrow = Activation((array((2, 8, 8, 32), 'bfloat16'),))
    assert 'without a shortcut' in reason(changed={'residual': narrow})
    assert 'shortcut: expected (32, 64)' in reason(
        changed={'residual': narrow, 'shortcut': array((64, 64), 'bfloat16')}
    )
    assert 'two float32 (2, 64)' in reason(scales=(array((1, 64), 'float32'),) * 2)


def test_flipped_kernel_is_the_input_gradient() -> None:
    x = jnp.arange(2.0 * 4 * 5 * 3).reshape(2, 4, 5, 3) % 7
    kernel = jnp.arange(9.0 * 3 * 2).reshape(3, 3, 3, 2) % 5

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )

    y, pull = jax.vjp(lambda x: convolve(x, kernel), x)
    dy = jnp.arange(float(y.size)).reshape(y.shape) % 3
    assert (pull(dy)[0] == convolve(dy, dispatch.flip(kernel))).all()


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_every_shape_has_tiles(dtype: str) -> None:
    sizes, channels, outputs = (
        ((1, 1), (4, 4), (9, 7), (32, 32), (64, 64)),
        ((8,), (64,), (192, 128)),
        (8, 32, 64, 96, 192, 320, 448),
    )
    for (height, width), widths, features, batch in itertools.product(
        sizes, channels, outputs, (1, 32)
    ):
        options = {'dtype': dtype, 'residual': (features,), 'affine': True}
        call = call_of((batch, height, width), widths, features, options)
        tiles = hopper.candidates(call)
        assert len(tiles) == len(set(tiles)) >= 2
        assert all(hopper.supports(call, tile) is None for tile in tiles)
        assert hopper.default_tile(call) == tiles[0]
