"""Tests that need a GPU: run with `pytest -m gpu` on a machine that has one."""

import concurrent.futures
import functools
import itertools
import pathlib
import runpy
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.data.sources import open_source
from jaxunet.ops.activation import Activation
from jaxunet.ops.backends import choose
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.references import XLA
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.session import Session
from xla_ffi import unavailable

pytestmark = pytest.mark.gpu
OPS = XLA
ROOT = pathlib.Path(__file__).parents[2]
# Relative error of a whole op: a few roundings of its type (float32 goes through tf32 in
# convolutions and products).
TOLERANCE = {'float32': 2e-3, 'bfloat16': 2e-2, 'float16': 3e-3}


def fused(x, kernel, affine):
    image, shift = Activation.of(x), affine[:, : kernel.shape[-1]]
    conv = Convolution(
        image=image, norm=Norm(affine, affine), kernel=kernel, shift=shift, residual=image
    )
    return OPS.norm_silu_conv3x3(conv).value


def attend(x, kernel, affine):
    return OPS.attention(x.reshape(2, 256, 192), num_heads=2)


@pytest.mark.parametrize('dtype', list(TOLERANCE))
@pytest.mark.parametrize('op', [fused, attend], ids=lambda f: f.__name__)
def test_ops_and_gradients_agree_with_float64_on_the_cpu(op, dtype):
    draw = np.random.default_rng()  # fresh inputs every time, exactly representable in every type
    x = draw.integers(-16, 17, (2, 16, 16, 192)) / 8
    kernel = draw.integers(-16, 17, (3, 3, 192, 192)) / 256
    affine = draw.integers(1, 17, (1, 192)) / 8

    def energy(x, kernel, affine):
        y = op(x, kernel, affine)
        return jnp.sum(jnp.sin(y.astype(affine.dtype))), y

    def run(dtype, wide, device):
        arguments = [
            jax.device_put(jnp.asarray(v, t), device)
            for v, t in ((x, dtype), (kernel, dtype), (affine, wide))
        ]
        (_, y), gradients = jax.jit(jax.value_and_grad(energy, argnums=(0,), has_aux=True))(
            *arguments
        )
        return [np.asarray(v, np.float64) for v in (y, *gradients)]

    with jax.enable_x64(True):
        exact = run(jnp.float64, jnp.float64, jax.local_devices(backend='cpu')[0])
    for got, want in zip(run(jnp.dtype(dtype), jnp.float32, jax.devices()[0]), exact, strict=True):
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ('mode', 'precision', 'backend'),
    [
        *itertools.product(('jit', 'pmap'), ('float32', 'bfloat16', 'float16'), ('xla',)),
        ('jit', 'bfloat16', 'pallas'),
        ('pmap', 'float16', 'pallas'),
        ('jit', 'float32', 'pallas'),
        ('jit', 'bfloat16', 'cuda'),
        ('pmap', 'float16', 'cuda'),
        ('jit', 'bfloat16', 'auto'),
    ],
)
def test_training_learns_on_every_gpu(mode, precision, backend, tmp_path):
    if backend == 'cuda' and (missing := unavailable()):
        pytest.skip(missing)
    config = tiny_config(
        precision=precision,
        backend=backend,
        parallel={'mode': mode},
        data={'batch_size': 32},
        optimizer={'learning_rate': 5e-3},
        train={'steps': 120, 'log_every': 40, 'sample_every': 120, 'checkpoint_every': 120},
    )
    train(config, tmp_path, open_source('digits:', image_shape=(8, 8, 1)))
    rows = read_metrics(tmp_path / 'metrics.csv')
    assert float(rows[-1]['loss']) < 0.8 * float(rows[0]['loss'])
    assert int(rows[-1]['skipped_steps']) <= (5 if precision == 'float16' else 0)


def test_wgmma_reads_matrices_from_every_row_of_shared_memory(tmp_path):
    """PTX does not promise it (harness/wgmma/canary.cu); the convolutions on Hopper need it."""
    compiler = runpy.run_path(str(ROOT / 'xla_ffi/build_tools/nvcc.py'))
    nvcc = compiler['machine']() or compiler['wheels']()
    if nvcc is None or jax.devices()[0].compute_capability != '9.0':
        pytest.skip('needs nvcc and a GPU of compute capability 9.0')
    sources = ['tools/gpu/harness/wgmma/canary.cu', 'xla_ffi/common/shared_memory.cc']
    command = [nvcc, '-std=c++17', '-gencode', 'arch=compute_90a,code=sm_90a', '-I', 'xla_ffi']
    program = tmp_path / 'canary'
    done = subprocess.run(
        [*command, *sources, '-o', program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def threads_run(calls):
    """Each call 200 times in a thread of its own: the same bits as alone, with gradients."""

    def both(function, arguments):
        y, pull = jax.vjp(function, *arguments)
        return y, pull(jnp.ones_like(y))

    def alone(call):
        function, arguments = call
        compiled = jax.jit(lambda *a: both(function, a))
        return compiled, arguments, compiled(*arguments)

    def again(call):
        compiled, arguments, first = call
        for _ in range(200):
            jax.tree.map(np.testing.assert_array_equal, compiled(*arguments), first)

    ready = [alone(call) for call in calls]
    with concurrent.futures.ThreadPoolExecutor(len(ready)) as threads:
        list(threads.map(again, ready))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_threads_launch_attention_of_several_shapes(dtype):
    """A launch never finds a limit of shared memory that another thread has set lower since."""
    if missing := unavailable():
        pytest.skip(missing)
    attention = choose('cuda').ops.attention
    calls = []
    for tokens, heads, width in [(64, 3, 32), (256, 2, 32), (77, 2, 64), (256, 1, 256)] * 2:
        qkv = jax.random.normal(jax.random.key(tokens), (2, tokens, 3 * heads * width), dtype)
        calls.append((functools.partial(attention, num_heads=heads), (qkv,)))
    threads_run(calls)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_threads_launch_convolutions_of_several_shapes(dtype):
    if missing := unavailable():
        pytest.skip(missing)
    conv3x3 = choose('cuda').ops.conv3x3
    calls = []
    for side, channels, features in [(4, 64, 64), (8, 128, 64), (16, 64, 3), (32, 3, 64)] * 2:
        keys = jax.random.split(jax.random.key(side), 2)
        x = jax.random.normal(keys[0], (3, side, side, channels), dtype)
        kernel = jax.random.normal(keys[1], (3, 3, channels, features), dtype)
        shift = jnp.zeros((1, features))

        def convolve(x, kernel, shift=shift):
            return conv3x3(Convolution(image=Activation.of(x), kernel=kernel, shift=shift)).value

        calls.append((convolve, (x, kernel)))
    threads_run(calls)


@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
def test_steps_with_labels_repeat_bit_for_bit(precision):
    if missing := unavailable():
        pytest.skip(missing)
    config = tiny_config(
        precision=precision,
        backend='cuda',
        model={'num_classes': 10, 'label_dropout': 0.1},
        parallel={'devices': 1},
        data={'batch_size': 256},  # many samples of each label
    )
    with Session(config, open_source('digits:', image_shape=(8, 8, 1))) as session:
        ends = []
        for run in range(3):
            session.load(fresh_state(config))
            if run == 0:
                session.open_stream()
                session.compile()
            for _ in range(20):
                session.call(session.next_data())
            ends.append(jax.device_get(session.state))
    for end in ends[1:]:
        jax.tree.map(np.testing.assert_array_equal, ends[0], end)
