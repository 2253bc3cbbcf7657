"""Runs of several processes: every way to start them, the losses of one process, and what happens
when one is lost.
"""

import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
from support.commands import NO_LAUNCHER, Fork, free_port
from support.settings import QUICK
from support.shared_steps import shared_steps
from support.tiny import flags, tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.state import fresh_state, make_optimizer
from jaxunet.data.sources import open_source
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import load_ops
from jaxunet.runtime import by_hand as start_by_hand
from jaxunet.runtime import launchers
from jaxunet.runtime.by_hand import BIND_VARIABLE, check_by_hand, listens_at
from jaxunet.runtime.distributed import Start, join
from jaxunet.runtime.errors import USER_ERROR, UserError
from jaxunet.runtime.launchers import (
    all_devices,
    check_launcher,
    coordinator,
    detect,
    hosts_of,
    tasks_of_node,
)
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.parallel import CONCURRENT, OVERLAP, Parallel
from jaxunet.training.step import make_train_step

ENDLESS = '--config.train.steps=100000'
TRAIN = ['jaxunet.train', *flags()]
ENVIRONMENT = NO_LAUNCHER | {
    'XLA_FLAGS': f'{QUICK} --xla_force_host_platform_device_count=2',
    'JAX_PLATFORMS': 'cpu',
}


def by_hand(port, rank):
    return [f'--coordinator=localhost:{port}', '--num_processes=2', f'--process_id={rank}'], {}


def slurm(port, rank):
    """Variables that srun -n 2 sets; JAX derives the port from the job's number, unless told."""
    step = {
        'SLURM_JOB_ID': '7',
        'SLURM_STEP_NODELIST': 'localhost',
        'SLURM_NTASKS': '2',
        'SLURM_STEP_NUM_TASKS': '2',
    }
    task = {
        'SLURM_PROCID': str(rank),
        'SLURM_LOCALID': str(rank),
        'SLURM_NODEID': '0',
        'SLURM_STEP_TASKS_PER_NODE': '2',
    }
    return [], step | task | {'JAX_COORDINATOR_PORT': str(port)}


def open_mpi(port, rank):
    """Variables that mpirun -n 2 of Open MPI 4 sets inside a SLURM job."""
    world = {
        'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://127.0.0.1,10.148.0.1:34911',
        'OMPI_COMM_WORLD_SIZE': '2',
    }
    own = {
        'OMPI_COMM_WORLD_RANK': str(rank),
        'OMPI_COMM_WORLD_LOCAL_RANK': str(rank),
        'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
    }
    return [], slurm(port, 0)[1] | {'SLURM_NTASKS': '1', 'SLURM_STEP_NUM_TASKS': '1'} | world | own


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


def finish(processes, seconds=100):
    """Waits for the processes to end, and returns what each printed to stderr."""
    try:
        return [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


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


@pytest.fixture(autouse=True, scope='module')
def _shared_steps():
    with shared_steps():
        yield


@pytest.fixture(scope='module')
def source():
    return open_source('digits:', image_shape=(8, 8, 1))


@pytest.fixture(scope='module')
def one(source, tmp_path_factory):
    """The losses of six steps of one process, by the program of those that go on here."""
    return one_process(tmp_path_factory.mktemp('one'), source, devices=2, steps=6)


def one_process(workdir, source, devices, steps):
    """Trains, or goes on, here; returns the losses of all steps."""
    train(
        tiny_config(parallel={'devices': devices}, train={'steps': steps}),
        workdir,
        source,
    )
    return losses(workdir)


@pytest.mark.parametrize(
    ('mode', 'data_cache', 'launcher'),
    [
        ('jit', 'stream', slurm),
        pytest.param('pmap', 'device', open_mpi, marks=pytest.mark.long),
    ],
)
def test_two_processes_train_as_one_and_resume_on_one(
    mode, data_cache, launcher, tmp_path, source, one
):
    processes = start(
        tmp_path / 'two',
        f'--config.parallel.mode={mode}',
        f'--config.data.cache={data_cache}',
        '--config.train.steps=4',
        launcher=launcher,
    )
    errors = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], errors
    for rank, error in enumerate(errors):
        assert f'process {rank} of 2, started {"slurm" if launcher is slurm else "ompi"}' in error
        assert 'ended early' not in error
    assert sorted(p.name for p in (tmp_path / 'two' / 'checkpoints').iterdir()) == ['2', '4']
    np.testing.assert_allclose(losses(tmp_path / 'two'), one[:4], rtol=1e-4)
    np.testing.assert_allclose(
        one_process(tmp_path / 'two', source, devices=2, steps=6), one, rtol=1e-4
    )


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
    saved = int(checkpoint.read(tmp_path).state.step)
    assert saved >= 4
    if victim == 0:
        return
    assert len(one_process(tmp_path, source, devices=2, steps=saved + 2)) == saved + 2


@pytest.mark.long
@pytest.mark.parametrize('cache', ['device', 'stream'])
def test_a_signal_to_one_process_saves_the_same_step_on_all(cache, tmp_path, one):
    """All processes save at the end of a call, which has two steps here."""
    together = ['--config.train.steps_per_call=2', '--config.train.log_every=2']
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


@pytest.mark.parametrize(
    ('host', 'address', 'warns'),
    [
        ('node1', '127.0.1.1', True),
        ('node1', '10.0.0.1', False),
        ('localhost', '127.0.0.1', False),
        ('127.0.0.1', '127.0.0.1', False),
        ('[::1]', '::1', False),
    ],
)
def test_where_process_0_listens(host, address, warns, monkeypatch, caplog):
    found = [(0, 0, 0, '', (address, 0))]
    monkeypatch.setattr(start_by_hand.socket, 'getaddrinfo', lambda *_: found)
    assert listens_at(f'{host}:1234') == f'{host}:1234'
    assert ('which no other host can reach' in caplog.text) == warns
    monkeypatch.setenv(BIND_VARIABLE, '0.0.0.0:99')
    assert listens_at(f'{host}:1234') == '0.0.0.0:99'


LOOPBACK, OWN, OTHER = '127.0.1.1', '10.0.0.1', '10.0.0.2'


@pytest.mark.parametrize(
    ('names', 'hosts', 'bind'),
    [
        ({'node1': OWN, 'node2': OTHER}, ['node1', 'node2'], 'node1:99'),
        ({'node1': LOOPBACK}, ['node1'], 'node1:99'),  # all processes are here
        ({'node1': LOOPBACK, 'node2': OTHER}, ['node1', 'node2'], f'{OWN}:99'),
        ({}, ['node1', 'node2'], 'node1:99'),  # and JAX's error
        ({'node1': LOOPBACK}, ['node1', 'node2'], None),
    ],
)
def test_where_process_0_of_a_launcher_listens(names, hosts, bind, monkeypatch):
    monkeypatch.setattr(
        launchers,
        'addresses',
        lambda host: {names[host]} & {*names.values()} if host in names else set(),
    )
    monkeypatch.setattr(launchers, '_address_towards', lambda host: OWN if host == OTHER else '')
    monkeypatch.delenv(BIND_VARIABLE, raising=False)
    if bind is None:
        with pytest.raises(UserError, match=f'loopback address there, .*set {BIND_VARIABLE}='):
            launchers.listens_at('node1:99', hosts)
    else:
        assert launchers.listens_at('node1:99', hosts) == bind
    monkeypatch.setenv(BIND_VARIABLE, '0.0.0.0:98')
    assert launchers.listens_at('node1:99', hosts) == '0.0.0.0:98'


def test_the_own_address_on_the_way_to_another():
    assert launchers._address_towards('127.0.0.1') == ''  # of which only this machine knows
    assert launchers._address_towards('no address') == ''


@pytest.mark.parametrize(
    ('method', 'environ', 'address', 'bind'),
    [
        ('slurm', slurm(5, 0)[1], 'localhost:5', 'localhost:5'),
        ('slurm', slurm(5, 1)[1], 'localhost:5', None),
        ('slurm', slurm('', 1)[1], 'localhost:61447', None),
        ('slurm', slurm('', 1)[1] | {'SLURM_STEP_ID': '4'}, 'localhost:61451', None),
        ('slurm', slurm(5, 1)[1] | {'JAX_COORDINATOR_ADDRESS': 'a:9'}, 'a:9', None),
        ('slurm', slurm(5, 1)[1] | {'SLURM_STEP_NODELIST': 'n[07-09],m'}, 'n07:5', None),
        ('ompi', open_mpi('', 0)[1], '127.0.0.1:62624', '127.0.0.1:62624'),
        (
            'ompi',
            open_mpi(5, 1)[1] | {'OMPI_MCA_orte_hnp_uri': '8192.0;tcp6://[::1,2::3]:43370'},
            '[::1]:5',
            None,
        ),
    ],
)
def test_where_a_launcher_has_process_0(method, environ, address, bind):
    assert coordinator(method, environ) == (address, bind)


def test_hosts_of_slurm():
    assert list(hosts_of('n[08-10,7],login,x[1-2].here')) == [
        *('n08', 'n09', 'n10', 'n7'),
        'login',
        *('x1.here', 'x2.here'),
    ]


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


ALONE = {
    'SLURM_JOB_ID': '7',
    'SLURM_NTASKS': '2',
    'SLURM_PROCID': '0',
    'SLURM_LOCALID': '0',
}  # a batch script of two tasks


@pytest.mark.parametrize(
    ('environ', 'method'),
    [
        ({}, ''),
        (slurm(1, 1)[1], 'slurm'),
        (ALONE, ''),
        (
            ALONE | {'SLURM_STEP_NODELIST': 'n1', 'SLURM_STEP_NUM_TASKS': '1'},
            '',
        ),  # an interactive step
        (open_mpi(1, 1)[1], 'ompi'),
        ({'OMPI_COMM_WORLD_SIZE': '2'}, 'mpi4py'),  # Open MPI 5
        ({'OMPI_COMM_WORLD_SIZE': '1', 'OMPI_MCA_orte_hnp_uri': 'x'}, ''),
        ({'PMI_SIZE': '2', 'PMI_RANK': '1', 'MPI_LOCALNRANKS': '2'} | ALONE, 'mpi4py'),  # MPICH
        (slurm(1, 1)[1] | {'PMI_SIZE': '2', 'PMI_RANK': '1'}, 'slurm'),  # srun --mpi=pmi2
    ],
)
def test_detection(environ, method):
    assert detect(environ) == method


@pytest.mark.parametrize(
    ('method', 'environ', 'everything'),
    [
        ('slurm', slurm(1, 1)[1], False),
        ('slurm', slurm(1, 1)[1] | {'SLURM_STEP_TASKS_PER_NODE': '1(x2)'}, True),
        (
            'slurm',
            slurm(1, 1)[1] | {'SLURM_STEP_TASKS_PER_NODE': '2(x3),1', 'SLURM_NODEID': '3'},
            True,
        ),
        ('slurm', slurm(1, 1)[1] | {'SLURM_GPUS_PER_TASK': '1'}, True),
        ('slurm', slurm(1, 1)[1] | {'CUDA_VISIBLE_DEVICES': '1'}, True),
        ('slurm', slurm(1, 1)[1] | {'CUDA_VISIBLE_DEVICES': '0,1'}, False),
        ('ompi', open_mpi(1, 1)[1], False),
        ('ompi', open_mpi(1, 1)[1] | {'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}, True),
    ],
)
def test_which_gpus_a_process_takes(method, environ, everything):
    assert all_devices(method, environ) is everything


def test_tasks_of_node():
    assert [tasks_of_node('2(x3),1', node) for node in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        (lambda: join(Start(coordinator='a:1', processes=2)), '--process_id: missing'),
        (
            lambda: join(Start('slurm', 'a:1', 2, 0)),
            '--coordinator: starts processes by hand, found --cluster=slurm beside it',
        ),
        (
            lambda: check_by_hand('localhost', 2, 0),
            '--coordinator: expected HOST:PORT of process 0, such as node1:12345, found '
            "'localhost'",
        ),
        (lambda: check_by_hand('a:70000', 2, 0), '--coordinator: expected HOST:PORT'),
        (lambda: check_by_hand('a:1', 0, 0), '--num_processes: expected 1 or more, found 0'),
        (
            lambda: check_by_hand('a:1', 2, 2),
            '--process_id: expected 0 to 1 for --num_processes=2, found 2',
        ),
        (
            lambda: check_launcher('slurm', {}, asked=True),
            '--cluster=slurm: SLURM_JOB_ID is not set; start the processes with srun',
        ),
        (
            lambda: check_launcher('ompi', {}, asked=True),
            '--cluster=ompi: OMPI_MCA_orte_hnp_uri is not set; start the processes with mpirun',
        ),
        (
            lambda: tasks_of_node('two', 0),
            "SLURM_STEP_TASKS_PER_NODE: expected a list like 2(x3),1, found 'two'",
        ),
        (
            lambda: list(hosts_of('n[a-b]')),
            "SLURM_STEP_NODELIST: expected a list like node[01-03,07], found 'n[a-b]'",
        ),
        (
            lambda: coordinator('ompi', {'OMPI_MCA_orte_hnp_uri': 'x'}),
            "OMPI_MCA_orte_hnp_uri: expected NUMBER.0;tcp://ADDRESS:PORT, found 'x'",
        ),
    ],
)
def test_mistakes(wrong, message):
    with pytest.raises(UserError) as caught:
        wrong()
    assert message in str(caught.value)


def test_mpi4py_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mpi4py.MPI', None)
    with pytest.raises(
        UserError,
        match=r'mpirun started this process, which needs --cluster=mpi4py: .*pip install '
        r'"jaxunet\[mpi\]"',
    ):
        check_launcher('mpi4py', {}, asked=False)


@pytest.mark.parametrize('mode', ['jit', 'pmap'])
def test_each_gradient_is_reduced_on_its_own(mode):
    """XLA can reduce those that are ready while the rest of the backward pass runs."""
    config = tiny_config(parallel={'mode': mode})
    parallel = Parallel(config)
    state = parallel.replicate(fresh_state(config))
    batch = {'image': np.zeros((8, 8, 8, 1), np.uint8), 'label': np.zeros(8, np.int32)}
    model, optimizer = build_unet(config, load_ops('xla')), make_optimizer(config)
    lowered = parallel.lower(
        lambda axis: make_train_step(
            config, model, make_diffusion(config.diffusion), optimizer, axis_name=axis
        ),
        state,
        parallel.put_batch(batch),
    )
    reductions = [line for line in lowered.as_text().splitlines() if 'stablehlo.all_reduce' in line]
    assert len(reductions) == len(jax.tree.leaves(state.params)) + 1  # and the loss
    assert not any(
        ':' in line.split('=')[0] for line in reductions
    )  # %7:2 = ... would reduce two at once


def test_xla_knows_the_options_of_overlap():
    """Options for GPUs are parsed, and refused if unknown, on any device."""
    for name, value in (OVERLAP | CONCURRENT).items():
        assert int(jax.jit(lambda x: x + 1, compiler_options={name: value})(1)) == 2
    with pytest.raises(Exception, match='No such compile option'):
        jax.jit(lambda x: x + 1, compiler_options={'xla_gpu_overlap': True})(1)
    assert not Parallel(tiny_config(backend='cuda')).compiler_options  # on a CPU


@pytest.mark.parametrize(
    ('backend', 'batch', 'parallel', 'found'),
    [
        ('cuda', 8, {}, CONCURRENT),
        ('cuda+conv3x3=xla', 8, {}, CONCURRENT),
        ('cuda', 8, {'concurrent_kernels': False}, {}),
        ('cuda', 2**15, {}, {}),
        ('xla', 8, {}, {}),
        ('cuda', 8, {'devices': 2}, OVERLAP),
    ],
)
def test_kernels_overlap_where_it_helps(monkeypatch, backend, batch, parallel, found):
    parallel = {'devices': 1} | parallel
    step = Parallel(tiny_config(backend=backend, data={'batch_size': batch}, parallel=parallel))
    step.devices = [types.SimpleNamespace(platform='gpu')] * parallel['devices']
    monkeypatch.delenv('XLA_FLAGS')
    assert step.compiler_options == found
    monkeypatch.setenv('XLA_FLAGS', ' '.join(f'--{name}=x' for name in found))
    assert step.compiler_options == {}
