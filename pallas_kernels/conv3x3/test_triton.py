"""The portable convolution kernels: interpreted against the float64 oracle; lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.parity import DTYPES, assert_parity, draw
from support.turns import in_turn

from jaxunet.ops.activation import at_least_float32
from jaxunet.ops.conv3x3.cases import CASES
from pallas_kernels.conv3x3 import triton, triton_blocks, triton_weight_gradient

# JAX warns at every lowering that it will drop its Triton backend.
pytestmark = pytest.mark.filterwarnings(
    'ignore:The Pallas Triton backend is deprecated:DeprecationWarning'
)

# batch, height, width, channels of the parts, features
SHAPES = {
    'three_channels_in': (2, 9, 7, (3,), 20),
    'three_channels_out': (1, 9, 7, (20,), 3),
    'three_to_three': (1, 4, 6, (3,), 3),
    'one_channel': (3, 5, 5, (1,), 16),
    'one_feature': (2, 4, 4, (32,), 1),
    'one_pixel': (3, 1, 1, (16,), 16),
    'aligned': (1, 8, 8, (64,), 32),
    'several_chunks': (1, 4, 8, (40,), 33),
    'two_parts': (3, 4, 6, (32, 16), 24),
    'parts_of_which_one_is_thin': (2, 5, 3, (20, 5), 18),
    'three_parts': (1, 4, 4, (3, 16, 8), 16),
}
TYPES_IN_TURN = in_turn(SHAPES, *((dtype,) for dtype in DTYPES))
FORWARD_TILE = triton.Tile(
    block_pixels=32, block_features=16, block_channels=16, num_warps=1, num_stages=2
)
GRADIENT_TILE = triton_weight_gradient.Tile(
    block_channels=16, block_features=16, block_pixels=16, taps=3, programs=12, num_warps=1
)


def split(x, channels):
    ends = np.cumsum(channels)
    return tuple(x[..., end - c : end] for c, end in zip(channels, ends, strict=True))


def conv(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )


def plain(x, kernel, shift, residual=None, a=None, b=None):
    wide = at_least_float32(x.dtype)
    if a is not None:
        x = jax.nn.silu(a[:, None, None, :] * x.astype(wide) + b[:, None, None, :]).astype(x.dtype)
    y = conv(x, kernel).astype(wide) + shift[:, None, None, :]
    return (y if residual is None else y + residual.astype(wide)).astype(x.dtype)


def inputs(shape, dtype, *, shifts=1, residual=False, affine=False):
    batch, height, width, channels, features = shape
    total = sum(channels)
    found = {
        'x': (draw((batch, height, width, total), dtype), dtype),
        'kernel': (draw((3, 3, total, features), dtype, scale=(9 * total) ** -0.5), dtype),
        'shift': (draw((shifts, features), 'float32'), 'float32'),
    }
    if residual:
        found['residual'] = draw((batch, height, width, features), dtype), dtype
    if affine:
        found |= {name: (draw((batch, total), 'float32'), 'float32') for name in 'ab'}
    return found


def check_forward(shape, dtype, *, tile=FORWARD_TILE, **extras):
    def kernel(x, kernel, shift, residual=None, a=None, b=None):
        affine = None if a is None else (a, b)
        parts = split(x, shape[3])
        return triton.forward(
            parts, kernel, shift, residual=residual, affine=affine, tile=tile, interpret=True
        )

    assert_parity(kernel, plain, inputs(shape, dtype, **extras), gradients=False)


@pytest.mark.parametrize(('shape', 'dtype'), TYPES_IN_TURN)
def test_forward_with_everything_around_it(shape, dtype):
    check_forward(shape, dtype, shifts=shape[0], residual=True, affine=True)


@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_plain_forward(shape):
    check_forward(shape, 'float32')


@pytest.mark.parametrize('name', ['three_channels_in', 'three_channels_out', 'two_parts'])
def test_float16(name):
    check_forward(SHAPES[name], 'float16', residual=True, affine=True)
    check_gradient(SHAPES[name], 'float16')


@pytest.mark.parametrize(
    ('block_pixels', 'shape'),
    [(16, (2, 4, 4, (16,), 16)), (64, (3, 4, 4, (16,), 16)), (16, (1, 5, 5, (16,), 16))],
)
def test_samples_of_a_block(block_pixels, shape):
    """A block within one sample, over several samples, or past the end of the only one: each pixel
    uses its own sample's numbers.
    """
    tile = triton.Tile(block_pixels=block_pixels, block_features=16, block_channels=16)
    check_forward(shape, 'float32', tile=tile, shifts=shape[0], affine=True)


def test_default_tiles():
    check_forward((2, 9, 7, (20,), 36), 'float32', tile=None, shifts=2, residual=True, affine=True)
    check_forward((2, 9, 7, (3,), 36), 'bfloat16', tile=None)
    check_gradient((2, 9, 7, (20,), 36), 'bfloat16', tile=None)
    check_gradient((2, 9, 7, (3,), 36), 'float32', tile=None)
    check_gradient((2, 9, 7, (36,), 3), 'float32', tile=None)


@pytest.mark.parametrize('itemsize', [2, 4])
def test_default_tiles_fit_the_least_shared_memory(itemsize):
    """A pipeline holds at most 99 KiB of both operands, all that a program has on sm_89."""
    for case in CASES:
        for batch in (1, 32, 256):
            arguments = case.parts, case.features, batch * case.height * case.width, itemsize
            t = triton.default_tile(*arguments)
            assert (
                t.num_stages * t.block_channels * (t.block_pixels + t.block_features) * itemsize
                <= 99 * 1024
            ), case
            g = triton_weight_gradient.default_tile(*arguments)
            thin = triton_blocks.folds(case.features) or all(
                triton_blocks.folds(c) for c in case.parts
            )
            columns = g.block_channels * (1 if thin else g.taps) + g.block_features
            assert g.num_stages * g.block_pixels * columns * itemsize <= 99 * 1024, case


def test_forward_of_flipped_kernel_is_the_input_gradient():
    batch, height, width, channels, features = 2, 5, 7, 3, 20
    found = {
        'dy': (draw((batch, height, width, features), 'float32'), 'float32'),
        'kernel': (draw((3, 3, channels, features), 'float32'), 'float32'),
    }

    def kernel(dy, kernel):
        return triton.forward(
            (dy,),
            kernel[::-1, ::-1].swapaxes(2, 3),
            jnp.zeros((1, channels), jnp.float32),
            tile=FORWARD_TILE,
            interpret=True,
        )

    def reference(dy, kernel):
        return jax.vjp(
            lambda x: conv(x, kernel), jnp.zeros((batch, height, width, channels), dy.dtype)
        )[1](dy)[0]

    assert_parity(kernel, reference, found, gradients=False)


def test_output_type():
    parts = (jnp.ones((1, 2, 2, 16), jnp.bfloat16),)
    kernel = jnp.ones((3, 3, 16, 16), jnp.bfloat16)
    y = triton.forward(
        parts,
        kernel,
        jnp.full((1, 16), 2**-10, jnp.float32),
        tile=FORWARD_TILE,
        out_dtype=jnp.float32,
        interpret=True,
    )
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(y), np.full((1, 2, 2, 16), 64 + 2**-10, np.float32))


def plain_gradient(x, dy):
    kernel = jnp.zeros((3, 3, x.shape[-1], dy.shape[-1]), dy.dtype)
    return jax.vjp(lambda k: conv(x, k), kernel)[1](dy)[0].astype(at_least_float32(dy.dtype))


def check_gradient(shape, dtype, *, tile=GRADIENT_TILE):
    batch, height, width, channels, features = shape

    def kernel(x, dy):
        return triton_weight_gradient.weight_gradient(
            split(x, channels), dy, tile=tile, interpret=True
        )

    found = {
        'x': (draw((batch, height, width, sum(channels)), dtype), dtype),
        'dy': (draw((batch, height, width, features), dtype), dtype),
    }
    assert_parity(kernel, plain_gradient, found, gradients=False)


@pytest.mark.parametrize(('shape', 'dtype'), TYPES_IN_TURN)
def test_weight_gradient(shape, dtype):
    check_gradient(shape, dtype)


@pytest.mark.parametrize(
    ('taps', 'programs'), in_turn({'1_tap': 1, '3_taps': 3, '9_taps': 9}, (1,), (1000,))
)
def test_weight_gradient_however_it_is_cut(taps, programs):
    tile = triton_weight_gradient.Tile(16, 16, 16, taps, programs, 1, 1)
    check_gradient((2, 5, 7, (40, 16), 33), 'float32', tile=tile)


LOWERED = [(shape, 'bfloat16') for shape in SHAPES] + [
    ('aligned', 'float32'),
    ('three_channels_out', 'float32'),
    ('aligned', 'float16'),
]


@pytest.mark.parametrize(('name', 'dtype'), LOWERED)
def test_lowers_to_its_own_kernels(name, dtype):
    batch, height, width, channels, features = SHAPES[name]
    total = sum(channels)
    arrays = {
        'parts': tuple(jnp.zeros((batch, height, width, c), dtype) for c in channels),
        'kernel': jnp.zeros((3, 3, total, features), dtype),
        'shift': jnp.zeros((batch, features), jnp.float32),
        'dy': jnp.zeros((batch, height, width, features), dtype),
        'affine': (jnp.zeros((batch, total), jnp.float32),) * 2,
    }

    def f(parts, kernel, shift, dy, affine):
        y = triton.forward(parts, kernel, shift, residual=dy, affine=affine)
        return y, triton_weight_gradient.weight_gradient(parts, dy)

    text = lower_for_cuda(f, arrays)
    assert text.count(f'name = "{triton.NAME}"') == 1
    assert text.count(f'name = "{triton.PRODUCTS_NAME}"') == triton.gathers(channels, features)
    assert text.count(f'name = "{triton_weight_gradient.NAME}"') == 1
    assert text.count('__gpu$xla.gpu.triton') == 2 + triton.gathers(channels, features)
    assert 'stablehlo.convolution' not in text


def lower_for_cuda(f, arrays):
    device = jax.sharding.AbstractDevice(device_kind='NVIDIA H200', num_cores=None, platform='gpu')
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(f).trace(**arrays).lower(lowering_platforms=('cuda',)).as_text()


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'parts': ()}, 'parts: none given'),
        (
            {'parts': (jnp.zeros((1, 8, 8, 32)), jnp.zeros((1, 8, 4, 32)))},
            r'parts\[1\].*differ in channels only',
        ),
        ({'parts': (jnp.zeros((1, 8, 8, 64), jnp.int32),)}, 'use float32, bfloat16 or float16'),
        (
            {'kernel': jnp.zeros((3, 3, 63, 32))},
            r'kernel: shape \[3, 3, 63, 32\]; expected \[3, 3, 64, features\]',
        ),
        (
            {'kernel': jnp.zeros((3, 3, 64, 32), jnp.bfloat16)},
            'kernel: dtype bfloat16, but parts are float32',
        ),
        ({'shift': jnp.zeros((2, 32))}, r'shift: shape \[2, 32\]; expected \[1, 32\]'),
        ({'residual': jnp.zeros((1, 8, 8, 64))}, r'residual: shape \[1, 8, 8, 64\]'),
        (
            {'affine': (jnp.zeros((1, 64)), jnp.zeros((1, 63)))},
            r'affine b: shape \[1, 63\]; expected \[1, 64\]',
        ),
    ],
)
def test_forward_says_what_is_wrong(change, message):
    good = {
        'parts': (jnp.zeros((1, 8, 8, 64)),),
        'kernel': jnp.zeros((3, 3, 64, 32)),
        'shift': jnp.zeros((1, 32)),
    }
    with pytest.raises(ValueError, match=message):
        triton.forward(**(good | change), interpret=True)


@pytest.mark.parametrize(
    ('parts', 'dy', 'message'),
    [
        ((), jnp.zeros((1, 8, 8, 32)), 'parts: none given'),
        (
            (jnp.zeros((1, 8, 4, 32)),),
            jnp.zeros((1, 8, 8, 32)),
            r'parts\[0\].*differ in channels only',
        ),
        ((jnp.zeros((1, 8, 8, 32)),), jnp.zeros((1, 8, 8, 0)), 'dy: .*non-empty'),
    ],
)
def test_weight_gradient_says_what_is_wrong(parts, dy, message):
    with pytest.raises(ValueError, match=message):
        triton_weight_gradient.weight_gradient(parts, dy, interpret=True)


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: triton.Tile(block_pixels=48), 'Tile.block_pixels=48'),
        (lambda: triton.Tile(num_warps=3), 'Tile.num_warps=3'),
        (lambda: triton.Tile(num_stages=0), 'Tile.num_stages=0'),
        (lambda: triton_weight_gradient.Tile(block_channels=8), 'Tile.block_channels=8'),
        (lambda: triton_weight_gradient.Tile(taps=2), 'Tile.taps=2'),
        (lambda: triton_weight_gradient.Tile(programs=0), 'Tile.programs=0'),
    ],
)
def test_tiles_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
