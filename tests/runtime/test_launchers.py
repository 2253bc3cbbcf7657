"""The number, address and devices that launchers give a process, and mistakes in them."""

import sys

import jax
import pytest
from support.launchers import open_mpi, slurm

from jaxunet.runtime import by_hand as start_by_hand
from jaxunet.runtime import distributed, launchers
from jaxunet.runtime.by_hand import BIND_VARIABLE, check_by_hand, listens_at
from jaxunet.runtime.distributed import Start, join
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.launchers import (
    all_devices,
    check_launcher,
    coordinator,
    detect,
    hosts_of,
    lone_task,
    tasks_of_node,
)


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
    ('environ', 'warned'),
    [
        ({}, False),
        (ALONE, True),
        (ALONE | {'SLURM_STEP_NODELIST': 'n1', 'SLURM_STEP_NUM_TASKS': '1'}, True),
        (ALONE | {'SLURM_NTASKS': '1'}, False),
        (slurm(1, 1)[1], False),
        (ALONE | open_mpi(1, 1)[1], False),
    ],
)
def test_a_forgotten_srun_is_told(environ, warned):
    assert lone_task(environ).startswith('this SLURM job has 2 tasks, but') == warned


@pytest.mark.parametrize(('cluster', 'lines'), [('auto', 1), ('none', 0)])
def test_a_forgotten_srun_is_logged(cluster, lines, monkeypatch, caplog):
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    assert not join(Start(cluster=cluster))
    assert caplog.text.count('this process is no task of srun') == lines


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


def test_processes_that_share_a_gpu_are_told_so(monkeypatch, capsys):
    def exit_with(code, **_):
        raise SystemExit(code)

    monkeypatch.setattr(distributed, 'join', lambda start: True)
    monkeypatch.setattr(distributed, 'end', exit_with)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    with pytest.raises(SystemExit) as ended, distributed.joined(Start()):
        raise jax.errors.JaxRuntimeError(
            'INTERNAL: NCCL operation ncclCommInitRankConfig(&comm) failed: invalid usage. Last '
            "NCCL warning 'Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 80'."
        )
    assert ended.value.code == UserError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('error: two processes of the run use the same GPU')
    assert line.endswith('CUDA_VISIBLE_DEVICES=0 for the first, found 0,1')


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
