"""The ops on plain arrays, with operands that do not fit or that some kernels refuse."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.functional import BATCHED, IMAGE, OPS, WEIGHTS, WITH_ADAMW

from jaxunet.ops import backends as seam
from jaxunet.ops import functional as kernels
from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.runtime.device import Target, use
from jaxunet.runtime.errors import UserError


def operands(op: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((BATCHED | WEIGHTS)[name], jnp.float32) for name in OPS[op][0]
    }


def of(*shape: int, dtype: str = 'float32') -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


NHWC = r'expected \[batch, height, width, channels\]'
INTEGERS = r'int32; expected bfloat16, float16 or float32'
MISTAKES = [
    ('conv3x3', {'x': of(2, 2, 8)}, rf'conv3x3: x: shape \[2, 2, 8\]; {NHWC}'),
    ('conv3x3', {'x': of(8, 2, 2, 8, dtype='int32')}, f'conv3x3: x: {INTEGERS}'),
    ('conv3x3', {'kernel': of(3, 3, 8, 8, dtype='int32')}, f'conv3x3: kernel: {INTEGERS}'),
    ('conv3x3', {'kernel': of(3, 3, 9, 8)}, r'kernel: shape .*; expected \[3, 3, 8, features\]'),
    ('conv3x3', {'kernel': of(5, 5, 8, 8)}, r'kernel: shape .*; expected \[3, 3, 8, features\]'),
    ('conv3x3', {'rows': of(3, 8)}, r'shift: shape \[3, 8\]; expected \[1 or 8, 8\]'),
    ('conv3x3', {'rows': of()}, r'shift: shape \[\]; expected \[1 or 8, 8\]'),
    ('conv3x3', {'rows': of(8, dtype='int32')}, f'conv3x3: shift: {INTEGERS}'),
    ('upsample_conv3x3', {'x': of(2, 2, 8)}, rf'conv3x3: x: shape \[2, 2, 8\]; {NHWC}'),
    ('upsample_conv3x3', {'kernel': of(3, 3, 9, 8)}, r'expected \[3, 3, 8, features\]'),
    ('norm_silu_conv3x3', {'x': of(8, 2, 8)}, NHWC),
    ('norm_silu_conv3x3', {'part': of(8, 2, 3, 8)}, r'x.parts\[1\].*8, 2, 3, 8'),
    ('norm_silu_conv3x3', {'part': of(8, 2, 2, 8, dtype='bfloat16')}, r'x.parts\[1\].*bfloat16'),
    ('norm_silu_conv3x3', {'scale': of(8)}, r'scale: shape \[1, 8\]; expected \[1, 16\]'),
    ('norm_silu_conv3x3', {'offset': of(16, dtype='int32')}, f'group_norm: offset: {INTEGERS}'),
    ('norm_silu_conv3x3', {'residual': of(8, 2, 2, 6)}, r'shortcut: shape \[8, 8\]; expected'),
    (
        'norm_silu_conv3x3',
        {'part': of(8, 2, 2, 6), 'scale': of(14), 'offset': of(14), 'wide': of(3, 3, 14, 8)},
        '14 channels are not a multiple of 4 groups',
    ),
    ('group_norm', {'x': of(8, 4, 8)}, rf'group_norm: x.parts\[0\]: shape .*; {NHWC}'),
    ('group_norm', {'x': of(8, 2, 2, 8, dtype='int32')}, f'group_norm: x: {INTEGERS}'),
    ('group_norm', {'bias': of(9)}, r'offset: shape \[1, 9\]; expected \[1, 8\] or \[8, 8\]'),
    (
        'group_norm',
        {'x': of(8, 2, 2, 9), 'rows': of(9), 'bias': of(9)},
        '9 channels are not a multiple of 2 groups',
    ),
    ('attention', {'tokens': of(3, 24)}, r'qkv: shape \[3, 24\]; expected \[batch, tokens, packed'),
    ('attention', {'tokens': of(8, 3, 24, dtype='int32')}, f'attention: qkv: {INTEGERS}'),
    ('attention', {'tokens': of(8, 3, 25)}, '25 packed channels are not 3 x 2 heads'),
    ('linear', {'tokens': of(24)}, rf'linear: x: shape \[24\]; {NHWC}'),
    ('linear', {'tokens': of(8, 3, 24, dtype='int32')}, f'linear: x: {INTEGERS}'),
    ('linear', {'matrix': of(23, 8)}, r'kernel: shape \[23, 8\]; expected \[24, features\]'),
    ('linear', {'bias': of(8, 8)}, r'bias: shape \[8, 8\]; expected \[1, 8\]'),
    ('linear', {'bias': of(8, dtype='int32')}, f'linear: bias: {INTEGERS}'),
    ('linear', {'short': of(8, 4, 8)}, r'\[8, 4, 8\]; expected float32\[8, 3, 8\]'),
]
# Calls that the kernels refuse and the references take.
REFUSED = [
    ('conv3x3', {'x': of(8, 2, 2, 8, dtype='float64')}, 'conv3x3: x: float64; the kernels take'),
    (
        'norm_silu_conv3x3',
        {name: of(8, 2, 2, 8, dtype='float64') for name in ('x', 'part', 'residual')},
        'conv3x3: x: float64; the kernels take',
    ),
    ('group_norm', {'x': of(8, 2, 2, 8, dtype='float64')}, 'group_norm: x: float64; the kernels'),
    ('attention', {'tokens': of(8, 3, 24, dtype='float64')}, 'attention: qkv: float64; the kernel'),
    ('attention', {'tokens': of(8, 3, 6 * 257)}, 'heads of width 257: the kernels take widths up'),
    (
        'linear',
        {'tokens': of(8, 3, 24, dtype='float64'), 'short': of(8, 3, 8, dtype='float64')},
        'linear: x: float64; the kernels take',
    ),
]


def trace(op: str, changed: dict[str, jax.ShapeDtypeStruct], backend: str) -> None:
    arguments = operands(op) | changed
    jax.eval_shape(lambda a: OPS[op][1](*a, backend=backend), list(arguments.values()))


def test_what_does_not_fit_is_named(backend):
    for op, changed, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            trace(op, changed, backend)


@pytest.mark.parametrize('shape', [(2, 0, 4, 8), (2, 4, 0, 8)])
def test_a_norm_needs_pixels(shape, backend):
    ops, x = seam.choose(backend).ops, Activation.of(jnp.ones(shape))
    row, kernel = jnp.ones((1, 8)), jnp.ones((3, 3, 8, 8))
    message = re.escape(f'group_norm: x: shape {list(shape)}: no pixels; give at least one')
    norm = Norm(row, row, 4)
    conv = Convolution(image=x, norm=norm, kernel=kernel, shift=row)
    for op, *operands in (
        (ops.group_norm, x, norm),
        (ops.group_norm_and_input, x, norm),
        (ops.norm_silu_conv3x3, conv),
        (ops.norm_silu_conv3x3_and_input, conv),
    ):
        with pytest.raises(ValueError, match=message):
            op(*operands)


def test_a_linear_layer_takes_any_number_of_dimensions(backend):
    draw = np.random.default_rng(2)
    x, residual, matrix = (
        jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((24, 8), (24, 5), (8, 5))
    )

    def layer(*shape: int) -> jax.Array:
        images = x.reshape(*shape, 8)
        return kernels.linear(
            images, matrix, jnp.ones(5), residual=residual.reshape(*shape, 5), backend=backend
        )

    for shape in ((24,), (4, 6), (2, 3, 4), (2, 3, 2, 2), (2, 3, 2, 1, 2)):
        y = layer(*shape)
        assert y.shape == (*shape, 5)
        exact = x @ matrix + jnp.ones((1, 5)) + residual
        np.testing.assert_allclose(y.reshape(24, 5), exact, rtol=1e-4, atol=1e-4)


def test_upsampling_takes_parts_of_one_size_and_type(backend):
    for part, message in (
        (of(8, 1, 2, 8), r'x.parts\[1\] is float32\[8, 1, 2, 8\]; expected float32\[8, 2, 2,'),
        (of(8, 2, 2, 8, dtype='bfloat16'), r'x.parts\[1\] is bfloat16'),
    ):
        with pytest.raises(ValueError, match=f'conv3x3: {message}'):
            jax.eval_shape(
                lambda *a: kernels.upsample_conv3x3(a[:2], *a[2:], backend=backend),
                of(8, 2, 2, 8),
                part,
                of(3, 3, 16, 8),
                of(8),
            )


@pytest.mark.parametrize('backend', ['cuda'], indirect=True)
def test_the_cuda_kernels_take_four_parts(backend):
    rows, matrix = of(40), of(40, 8)

    def refused(op: str, name: str, call: Callable[..., jax.Array], *operands: object) -> None:
        with pytest.raises(ValueError, match=f'{op}: {name}: 5 parts; .* at most 4; concatenate'):
            jax.eval_shape(functools.partial(call, backend=backend), *operands)

    x = [of(*IMAGE)] * 5
    wide, narrow = of(3, 3, 40, 8), of(3, 3, 8, 8)
    refused('conv3x3', 'x', kernels.conv3x3, x, wide, of(8))
    norm = functools.partial(kernels.group_norm, groups=4)
    refused('group_norm', 'x', norm, x, rows, rows)
    refused('conv3x3', 'x', kernels.norm_silu_conv3x3, x, rows, rows, wide, of(8))

    def projected(image: jax.Array, *operands: Any, backend: str) -> jax.Array:
        *weights, residual, shortcut = operands
        options = {'residual': residual, 'shortcut': shortcut, 'backend': backend}
        return kernels.conv3x3(image, *weights, **options)

    refused('conv3x3', 'residual', projected, of(*IMAGE), narrow, of(8), x, matrix)


def test_the_references_take_what_the_kernels_refuse(backend):
    with jax.enable_x64(True):
        for op, changed, message in REFUSED:
            # Pallas's GroupNorm takes float64; its linear layer is XLA's.
            if backend == 'xla' or (backend == 'pallas' and op == 'linear'):
                trace(op, changed, backend)
            else:
                with pytest.raises(ValueError, match=message):
                    trace(op, changed, backend)


def test_auto_takes_the_reference_for_types_that_kernels_refuse(monkeypatch):
    monkeypatch.setattr(seam, '_unavailable', lambda name: None)
    with jax.enable_x64(True), use(Target.HOPPER):
        for op, changed, message in REFUSED:
            if 'float64' in message:
                trace(op, changed, 'auto')


@pytest.mark.parametrize('backend', WITH_ADAMW, indirect=True)
@pytest.mark.parametrize(
    ('changed', 'message'),
    [
        ({'learning_rate': jnp.ones(3)}, r'adamw: learning_rate: shape \[3\]; expected a scalar'),
        (
            {'params': {'a': jnp.ones(4)}},
            'adamw: params: shapes differ from those of the gradients',
        ),
        (
            {'params': {'a': jnp.ones(3, jnp.bfloat16)}},
            'adamw: params: expected float32, found bfloat16',
        ),
        ({'gradients': {'a': jnp.ones(3, jnp.int32)}}, 'adamw: gradients: expected .* found int32'),
        ({'gradients': {}}, 'adamw: gradients: no arrays'),
        # The kernels would pair the arrays by their order.
        ({'gradients': {'b': jnp.ones(3)}}, 'adamw: gradients: its tree has another structure'),
    ],
)
def test_what_adamw_does_not_take(changed, message, backend):
    tree = {'a': jnp.ones(3)}
    good = {'gradients': tree, 'state': kernels.adamw_init(tree), 'params': tree}
    with pytest.raises(ValueError, match=message):
        kernels.adamw(**(good | {'learning_rate': 0.1} | changed), backend=backend)


@pytest.mark.extension
def test_averages_need_a_share_each():
    tree = {'a': jnp.ones(3)}
    one = jnp.ones(())
    with pytest.raises(ValueError, match='adamw: follow: 0 shares for 1 averages'):
        seam.choose('cuda', here=False).update.adamw(
            kernels.Constants(0.9, 0.99, 1e-8, 0.0),
            *[tree] * 4,
            [tree],
            take=one,
            factor=one,
            learning_rate=one,
            corrections=(one, one),
            follow=(),
        )


@pytest.mark.skipif(jax.default_backend() == 'gpu', reason='a machine without a GPU says so')
def test_a_backend_that_does_not_run_here_is_named():
    with pytest.raises(UserError, match='backend=pallas: the kernels need an NVIDIA GPU'):
        kernels.attention(jnp.ones((1, 3, 24)), num_heads=2, backend='pallas')
