"""Wrong calls of the FFI handlers raise XLA errors with a message; they never crash or succeed."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.handler_calls import CPU, HANDLERS, MISTAKES, Call, right, spoil

pytestmark = pytest.mark.extension


def on_gpu() -> jax.Device:
    return jax.local_devices(backend='gpu')[0]


def float32(*shapes):
    return [(shape, jnp.float32) for shape in shapes]


def refused(message, *call):
    """Checks that a call, given by the fields of `Call`, raises an error of its handler."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=f'{call[0]}: (?:{message})'):
        Call(*call)()


GPU = [pytest.mark.gpu, pytest.mark.extension('_cuda')]
DEVICES = [pytest.param(lambda: CPU, id='cpu'), pytest.param(on_gpu, id='gpu', marks=GPU)]


@pytest.mark.parametrize('device', DEVICES)
def test_right_calls_run(device):
    draw = random.Random(1)
    for number in range(60):
        right(number, draw)(device())


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('seed', [2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))])
def test_wrong_calls_are_errors(seed, device):
    """Every handler rejects every mistake."""
    jax.clear_caches()  # JAX takes np.int32(1) for np.int64(1) of a call that it has compiled
    draw = random.Random(seed)
    for mistake, number in itertools.product(MISTAKES, range(len(HANDLERS))):
        call = spoil(right(number, draw), mistake, draw)
        print(mistake, number, call)  # shown if a wrong call runs
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            call(device())
        assert call.target in str(error.value), (call, error.value)


@pytest.mark.parametrize(
    ('results', 'heads', 'message'),
    [
        ([(2, 5, 8), (2, 2, 5)], 3, r'qkv: 24 packed channels are not 3 x 3 heads'),
        ([(2, 5, 9), (2, 2, 5)], 2, r'out: expected F32\[2, 5, 8\], found F32\[2, 5, 9\]'),
        ([(2, 5, 8)], 2, r'lse: missing; the call has 1 results'),
        ([(2, 5, 8), (2, 2, 5)], 0, r'attribute heads: expected 1 to 2147483647, found 0'),
    ],
)
def test_the_message_names_what_is_wrong(results, heads, message):
    qkv, attributes = float32((2, 5, 24)), {'heads': np.int64(heads)}
    refused(message, 'jaxunet_attention_forward', qkv, float32(*results), attributes)


@pytest.mark.parametrize('tensors', [2**16 + 1, 2**31 - 1])
@pytest.mark.parametrize(
    'target', ['jaxunet_sum_of_squares', 'jaxunet_adamw', 'jaxunet_narrow', 'jaxunet_pack']
)
def test_the_optimizers_handlers_refuse_a_huge_number_of_tensors(target, tensors):
    """Before they reserve memory for it."""
    attributes = {'chunk': np.int64(4)} if 'squares' in target else {}
    if 'adamw' in target:
        attributes = FLOATS | {'averages': np.int64(64), 'packed': np.int64(0)}
    attributes = attributes | {'tensors': np.int64(tensors)}
    message = f'attribute tensors: expected 1 to 65536, found {tensors}'
    refused(message, target, float32((5 + 64,)), float32((1,)), attributes)


FLOATS = dict.fromkeys(('b1', 'b2', 'rest1', 'rest2', 'eps', 'decay'), np.float32(0.5))


@pytest.mark.parametrize(
    ('target', 'operands', 'results', 'attributes', 'message'),
    [
        (
            'jaxunet_adamw',
            [((5,), 'float32'), ((3,), 'float32'), ((3,), 'float32'), ((4,), 'float32')],
            [((3,), 'float32')],
            FLOATS | {'averages': np.int64(0), 'packed': np.int64(0)},
            r'mu\[0\]: expected F32\[3\], found F32\[4\]',
        ),
        (
            'jaxunet_sum_of_squares',
            [((3,), 'int32')],
            [((1,), 'float32')],
            {'chunk': np.int64(4)},
            r'gradients\[0\]: expected float32, float16 or bfloat16',
        ),
        (
            'jaxunet_narrow',
            [((3,), 'float16')],
            [((3,), 'bfloat16')],
            {},
            r'arrays\[0\]: expected float32, found float16',
        ),
        (
            'jaxunet_narrow',
            [((3,), 'float32')],
            [((4,), 'bfloat16')],
            {},
            r'narrowed\[0\]: expected BF16\[3\], found BF16\[4\]',
        ),
        (
            'jaxunet_pack',
            [((3,), 'int32')],
            [((32,), 'float32')],
            {},
            r'gradients\[0\]: expected float32, float16 or bfloat16',
        ),
        (
            'jaxunet_pack',
            [((33,), 'float16')],
            [((33,), 'float32')],
            {},
            r'packed: expected F32\[64\], found F32\[33\]',
        ),
        (
            'jaxunet_pack',
            [((3,), 'float16')],
            [((32,), 'float16')],
            {},
            r'packed: expected F32\[32\], found F16\[32\]',
        ),
        (
            'jaxunet_adamw',
            [((5,), 'float32'), ((32,), 'float16'), *[((3,), 'float32')] * 3],
            [((3,), 'float32')] * 3,
            FLOATS | {'averages': np.int64(0), 'packed': np.int64(1), 'copies': False},
            r'gradients\[0\]: expected F32\[any\], found F16\[32\]',
        ),
    ],
)
def test_the_optimizers_handlers_name_arrays_as_python_does(
    target, operands, results, attributes, message
):
    refused(message, target, operands, results, attributes | {'tensors': np.int64(1)})


@pytest.mark.parametrize(
    ('operands', 'results', 'attributes', 'message'),
    [
        (
            [(2, 3, 4, 8), (9, 5), (1, 5)],
            [(2, 3, 4, 5)],
            {'residual': False},
            r'kernel: expected F32\[8, any\], found F32\[9, 5\]',
        ),
        ([(2, 3, 4, 8), (8, 5), (2, 5)], [(2, 3, 4, 5)], {'residual': False}, r'bias: expected 1'),
        (
            [(2, 3, 4, 8), (8, 5), (1, 5)],
            [(2, 3, 4, 5)],
            {'residual': True},
            r'residual: missing; the call has 3 operands',
        ),
        (
            [(2, 3, 4, 8), (2, 3, 4, 5)],
            [(8, 5), (2, 5), (99,)],
            {},
            r'dbias: expected F32\[1, 5\], found F32\[2, 5\]',
        ),
        (
            [(2, 3, 4, 8), (2, 3, 4, 5)],
            [(8, 5), (1, 5), (44,)],
            {},
            r'workspace: expected at least 45 numbers, found 44',
        ),
    ],
)
def test_a_linear_layer_says_what_is_wrong(operands, results, attributes, message):
    target = 'jaxunet_linear' if attributes else 'jaxunet_linear_weight_gradient'
    refused(message, target, float32(*operands), float32(*results), attributes)


@pytest.mark.parametrize(
    ('shift', 'operands', 'message'),
    [
        (True, [], 'shift: missing; the call has 2 operands'),
        (True, [(1, 6)], r'shift: expected F32\[any, 5\], found F32\[1, 6\]'),
        (False, [(1, 5)], '3 operands given, 2 expected'),
    ],
)
def test_a_convolution_says_if_its_shift_is_missing_or_unannounced(shift, operands, message):
    attributes = {'parts': np.int64(1), 'residuals': np.int64(0), 'shift': shift}
    attributes |= dict.fromkeys(('flipped', 'shortcut', 'activation'), False)
    given = float32((2, 3, 3, 4), (3, 3, 4, 5), *operands)
    refused(message, 'jaxunet_conv3x3', given, float32((2, 3, 3, 5)), attributes)


def test_an_upsampled_convolution_says_if_its_image_has_no_channels():
    operands = float32((2, 4, 4, 0), (2, 2, 2, 2, 0, 64), (1, 64))
    call = 'jaxunet_conv3x3_upsampled', operands, float32((2, 8, 8, 64)), {'flipped': False}
    refused('x: no channels', *call)


def test_a_weight_gradient_says_how_much_workspace_it_needs():
    images, results = float32((2, 3, 3, 4), (2, 3, 3, 5)), float32((3, 3, 4, 5), (1, 5), (189,))
    attributes = {'parts': np.int64(1), 'residuals': np.int64(0), 'norm': False}
    message = 'workspace: expected at least 190 numbers, found 189'
    refused(message, 'jaxunet_conv3x3_weight_gradient', images, results, attributes)


@pytest.mark.parametrize(
    ('changed', 'dtype', 'workspace', 'message'),
    [
        ({'members': np.int64(0)}, 'float32', 235, 'attribute members: expected 1 to .*, found 0'),
        ({'members': np.int64(1)}, 'float32', 235, r'norm_sums\[0\]: expected .*, found F32'),
        (
            {'members': np.int64(3)},
            'float32',
            235,
            'member 2: attribute linear: expected a bool',
        ),
        (
            {'parts_0': np.int64(2)},
            'float32',
            235,
            r'member 0: dy: expected F32\[2, 3, 3, any\], found F32\[2, 3, 4, 8\]',
        ),
        ({'linear_1': False}, 'float32', 235, 'member 1: attribute parts: expected a 64-bit'),
        ({}, 'bfloat16', 235, 'member 1: expected the type of member 0, found another'),
        ({}, 'float32', 234, 'workspace: expected at least 235 numbers, found 234'),
        ({'norms': np.int64(-1)}, 'float32', 235, 'attribute norms: expected 0 to .*, found -1'),
        ({'norms': np.int64(0)}, 'float32', 235, r'workspace: .*, found F32\[1, 7\]'),
        ({'norms': np.int64(2)}, 'float32', 235, r'norm_sums\[1\]: missing; the call has 5'),
    ],
)
def test_several_weight_gradients_say_what_is_wrong(changed, dtype, workspace, message):
    """The members are a convolution, whose workspace has at least 190 numbers, and a layer with 45;
    a norm of 7 channels follows.
    """
    operands = float32((2, 3, 3, 4), (2, 3, 3, 5))
    operands += [((2, 3, 4, size), dtype) for size in (8, 5)] + float32((3, 2, 7))
    results = float32((3, 3, 4, 5), (1, 5), (8, 5), (1, 5), (1, 7), (1, 7), (workspace,))
    attributes = {'members': np.int64(2), 'norms': np.int64(1)}
    attributes |= {'linear_0': False, 'linear_1': True}
    attributes |= {'parts_0': np.int64(1), 'residuals_0': np.int64(0), 'norm_0': False}
    refused(message, 'jaxunet_weight_gradients', operands, results, attributes | changed)


@pytest.mark.parametrize(
    ('sums', 'row', 'message'),
    [
        ((3, 1, 7), (1, 7), r'norm_sums\[0\]: expected F32\[any, 2, any\], found F32\[3, 1, 7\]'),
        ((3, 2, 7), (3, 7), r'of_scale: expected F32\[1, 7\], found F32\[3, 7\]'),
        ((65536, 2, 1), (1, 1), r'norm_sums\[0\]: expected at most 65535 samples, found 65536'),
    ],
)
def test_the_sums_of_norms_say_what_is_wrong(sums, row, message):
    operands = float32((2, 3, 4, 8), (2, 3, 4, 5), sums)
    results = float32((8, 5), (1, 5), row, row, (45,))
    attributes = {'members': np.int64(1), 'norms': np.int64(1), 'linear_0': True}
    refused(message, 'jaxunet_weight_gradients', operands, results, attributes)


def test_several_weight_gradients_take_the_least_workspace():
    operands = float32((2, 3, 4, 8), (2, 3, 4, 5)) * 2
    results = float32((8, 5), (1, 5)) * 2 + float32((90,))
    attributes = {'members': np.int64(2), 'norms': np.int64(0)}
    attributes |= {'linear_0': True, 'linear_1': True}
    Call('jaxunet_weight_gradients', operands, results, attributes)()


@pytest.mark.parametrize(
    ('sums', 'rows', 'message'),
    [
        (
            [((2, 2, 5), jnp.float32)],
            [(1, 4), (1, 4)],
            r'norm_sums: expected F32\[2, 2, 4\], found F32\[2, 2, 5\]',
        ),
        (
            [((2, 2, 4), jnp.bfloat16)],
            [(1, 4), (1, 4)],
            r'norm_sums: expected F32\[2, 2, 4\], found BF16\[2, 2, 4\]',
        ),
        ([], [(1, 4), (1, 4)], 'norm_sums: missing; the call has 2 operands'),
        (
            [((2, 2, 4), jnp.float32)],
            [(2, 4), (1, 4)],
            r'of_scale: expected F32\[1, 4\], found F32\[2, 4\]',
        ),
        (
            [((2, 2, 4), jnp.float32)],
            [(1, 4)],
            r'of_offset: expected F32\[1, 4\], found F32\[190\]',
        ),
    ],
)
def test_a_weight_gradient_says_which_sums_of_a_norm_do_not_fit(sums, rows, message):
    operands = float32((2, 3, 3, 4), (2, 3, 3, 5)) + sums
    results = float32((3, 3, 4, 5), (1, 5), *rows, (190,))
    attributes = {'parts': np.int64(1), 'residuals': np.int64(0), 'norm': True}
    refused(message, 'jaxunet_conv3x3_weight_gradient', operands, results, attributes)


@pytest.mark.parametrize(
    ('added', 'operands', 'message'),
    [
        (
            2,
            [((2, 3, 4, 8), jnp.float32)] * 3,
            r'added\[1\]\[1\]: missing; the call has 10 operands',
        ),
        (
            1,
            [((2, 3, 4, 8), jnp.float32), ((2, 3, 5, 8), jnp.float32)],
            r'added\[0\]\[1\]: expected F32\[2, 3, 4, 8\], found F32\[2, 3, 5, 8\]',
        ),
        (
            1,
            [((2, 3, 4, 8), jnp.bfloat16)] * 2,
            r'added\[0\]\[0\]: expected F32\[2, 3, 4, 8\], found BF16',
        ),
        (3, [], 'attribute added: expected 0 to 2, found 3'),
    ],
)
def test_a_normalisation_says_which_gradient_does_not_fit(added, operands, message):
    image, row = float32((2, 3, 4, 8), (1, 16))
    counts = {'parts': np.int64(2), 'added': np.int64(added), 'groups': np.int64(4)}
    flags = {'silu': True, 'rounded': False, 'activation': False, 'samples': True}
    given = [image, image, *float32((2, 3, 4, 16)), *[row] * 4, *operands]
    results = [*float32((2, 2, 16)), row, row, image, image]
    refused(message, 'jaxunet_group_norm_gradient', given, results, counts | flags)


def test_a_normalisation_says_if_its_image_has_no_pixels():
    operands = float32((2, 0, 4, 16), (1, 16), (1, 16))
    attributes = {'parts': np.int64(1), 'groups': np.int64(4), 'eps': np.float32(1)}
    call = 'jaxunet_group_norm_statistics', operands, float32((2, 16)) * 4, attributes
    refused('x: no pixels', *call)


@pytest.mark.parametrize(
    ('channels', 'changed', 'message'),
    [
        ([16], {'silu': False}, 'dropout needs silu = true'),
        ([8, 8], {}, 'dropout needs x of one part .* multiples of 16 bytes, found 2 parts'),
        ([6], {'groups': np.int64(2)}, 'dropout needs .* found 1 parts and pixels of 24 bytes'),
        ([16], {'threshold': np.int64(2**16)}, 'attribute threshold: expected 0 to 65535'),
    ],
)
def test_a_normalisation_says_why_it_has_no_dropout(channels, changed, message):
    total = sum(channels)
    images = float32(*((2, 3, 4, size) for size in channels))
    operands = [*images, *float32((1, total), (1, total)), ((2, 2), jnp.uint32)]
    results = float32((2, 3, 4, total), (2, total), (2, total))
    attributes = {'parts': np.int64(len(channels)), 'groups': np.int64(4), 'eps': np.float32(1)}
    attributes |= {'silu': True, 'threshold': np.int64(9), 'factor': np.float32(1)}
    refused(message, 'jaxunet_group_norm_dropout_forward', operands, results, attributes | changed)
