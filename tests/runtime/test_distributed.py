"""Runs of several processes: every way to start them, the losses of one process, and what happens
when one is lost.
"""

import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from support.commands import NO_LAUNCHER, Fork, free_port
from support.launchers import by_hand, finish, open_mpi, slurm
from support.settings import QUICK
from support.tiny import flags, tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.runtime import distributed
from jaxunet.runtime.errors import USER_ERROR
from jaxunet.training import budget
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train

pytestmark = pytest.mark.usefixtures('shared_steps')

ENDLESS = '--config.train.steps=100000'
TRAIN = ['jaxunet.train', *flags()]
ENVIRONMENT = NO_LAUNCHER | {
    'XLA_FLAGS': f'{QUICK} --xla_force_host_platform_device_count=2',
    'JAX_PLATFORMS': 'cpu',
}


def start(workdir, *arguments, launcher=by_hand, only=None, python=()):
    """Two processes of two devices each.

    Args:
      only: arguments of the second alone.
      python: arguments of Python for processes that are no forks.
    """
    port = free_port()
    processes = []
    for rank in range(2):
        extra, variables = launcher(port, rank)
        command = [*TRAIN, f'--workdir={workdir}', *arguments, *extra, *(only or []) * rank]
        environment = ENVIRONMENT | variables
        processes.append(
            subprocess.Popen(
                [sys.executable, *python, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            if python
            else Fork(command, environment)
        )
    return processes


def last_step(workdir):
    path = workdir / 'metrics.csv'
    return max((int(row['step']) for row in read_metrics(path)), default=0) if path.exists() else 0


def wait_for_step(processes, workdir, step):
    deadline = time.time() + 100
    while last_step(workdir) < step:
        assert all(process.poll() is None for process in processes), finish(processes)
        assert time.time() < deadline
        time.sleep(0.02)


def losses(workdir):
    return [float(row['loss']) for row in read_metrics(workdir / 'metrics.csv')]


@pytest.fixture(scope='module')
def one(source, tmp_path_factory):
    """The losses of six steps of one process, by the program of those that go on here."""
    return one_process(tmp_path_factory.mktemp('one'), source, devices=2, steps=6)


def one_process(workdir, source, devices, steps):
    """Trains, or goes on, here; returns the losses of all steps."""
    train(tiny_config(parallel={'devices': devices}, train={'steps': steps}), workdir, source)
    return losses(workdir)


# A process has only parts of the weights that process 0 saves and draws samples from.
SHARDED = ['--config.parallel.shard_optimizer=True', '--config.train.sample_every=2']


@pytest.mark.parametrize(
    ('mode', 'data_cache', 'launcher', 'extra'),
    [
        ('jit', 'stream', slurm, []),
        pytest.param('pmap', 'stream', slurm, [], marks=pytest.mark.long),
        pytest.param('pmap', 'device', open_mpi, [], marks=pytest.mark.long),
        pytest.param('jit', 'device', slurm, SHARDED, marks=pytest.mark.long),
        pytest.param('pmap', 'device', slurm, SHARDED, marks=pytest.mark.long),
    ],
)
def test_two_processes_train_as_one_and_resume_on_one(
    mode, data_cache, launcher, extra, tmp_path, source, one
):
    processes = start(
        tmp_path / 'two',
        f'--config.parallel.mode={mode}',
        f'--config.data.cache={data_cache}',
        '--config.train.steps=4',
        *extra,
        launcher=launcher,
    )
    errors = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], errors
    for rank, error in enumerate(errors):
        program = 'srun' if launcher is slurm else 'mpirun of Open MPI 4'
        assert f'process {rank} of 2, started by {program}' in error
        assert f'compilation cache: {ENVIRONMENT["JAX_COMPILATION_CACHE_DIR"]}' in error
        assert 'ended early' not in error
    assert sorted(p.name for p in (tmp_path / 'two' / 'checkpoints').iterdir()) == ['2', '4']
    np.testing.assert_allclose(losses(tmp_path / 'two'), one[:4], rtol=1e-4)
    np.testing.assert_allclose(
        one_process(tmp_path / 'two', source, devices=2, steps=6), one, rtol=1e-4
    )


def test_processes_agree_on_the_steps_of_a_budget(tmp_path, monkeypatch):
    """Each times its step; process 0's time counts."""
    monkeypatch.setattr(budget, 'TIMED_SECONDS', 0.1)
    without = [flag for flag in TRAIN if not flag.startswith('--config.train.steps=')]
    monkeypatch.setattr(sys.modules[__name__], 'TRAIN', without)
    processes = start(tmp_path, '--config.train.minutes=0.001', '--config.train.steps_per_call=1')
    errors = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], errors
    numbers = [re.search(r'train\.minutes=0\.001: ([0-9,]+) steps of', e)[1] for e in errors]
    assert numbers[0] == numbers[1]
    assert checkpoint.read(tmp_path).config.train.steps == last_step(tmp_path)
    assert f'{last_step(tmp_path):,}' == numbers[0]


@pytest.mark.parametrize(
    ('text', 'lost'),
    [
        ('UNKNOWN: Gloo all-reduce failed: [pair.cc:538] Connection reset by peer', True),
        ('UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [::1]:1', True),
        ('INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited', True),
        ('UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1', True),
        ('INTERNAL: CpuCallback error calling callback: Traceback', False),
        ('INVALID_ARGUMENT: Executable expected shape', False),
    ],
)
def test_the_error_of_a_lost_process_needs_no_traceback(text, lost):
    assert distributed.is_of_lost_peer(jax.errors.JaxRuntimeError(text)) == lost
    assert not distributed.is_of_lost_peer(ValueError(text))


@pytest.mark.parametrize('victim', [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_killed_process_ends_the_others_and_the_run_resumes_on_fewer_devices(
    victim, tmp_path, source
):
    processes = start(tmp_path, ENDLESS, '--heartbeat_seconds=4')
    wait_for_step(processes, tmp_path, 6)
    processes[victim].kill()
    killed = time.time()
    errors = finish(processes, seconds=60)
    assert time.time() - killed < 20  # 4 s, and what a busy machine takes
    assert processes[victim].returncode == -signal.SIGKILL
    survivor = processes[1 - victim]
    assert survivor.returncode not in (0, None)
    lines = [line for line in errors[1 - victim].splitlines() if line.startswith('error: ')]
    assert lines[-1].startswith(f'error: process {1 - victim} of 2 ended early')
    assert 'resumes from the last checkpoint' in lines[-1]
    assert 'Traceback' not in errors[1 - victim]
    assert 'Fatal Python error' not in errors[1 - victim]
    saved = int(checkpoint.read(tmp_path).state.step)
    assert saved >= 4
    if victim == 0:
        return
    assert len(one_process(tmp_path, source, devices=2, steps=saved + 2)) == saved + 2


SNAPSHOTS = ['--config.ema.widths=0.1,', '--config.ema.snapshot_every=2']


@pytest.mark.parametrize(
    ('cache', 'extra'),
    [
        pytest.param('device', [], marks=pytest.mark.long),
        pytest.param('stream', [], marks=pytest.mark.long),
        ('device', SNAPSHOTS),
        pytest.param('device', [*SNAPSHOTS, SHARDED[0]], marks=pytest.mark.long),
    ],
    ids=['device', 'stream', 'snapshots', 'sharded'],
)
def test_a_signal_to_one_process_saves_the_same_step_on_all(cache, extra, tmp_path, one):
    """All processes save at the end of a call, which has two steps here.

    With snapshots after every call, process 0 has files to write each time, and the other has none.
    """
    together = ['--config.train.steps_per_call=2', '--config.train.log_every=2', *extra]
    together += [f'--config.data.cache={cache}']
    processes = start(tmp_path, ENDLESS, '--config.train.checkpoint_every=100000', *together)
    wait_for_step(processes, tmp_path, 3)
    processes[1].send_signal(signal.SIGTERM)
    errors = finish(processes, seconds=60)
    assert [process.returncode for process in processes] == [0, 0], errors
    (saved,) = (int(p.name) for p in (tmp_path / 'checkpoints').iterdir())
    assert saved == last_step(tmp_path) == int(checkpoint.read(tmp_path).state.step)
    assert saved % 2 == 0
    np.testing.assert_allclose(losses(tmp_path)[0], np.mean(one[:2]), rtol=1e-4)


@pytest.mark.long
def test_no_program_but_the_step_runs_between_calls(tmp_path):
    """It would run after the step that is queued, and Python would wait for both."""

    def logged(port, rank):
        extra, variables = by_hand(port, rank)
        return extra, variables | {'JAX_LOG_COMPILES': '1'}

    processes = start(tmp_path, launcher=logged, python=['-m'])
    for error in finish(processes):
        programs = re.findall(r'Finished XLA compilation of jit\((\w+)\)', error)
        after = programs[programs.index('whole') + 1 :]  # the step
        assert set(after) <= {'_identity_fn'}, after  # of `wait_for_others`


@pytest.mark.long
def test_a_full_disk_of_the_process_that_writes_ends_all(tmp_path):
    """No file of process 0 may grow beyond a few bytes."""
    limited = (
        'import resource, runpy, sys; sys.argv = sys.argv[1:]; "--process_id=0" in sys.argv '
        'and '
        'resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); '
        'runpy.run_module("jaxunet.train", run_name="__main__")'
    )
    processes = start(tmp_path, '--config.train.steps=2', python=['-c', limited])
    errors = finish(processes)
    assert processes[0].returncode == USER_ERROR
    assert 'error: a checkpoint could not be written to' in errors[0]
    assert processes[1].returncode not in (0, None)
    assert 'error: process 1 of 2 ended early' in errors[1]


def test_processes_that_differ_are_told_what_differs(tmp_path):
    processes = start(tmp_path, only=['--config.data.batch_size=16', '--config.seed=3'])
    for process, error in zip(processes, finish(processes), strict=True):
        assert process.returncode == USER_ERROR
        assert (
            'data.batch_size: 8 on process 0, 16 on process 1\n  seed: 0 on process 0, 3 on '
            'process 1' in error
        )
        assert 'Traceback' not in error
    assert not (tmp_path / 'checkpoints').exists()


def three_by_hand(port, rank):
    return [f'--coordinator=localhost:{port}', '--num_processes=3', f'--process_id={rank}'], {}


def three_of_slurm(port, rank):
    return [], slurm(port, rank)[1] | {'SLURM_NTASKS': '3', 'SLURM_STEP_NUM_TASKS': '3'}


@pytest.mark.parametrize(
    'launcher', [pytest.param(three_by_hand, marks=pytest.mark.long), three_of_slurm]
)
def test_too_few_processes_are_an_error(launcher, tmp_path):
    ports = []
    first, second = start(
        tmp_path,
        '--wait_seconds=2',
        launcher=lambda port, rank: (ports.append(port), launcher(port, rank))[1],
    )
    while not listens('localhost', ports[0]):
        assert first.poll() is None, first.stderr.read_text()
    assert not listens('127.0.0.2', ports[0])  # as it would be on all interfaces
    for process, error in zip((first, second), finish([first, second]), strict=True):
        assert process.returncode not in (0, None)
        assert error.splitlines()[-1].startswith(
            'error: the processes did not find each other in 2 s'
        )


def listens(host, port):
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0


def test_an_address_that_process_0_cannot_listen_at():
    arguments = ['--coordinator=192.0.2.1:1234', '--num_processes=2', '--process_id=0']
    process = Fork([*TRAIN, *arguments], ENVIRONMENT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == USER_ERROR
    assert 'error: process 0 cannot listen at 192.0.2.1:1234: another program does, or ' in error
    assert 'Traceback' not in error


@pytest.mark.skipif(shutil.which('mpirun') is None, reason='needs mpirun')
@pytest.mark.parametrize('method', ['auto', 'mpi4py'])
def test_mpirun(method, tmp_path, source):
    if method == 'mpi4py':
        pytest.importorskip('mpi4py')
    environment = ENVIRONMENT | {
        'OMPI_ALLOW_RUN_AS_ROOT': '1',
        'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
        'JAX_COORDINATOR_PORT': str(free_port()),
    }
    done = subprocess.run(
        [
            'mpirun',
            '--oversubscribe',
            '-n',
            '2',
            sys.executable,
            '-m',
            *TRAIN,
            '--config.train.steps=4',
            f'--cluster={method}',
            f'--workdir={tmp_path / "two"}',
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert 'process 1 of 2, started ' in done.stderr
    np.testing.assert_allclose(
        losses(tmp_path / 'two'),
        one_process(tmp_path / 'one', source, devices=4, steps=4),
        rtol=1e-4,
    )
