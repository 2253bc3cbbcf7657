"""Runs of two processes on the GPUs of one host.

test.sh selects the tests that need all GPUs by `every_gpu` in their names.
"""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from support.commands import NO_LAUNCHER, free_port
from support.launchers import by_hand, finish
from support.tiny import flags

from jaxunet.runtime.errors import USER_ERROR
from jaxunet.training.logs import read_metrics

SECONDS = 300
STEPS = ('--config.precision=bfloat16', '--config.train.steps=60', '--config.train.log_every=5')


def visible():
    """Returns the numbers of two GPUs, as in CUDA_VISIBLE_DEVICES."""
    count = len(jax.devices())
    if count < 2:
        pytest.skip('needs two GPUs')
    return os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(count)))).split(',')[:2]


def trained(workdir, gpus):
    """Trains with one process for each entry of `gpus`, the GPUs that it sees.

    Returns the exit codes and what the processes printed to stderr.
    """
    port, running = free_port(), []
    for rank, seen in enumerate(gpus):
        extra = by_hand(port, rank)[0] if len(gpus) > 1 else []
        command = ['-m', 'jaxunet.train', *flags(), *STEPS, f'--workdir={workdir}', *extra]
        running.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=NO_LAUNCHER | {'CUDA_VISIBLE_DEVICES': seen},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = finish(running, SECONDS)
    return [process.returncode for process in running], errors


def losses(workdir):
    return [float(row['loss']) for row in read_metrics(workdir / 'metrics.csv')]


@pytest.mark.gpu
def test_a_process_for_every_gpu_trains_as_one_process(tmp_path):
    first, second = visible()
    for name, gpus in (('one', [f'{first},{second}']), ('two', [first, second])):
        codes, errors = trained(tmp_path / name, gpus)
        assert not any(codes), errors
    # Sums over the GPUs may be in another order.
    np.testing.assert_allclose(losses(tmp_path / 'two'), losses(tmp_path / 'one'), rtol=0.01)


@pytest.mark.gpu
def test_processes_that_share_a_gpu_of_every_gpu_end_with_one_line(tmp_path):
    first, _ = visible()
    codes, errors = trained(tmp_path, [first, first])
    assert USER_ERROR in codes, errors
    assert any('two processes of the run use the same GPU' in error for error in errors), errors
