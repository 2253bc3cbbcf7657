"""More pixels, queries or samples than the kernels count are refused while tracing, before any
memory is needed; more averages of the weights when a run starts.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from support.tiny import tiny_config

from jaxunet.ops import backends, references
from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw.operands import MAX_AVERAGES, Constants
from jaxunet.ops.checks import MAX_COUNT, MAX_SAMPLES
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.runtime.device import Target, use
from jaxunet.runtime.errors import UserError
from jaxunet.training.session import Session

PIXELS = r'{} pixels; the kernels take at most 2147479552; split the batch, or use the xla backend'
IMAGES = {  # the first two have the most pixels that the kernels take, and more
    'most': (1, 2**19 - 1, 2**12),
    'pixels': (2**15, 2**8, 2**8),
    'samples': (MAX_SAMPLES + 1, 1, 1),
    'large': (1, 2**16, 2**15),
}


@pytest.fixture(params=['cuda', 'pallas'])
def ops(request):
    with use(Target.HOPPER):
        yield backends.choose(request.param, here=False).ops


def trace(op, image, channels=64):
    row = jnp.ones((1, channels))
    kernel = jnp.ones((3, 3, channels, channels), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((*image, channels), 'bfloat16')
    norm = Norm(row, row)

    def convolve(x, norm=None):
        return op(Convolution(image=Activation.of(x), norm=norm, kernel=kernel, shift=row)).value

    call = {
        'conv3x3': convolve,
        'norm_silu_conv3x3': lambda x: convolve(x, norm),
        'group_norm': lambda x: op(Activation.of(x), norm),
        'linear': lambda x: op(x, kernel[0, 0], row),
    }
    return jax.eval_shape(call[op.__name__], x)


def test_images_of_too_many_pixels_are_refused(ops):
    for op in (ops.conv3x3, ops.norm_silu_conv3x3, ops.linear):
        if op is references.XLA.linear:
            continue  # Pallas has none
        with pytest.raises(ValueError, match=f'x: {PIXELS.format(2**31)}'):
            trace(op, IMAGES['pixels'])
    assert math.prod(IMAGES['most']) == MAX_COUNT
    assert trace(ops.conv3x3, IMAGES['most']).shape == (*IMAGES['most'], 64)


def test_norms_of_too_many_samples_or_pixels_are_refused(ops):
    for op in (ops.group_norm, ops.norm_silu_conv3x3):
        with pytest.raises(ValueError, match=r'group_norm: x: 65536 samples; .* at most 65535;'):
            trace(op, IMAGES['samples'])
    with pytest.raises(ValueError, match='group_norm: x: 2147483648 pixels of a sample; the'):
        trace(ops.group_norm, IMAGES['large'])


@pytest.mark.parametrize('shape', [(2**15, 2**15), (1, 2**30)])
def test_attention_of_too_many_queries_is_refused(ops, shape):
    qkv = jax.ShapeDtypeStruct((*shape, 48), 'bfloat16')
    with pytest.raises(ValueError, match='attention: qkv: 2147483648 queries of all heads; the'):
        jax.eval_shape(lambda x: ops.attention(x, num_heads=2), qkv)


def test_xla_takes_them():
    xla = references.XLA
    for name in ('pixels', 'samples', 'large'):
        assert trace(xla.group_norm, IMAGES[name]).shape == (*IMAGES[name], 64)
        assert trace(xla.conv3x3, IMAGES[name]).shape == (*IMAGES[name], 64)


def with_averages(count, backend):
    rates = tuple(0.99 + n / 10000 for n in range(count - 2))
    return tiny_config(backend=backend, ema={'rates': rates, 'widths': (0.05, 0.1)})


def test_more_averages_than_the_kernels_take(monkeypatch):
    monkeypatch.setattr(backends, '_unavailable', lambda name: None)
    config = with_averages(MAX_AVERAGES + 1, 'auto+linear=xla+adamw=cuda')
    with pytest.raises(UserError) as error:
        Session(config, None)
    assert str(error.value) == (
        'ema.rates, ema.widths: 65 averages of the weights; the kernels of adamw=cuda take at most '
        '64; keep fewer, or set backend=auto+linear=xla+adamw=xla'
    )
    for count, backend in ((MAX_AVERAGES, 'cuda'), (MAX_AVERAGES + 1, 'cuda+adamw=xla')):
        backends.choose(backend).check_averages(with_averages(count, backend))


@pytest.mark.extension
@pytest.mark.parametrize('averages', [MAX_AVERAGES, MAX_AVERAGES + 1])
def test_the_kernels_take_as_many_averages(averages):
    one, ones = jnp.ones(()), [jnp.ones(3)]
    fused = backends.choose('cuda', here=False).update
    update = jax.jit(
        lambda many: fused.adamw(
            Constants(0.9, 0.999, 1e-8, 0.0),
            ones,
            ones,
            ones,
            ones,
            many,
            take=jnp.asarray(True),
            factor=one,
            learning_rate=one,
            corrections=(one, one),
            follow=[one] * averages,
        )
    )
    if averages > MAX_AVERAGES:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r'averages: .*65'):
            jax.block_until_ready(update([ones] * averages))
    else:
        assert len(update([ones] * averages).averages) == averages
