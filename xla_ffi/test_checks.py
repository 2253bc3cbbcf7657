"""Operands beyond the limits of the CUDA kernels are errors when a program is traced."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw.operands import Constants
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from xla_ffi.adamw.narrow import narrow
from xla_ffi.adamw.pack import pack
from xla_ffi.adamw.update import adamw, sum_of_squares
from xla_ffi.backend import BACKEND
from xla_ffi.checks import MAX_ARRAYS, MAX_PARTS


def activation(parts: int) -> Activation:
    return Activation(tuple(jnp.zeros((1, 4, 4, 8)) for _ in range(parts)))


def norm(parts: int) -> jax.Array:
    row = jnp.zeros((1, 8 * parts))
    return BACKEND.ops['group_norm'](activation(parts), Norm(row, row, 8))


def operands(parts: int) -> Convolution:
    kernel, shift = jnp.zeros((3, 3, 8 * parts, 8)), jnp.zeros((1, 8))
    return Convolution(image=activation(parts), kernel=kernel, shift=shift)


def norm_conv(parts: int) -> Activation:
    row = jnp.zeros((1, 8 * parts))
    conv = dataclasses.replace(operands(parts), norm=Norm(row, row, 8))
    return BACKEND.ops['norm_silu_conv3x3'](conv)


def conv(parts: int) -> Activation:
    return BACKEND.ops['conv3x3'](operands(parts))


def projected(parts: int) -> Activation:
    shortcut = jnp.zeros((8 * parts, 8))
    conv = dataclasses.replace(operands(1), residual=activation(parts), shortcut=shortcut)
    return BACKEND.ops['conv3x3'](conv)


@pytest.mark.parametrize(
    ('call', 'operand'),
    [
        (norm, 'group_norm: x'),
        (norm_conv, 'conv3x3: x'),
        (conv, 'conv3x3: x'),
        (projected, 'conv3x3: residual'),
    ],
)
def test_more_parts_than_the_kernels_read_are_an_error_when_traced(call, operand):
    jax.eval_shape(lambda: call(MAX_PARTS))
    found = f'{operand}: {MAX_PARTS + 1} parts; the CUDA kernels take at most {MAX_PARTS}; conc'
    with pytest.raises(ValueError, match=re.escape(found)):
        jax.eval_shape(lambda: call(MAX_PARTS + 1))


@pytest.mark.parametrize(
    ('call', 'operand'),
    [
        (lambda arrays: narrow(arrays, jnp.bfloat16), 'narrow: arrays'),
        (sum_of_squares, 'sum_of_squares: gradients'),
        (pack, 'pack: gradients'),
        (
            lambda arrays: adamw(
                Constants(0.9, 0.999, 1e-8, 0.0),
                *(arrays,) * 4,
                [],
                take=jnp.asarray(True),
                factor=jnp.ones(()),
                learning_rate=jnp.ones(()),
                corrections=(jnp.ones(()),) * 2,
                follow=[],
            ),
            'adamw: params',
        ),
    ],
)
def test_more_arrays_than_the_optimizer_takes_are_an_error_when_traced(call, operand):
    found = f'{operand}: {MAX_ARRAYS + 1} arrays; the CUDA kernels take at most {MAX_ARRAYS}; use'
    with pytest.raises(ValueError, match=re.escape(found)):
        jax.eval_shape(lambda x: call([x] * (MAX_ARRAYS + 1)), jnp.zeros(2))


def test_the_limit_of_arrays_is_that_of_the_handlers():
    source = pathlib.Path(__file__).parent / 'adamw' / 'read.cc'
    assert f'kMaxTensors = 1 << {MAX_ARRAYS.bit_length() - 1};' in source.read_text()
