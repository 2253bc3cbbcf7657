"""The launchers that start the processes of a run: srun, and mpirun of several MPIs.

A launcher tells how many processes there are, which one this is, which GPUs it uses, and at which
address it reaches process 0. JAX could find the address by itself, but process 0 would then listen
on all interfaces.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxunet.runtime.by_hand import BIND_VARIABLE, addresses, is_loopback
from jaxunet.runtime.errors import UserError

CLUSTERS = ('auto', 'none', 'slurm', 'ompi', 'mpi4py')  # values of --cluster
SLURM_VARIABLES = (  # set by srun and read by JAX
    'SLURM_JOB_ID',
    'SLURM_STEP_NODELIST',
    'SLURM_NTASKS',
    'SLURM_PROCID',
    'SLURM_LOCALID',
)
STARTED = {  # launcher -> phrase for messages that says how the processes were started
    'slurm': 'by srun',
    'ompi': 'by mpirun of Open MPI 4',
    'mpi4py': 'by mpirun, found by mpi4py',
}
FIRST_PORT, PORTS = 61440, 4096  # the highest ports, above those that Linux gives to clients
OPEN_MPI = 'OMPI_MCA_orte_hnp_uri'  # Open MPI up to version 4; JAX reads the host of mpirun from it


def detect(environ: Mapping[str, str]) -> str:
    """Returns the launcher that set the environment variables of a run of several processes.

    'ompi' (Open MPI 4), 'mpi4py' (any other mpirun), 'slurm', or '' for none. mpirun takes
    precedence: inside a SLURM job, its processes inherit SLURM's variables, but these count
    mpirun's helper processes.
    """
    if _number(environ, 'OMPI_COMM_WORLD_SIZE') > 1:
        return 'ompi' if OPEN_MPI in environ else 'mpi4py'
    if _number(environ, 'PMI_SIZE') > 1 and 'MPI_LOCALNRANKS' in environ:  # MPICH, Intel MPI
        return 'mpi4py'
    # A shell or batch script of the job also has SLURM's variables, but is not one of its tasks.
    tasks = _number(environ, 'SLURM_STEP_NUM_TASKS') or _number(environ, 'SLURM_NTASKS')
    return 'slurm' if tasks > 1 and all(name in environ for name in SLURM_VARIABLES) else ''


def lone_task(environ: Mapping[str, str]) -> str:
    """Returns a warning if a SLURM job has several tasks and no launcher set `environ`, else ''."""
    tasks = _number(environ, 'SLURM_NTASKS')
    if tasks < 2 or detect(environ):
        return ''
    return (
        f'this SLURM job has {tasks} tasks, but this process is no task of srun and runs alone; '
        'start the command with srun, or say --cluster=none to run it alone'
    )


def check_launcher(method: str, environ: Mapping[str, str], *, asked: bool) -> Callable[[], object]:
    """Checks that this process was started by the launcher `method`.

    Args:
      method: one of 'slurm', 'ompi' and 'mpi4py'.
      environ: the environment variables.
      asked: True if the user named the launcher, False if it was detected.

    Returns:
      A function to call once all processes are connected.

    Raises:
      UserError: the launcher's variables or library are missing.
    """
    flag = (
        f'--cluster={method}'
        if asked
        else f'mpirun started this process, which needs --cluster={method}'
    )
    if method == 'slurm':
        missing = [name for name in SLURM_VARIABLES if name not in environ]
        if missing:
            raise UserError(
                f'{flag}: {missing[0]} is not set; '
                'start the processes with srun, inside a SLURM job'
            )
    if method == 'ompi' and OPEN_MPI not in environ:
        raise UserError(
            f'{flag}: {OPEN_MPI} is not set; start the processes with mpirun of Open MPI 4. '
            'Newer versions and other MPIs: --cluster=mpi4py'
        )
    if method != 'mpi4py':
        return lambda: None
    try:
        mpi = importlib.import_module('mpi4py.MPI')
    except ImportError as error:
        raise UserError(
            f'{flag}: {error}; pip install "jaxunet[mpi]", which uses the MPI library of this '
            'machine'
        ) from None
    if mpi.COMM_WORLD.Get_size() == 1:
        raise UserError(
            f'{flag}: MPI counts one process; start them with mpirun -n N of the MPI library that '
            f'mpi4py uses: {mpi.Get_library_version().splitlines()[0].rstrip(chr(0))}'
        )
    # JAX uses MPI only to find the processes. mpirun reports a failure if MPI is not finalized.
    return mpi.Finalize


def all_devices(method: str, environ: Mapping[str, str]) -> bool:
    """Returns True if the process may use all GPUs that it sees.

    This holds if it is alone on its host, or if its launcher gave each process its own GPUs.
    Otherwise each process of a host uses the GPU with its local index.
    """
    here = 1
    if method == 'slurm':
        here = tasks_of_node(
            environ.get('SLURM_STEP_TASKS_PER_NODE', environ['SLURM_NTASKS']),
            _number(environ, 'SLURM_NODEID'),
        )
    elif 'OMPI_COMM_WORLD_LOCAL_SIZE' in environ:
        here = _number(environ, 'OMPI_COMM_WORLD_LOCAL_SIZE')
    elif method == 'mpi4py':
        mpi = importlib.import_module('mpi4py.MPI')
        here = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED).Get_size()
    visible = environ.get('CUDA_VISIBLE_DEVICES')
    own = method == 'slurm' and 'SLURM_GPUS_PER_TASK' in environ
    return here == 1 or own or (visible is not None and len(visible.split(',')) < here)


def tasks_of_node(counts: str, node: int) -> int:
    """Returns the number of SLURM tasks on a node.

    Args:
      counts: SLURM's list of tasks per node; `2(x3),1` means 2, 2, 2, 1.
      node: index of the node.

    Raises:
      UserError: `counts` has another form.
    """
    expanded = []
    for part in counts.split(','):
        match = re.fullmatch(r'(\d+)(?:\(x(\d+)\))?', part.strip())
        if match is None:
            raise UserError(
                f'SLURM_STEP_TASKS_PER_NODE: expected a list like 2(x3),1, found {counts!r}'
            )
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded[min(node, len(expanded) - 1)]


def coordinator(method: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Returns HOST:PORT at which the others reach process 0, and HOST:PORT at which it listens.

    The second is None on the other processes. The port is `JAX_COORDINATOR_PORT`, or is computed
    from the job's number, so that all processes know it.

    Args:
      method: one of 'slurm', 'ompi' and 'mpi4py'. With the last one, all processes must call this.

    Raises:
      UserError: the launcher's variables are not understood, or the hosts' names do not lead to an
        address of this machine.
    """
    given = environ.get('JAX_COORDINATOR_ADDRESS', '')
    port = environ.get('JAX_COORDINATOR_PORT', '')
    if method == 'slurm':
        job = _number(environ, 'SLURM_JOB_ID') + _number(environ, 'SLURM_STEP_ID')
        hosts = list(hosts_of(environ['SLURM_STEP_NODELIST']))
        first, process = hosts[0], _number(environ, 'SLURM_PROCID')
    elif method == 'ompi':
        first, job = _mpirun(environ[OPEN_MPI])
        hosts, process = [first], _number(environ, 'OMPI_COMM_WORLD_RANK')
    else:
        world = importlib.import_module('mpi4py.MPI').COMM_WORLD
        process, hosts = world.Get_rank(), world.allgather(socket.gethostname())
        first, job = hosts[0], 0
        port = world.bcast(port or str(_free_port()))
    address = given or f'{first}:{port or FIRST_PORT + job % PORTS}'
    return address, listens_at(address, hosts) if process == 0 else None


def listens_at(address: str, hosts: Sequence[str]) -> str:
    """Returns HOST:PORT that process 0 listens at: the value of `BIND_VARIABLE`, or `address`.

    On many machines, their own name resolves to a loopback address (127.0.1.1). If the run has
    other hosts, the result is then the address from which this machine reaches one of them.

    Args:
      address: HOST:PORT at which the others reach process 0.
      hosts: names of the run's hosts.

    Raises:
      UserError: there is no such address.
    """
    if chosen := os.environ.get(BIND_VARIABLE):
        return chosen
    host, _, port = address.rpartition(':')
    others, here = [other for other in hosts if other != host], addresses(host)
    if not (others and here and all(map(is_loopback, here))):
        return address
    for other in others:
        for resolved in addresses(other):
            if not is_loopback(resolved) and (own := _address_towards(resolved)):
                return f'[{own}]:{port}' if ':' in own else f'{own}:{port}'
    raise UserError(
        f'process 0 runs on {host}, which is a loopback address there, and no name of the other '
        f'hosts ({", ".join(others[:3])}) leads to one that they can reach; set '
        f'{BIND_VARIABLE}=HOST:PORT'
    )


def hosts_of(nodes: str) -> Iterator[str]:
    """Yields the hosts in SLURM's list of nodes, such as `node[001-003,007],login` (five hosts).

    Raises:
      UserError: the list has another form.
    """
    for part in re.findall(r'(?:[^,\[]|\[[^\]]*\])+', nodes):
        prefix, bracket, rest = part.partition('[')
        if not bracket:
            yield part
            continue
        inside, _, suffix = rest.partition(']')
        for numbers in inside.split(','):
            first, dash, last = numbers.partition('-')
            if not first.isdigit() or (dash and not last.isdigit()) or '[' in suffix:
                raise UserError(
                    f'SLURM_STEP_NODELIST: expected a list like node[01-03,07], found {nodes!r}'
                )
            for number in range(int(first), int(last or first) + 1):
                yield f'{prefix}{number:0{len(first)}}{suffix}'


def _mpirun(uri: str) -> tuple[str, int]:
    """Returns the address of mpirun's host, and the job's number, from Open MPI 4's URI.

    An example is `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`. Its number is a multiple of 2^12,
    so the result is divided by 2^12.
    """
    match = re.match(r'(\d+)\.\d+;tcp(?:6://\[([^,\]]+)|://([^,:]+))', uri)
    if match is None:
        raise UserError(f'{OPEN_MPI}: expected NUMBER.0;tcp://ADDRESS:PORT, found {uri!r}')
    return f'[{match[2]}]' if match[2] else match[3], int(match[1]) // 2**12


def _address_towards(address: str) -> str:
    """Returns this machine's address towards another host, sending nothing; '' if there is none."""
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = str(probe.getsockname()[0])
    except OSError:
        return ''
    return '' if is_loopback(own) else own


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(('', 0))
        return int(server.getsockname()[1])


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, '')
    return int(value) if value.isdigit() else 0
