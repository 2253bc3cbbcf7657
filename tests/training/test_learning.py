"""The loop learns in every precision, and a step whose gradient overflows changes only counters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint.state import LossScale
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train

pytestmark = pytest.mark.usefixtures('shared_steps')


def learning(precision):
    """A config whose loss falls."""
    return tiny_config(
        precision=precision,
        parallel={'devices': 4 if precision == 'float32' else 1},
        data={'batch_size': 32},
        optimizer={'learning_rate': 5e-3},
        train={'steps': 60, 'log_every': 20, 'sample_every': 60, 'checkpoint_every': 60},
    )


@pytest.mark.parametrize(
    'precision',
    [*(pytest.param(p, marks=pytest.mark.long) for p in ('float32', 'bfloat16')), 'float16'],
)
def test_the_loop_learns_and_logs(precision, tmp_path, source):
    config = learning(precision)
    assert train(config, tmp_path, source) == 60
    rows = read_metrics(tmp_path / 'metrics.csv')
    assert [int(row['step']) for row in rows] == [20, 40, 60]
    assert float(rows[-1]['loss']) < 0.8 * float(rows[0]['loss'])
    assert float(rows[-1]['training_seconds']) > 0
    assert (float(rows[0]['loss_scale']) > 1) == (precision == 'float16')
    assert (tmp_path / 'samples' / 'step_0000060.png').stat().st_size > 100
    assert list((tmp_path / 'tensorboard').iterdir())
    assert train(config, tmp_path, source) == 60  # done already: nothing is trained or logged again
    assert read_metrics(tmp_path / 'metrics.csv') == rows


def test_a_bad_step_changes_only_the_counters(source):
    bench = Bench(learning('float16'), source)
    host = bench.parallel.fetch(bench.state)
    overflowing = dataclasses.replace(host, loss_scale=LossScale(np.float32(np.inf), np.int32(0)))
    bench.state = bench.parallel.replicate(overflowing)
    bench.losses(count=1)
    after = bench.parallel.fetch(bench.state)
    for name in ('params', 'ema', 'opt_state'):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(
                *(jax.tree.leaves(getattr(s, name)) for s in (host, after)), strict=True
            )
        ), name
    assert (after.step, after.skipped, after.bad_steps, after.loss_count) == (1, 1, 1, 0)


def test_loss_scale_halves_doubles_and_stays_off():
    scale = LossScale(jnp.float32(1024), jnp.int32(1999))
    assert [float(v) for v in scale.update(jnp.array(True), True)] == [2048, 0]
    assert [float(v) for v in scale.update(jnp.array(False), True)] == [512, 0]
    assert scale.update(jnp.array(False), False) is scale
    assert (
        float(LossScale(jnp.float32(1024), jnp.int32(5)).update(jnp.array(True), True).finite_steps)
        == 6
    )
