"""What only a GPU can show: run with `pytest -m gpu` on a machine that has one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.data.sources import open_source
from jaxunet.ops.activation import Activation
from jaxunet.ops.backends import load_ops
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.session import Session
from xla_ffi import unavailable

pytestmark = pytest.mark.gpu
OPS = load_ops('xla')
# Relative error of a whole op: a few roundings of its type (float32 goes through tf32 in
# convolutions and products).
TOLERANCE = {'float32': 2e-3, 'bfloat16': 2e-2, 'float16': 3e-3}


def fused(x, kernel, affine):
    return OPS.norm_silu_conv3x3(
        Activation.of(x),
        affine,
        affine,
        kernel,
        affine[:, : kernel.shape[-1]],
        residual=Activation.of(x),
    ).value


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
