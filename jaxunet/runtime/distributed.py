"""Runs over several processes or hosts: how they find each other, what they must agree on, and how all end when one is lost.

A process that dies without a word is noticed by JAX's coordination service, which runs in process 0: at once if it was process 0 itself,
else when its heartbeats have been missing for `heartbeat_seconds`. JAX then aborts the others from a thread of its own, whatever they
wait for.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from jaxunet.runtime.errors import USER_ERROR, UserError

CLUSTERS = ('auto', 'none', 'slurm', 'ompi', 'mpi4py')
SLURM_VARIABLES = (
    'SLURM_JOB_ID',
    'SLURM_STEP_NODELIST',
    'SLURM_NTASKS',
    'SLURM_PROCID',
    'SLURM_LOCALID',
)  # what srun sets and JAX reads
OPEN_MPI = 'OMPI_MCA_orte_hnp_uri'  # up to version 4; JAX finds the host of mpirun in it
# When process 0 ends, JAX aborts the others; those that stop for the same reason say so themselves if they get this long.
LAST_WORDS_SECONDS = 3.0
FINISH_SECONDS = 3600  # the others wait at the end while process 0 writes the last checkpoint
ERROR = 1  # exit code after any exception that is not a UserError


@dataclass(frozen=True)
class Start:
    """How this process was started.

    Args:
      cluster: who says how many processes there are: one of `CLUSTERS`. auto: the three fields below if given, else the launcher that
        left its environment variables (mpirun, srun), else nobody: a run of one process. none: nobody.
      coordinator: HOST:PORT of process 0; with the next two, a start by hand.
      processes: how many there are.
      process: number of this one.
      wait_seconds: how long to wait for the others to start.
      heartbeat_seconds: a process that gave no sign for so long is taken for dead.
    """

    cluster: str = 'auto'
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    wait_seconds: int = 300
    heartbeat_seconds: int = 30


@contextlib.contextmanager
def joined(start: Start) -> Iterator[None]:
    """Makes this process part of its run for as long as the block lasts; does nothing for a run of one process.

    With several, an error of the block ends the process here, with its message and exit code 2 (`UserError`) or 1, instead of waiting
    for the others, which may hang in a collective operation. At the end of the block each waits for all.

    Raises:
      UserError: the processes cannot find each other, or what the flags say makes no sense.
    """
    if not join(start):
        yield
        return
    try:
        yield
        jax.distributed.shutdown()  # waits for the others
        _Epitaph.dismiss()
    except BaseException as error:
        if isinstance(error, UserError):
            print(f'error: {error}', file=sys.stderr)
            end(USER_ERROR)
        traceback.print_exc()  # collective operations fail in many ways when another process has died
        end(ERROR, explained=False)


def join(start: Start) -> bool:
    """Whether this is a run of several processes; if so, all of them are connected on return. Call before anything asks JAX for devices."""
    by_hand = {
        'coordinator': start.coordinator,
        'num_processes': start.processes,
        'process_id': start.process,
    }
    given = [name for name, value in by_hand.items() if value is not None]
    if given and start.cluster != 'auto':
        raise UserError(f'--{given[0]}: start by hand, or by --cluster={start.cluster}, not both')
    missing = [name for name, value in by_hand.items() if value is None]
    if given and missing:
        raise UserError(
            f'--{missing[0]}: missing; a start by hand needs --coordinator, --num_processes and --process_id'
        )
    if given:
        check_by_hand(str(start.coordinator), int(start.processes or 0), int(start.process or 0))
        _connect(start, 'by hand', cluster_detection_method='deactivate')
        return True
    method = (
        detect(os.environ)
        if start.cluster == 'auto'
        else ''
        if start.cluster == 'none'
        else start.cluster
    )
    if not method:
        return False
    finalize = check_launcher(method, os.environ, asked=start.cluster != 'auto')
    devices: list[int] | None = (
        None if 'JAX_LOCAL_DEVICE_IDS' in os.environ or not all_devices(method, os.environ) else []
    )
    # An empty list restricts nothing; None gives each process of a host the one device of its number.
    _connect(start, method, cluster_detection_method=method, local_device_ids=devices)
    finalize()
    return True


def check_by_hand(coordinator: str, processes: int, process: int) -> None:
    """Raises UserError unless the flags of a start by hand make sense."""
    host, _, port = coordinator.rpartition(':')
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(
            f'--coordinator: expected HOST:PORT of process 0, such as node1:12345, found {coordinator!r}'
        )
    if processes < 1:
        raise UserError(f'--num_processes: expected 1 or more, found {processes}')
    if not 0 <= process < processes:
        raise UserError(
            f'--process_id: expected 0 to {processes - 1} for --num_processes={processes}, found {process}'
        )


def detect(environ: Mapping[str, str]) -> str:
    """The launcher of several processes that left these variables: 'ompi', 'mpi4py' (any other mpirun), 'slurm', or '' if none did.

    mpirun goes first: inside a SLURM job its processes inherit SLURM's variables, which then count mpirun's own helpers.
    """
    if _number(environ, 'OMPI_COMM_WORLD_SIZE') > 1:
        return 'ompi' if OPEN_MPI in environ else 'mpi4py'
    if _number(environ, 'PMI_SIZE') > 1 and 'MPI_LOCALNRANKS' in environ:  # MPICH, Intel MPI
        return 'mpi4py'
    # A shell of the job, or its batch script, has the job's variables, but is not one of several tasks.
    tasks = _number(environ, 'SLURM_STEP_NUM_TASKS') or _number(environ, 'SLURM_NTASKS')
    return 'slurm' if tasks > 1 and all(name in environ for name in SLURM_VARIABLES) else ''


def check_launcher(method: str, environ: Mapping[str, str], *, asked: bool) -> Any:
    """Raises UserError unless this process was started so that `method` works. Returns what to call once all are connected.

    Args:
      asked: whether the user named the method (otherwise it was detected).
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
                f'{flag}: {missing[0]} is not set; start the processes with srun, inside a SLURM job'
            )
    if method == 'ompi' and OPEN_MPI not in environ:
        raise UserError(
            f'{flag}: {OPEN_MPI} is not set; start the processes with mpirun of Open MPI 4. Newer versions and other MPIs: --cluster=mpi4py'
        )
    if method != 'mpi4py':
        return lambda: None
    try:
        mpi = importlib.import_module('mpi4py.MPI')
    except ImportError as error:
        raise UserError(
            f'{flag}: {error}; pip install "jaxunet[mpi]", which uses the MPI library of this machine'
        ) from None
    if mpi.COMM_WORLD.Get_size() == 1:
        raise UserError(
            f'{flag}: MPI counts one process; start them with mpirun -n N, the one of the MPI that mpi4py uses: '
            f'{mpi.Get_library_version().splitlines()[0].rstrip(chr(0))}'
        )
    # JAX wants only to know who is there. What MPI started and did not end, mpirun would call a failure.
    return mpi.Finalize


def all_devices(method: str, environ: Mapping[str, str]) -> bool:
    """Whether a process takes all GPUs that it sees: it is alone on its host, or its launcher gave it its own.

    Otherwise each process of a host takes one, the one of its number there.
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
    own = 'SLURM_GPUS_PER_TASK' in environ if method == 'slurm' else False
    return here == 1 or own or (visible is not None and len(visible.split(',')) < here)


def tasks_of_node(counts: str, node: int) -> int:
    """SLURM's tasks on a node, from its list of counts: `2(x3),1` is 2, 2, 2, 1."""
    expanded = []
    for part in counts.split(','):
        match = re.fullmatch(r'(\d+)(?:\(x(\d+)\))?', part.strip())
        if match is None:
            raise UserError(
                f'SLURM_STEP_TASKS_PER_NODE: expected a list like 2(x3),1, found {counts!r}'
            )
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded[min(node, len(expanded) - 1)]


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, '')
    return int(value) if value.isdigit() else 0


def _connect(start: Start, how: str, **arguments: Any) -> None:
    logging.info(
        'started %s; waiting for the other processes, up to %d s ...', how, start.wait_seconds
    )
    lonely = (
        f'the processes did not find each other in {start.wait_seconds} s (--wait_seconds). Each needs the address of process 0, which '
        'must be reachable, the same number of processes, and a number of its own.'
    )
    _Epitaph.write(lonely)
    try:
        jax.distributed.initialize(
            start.coordinator,
            start.processes,
            start.process,
            initialization_timeout=start.wait_seconds,
            heartbeat_timeout_seconds=start.heartbeat_seconds,
            shutdown_timeout_seconds=FINISH_SECONDS,
            **arguments,
        )
    except (RuntimeError, ValueError) as error:  # JaxRuntimeError is a RuntimeError
        _Epitaph.dismiss()
        raise UserError(f'{lonely}\n{error}') from None
    _Epitaph.dismiss()
    me = f'process {jax.process_index()} of {jax.process_count()}'
    _Epitaph.write(
        f'{me} ended before its time: it was killed, or another process of the run died or cannot be reached any more (see above, and what '
        'the others printed). The same command on all processes, or on fewer, resumes from the last checkpoint.'
    )
    logging.info('%s, started %s', me, how)


def agree(values: Mapping[str, object]) -> None:
    """Checks that all processes of the run have the same values; all must call this alike.

    Raises:
      UserError: on every process, if one differs from process 0; names what differs.
    """
    if jax.process_count() == 1:
        return
    texts = _gather({name: str(value) for name, value in values.items()})
    for number, other in enumerate(texts):
        names = [
            name
            for name in sorted(texts[0].keys() | other)
            if texts[0].get(name) != other.get(name)
        ]
        if names:
            lines = [
                f'{n}: {texts[0].get(n, "not there")} on process 0, {other.get(n, "not there")} on process {number}'
                for n in names
            ]
            raise UserError(
                'the processes of a run must agree:\n  '
                + '\n  '.join(lines)
                + '\nGive each the same command, files and versions.'
            )


def _gather(value: dict[str, str]) -> list[dict[str, str]]:
    """This value of each process."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([data.size], np.int32))).reshape(
        -1
    )
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def end(code: int, *, explained: bool = True) -> NoReturn:
    """Exits without waiting for threads of libraries or for the other processes, which this ends unless they are done.

    Args:
      explained: whether the user has been told why.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if explained:
        _Epitaph.dismiss()
    if jax.distributed.is_initialized() and jax.process_index() == 0:
        time.sleep(LAST_WORDS_SECONDS)
    os._exit(code)


class _Epitaph:
    """What to say when this process is killed or aborted, and Python has no say any more: a shell that waits for that says it."""

    _shell: subprocess.Popen[bytes] | None = None

    @classmethod
    def write(cls, text: str) -> None:
        # In a session of its own, as signals to the whole group of processes shall not reach it.
        command = ['/bin/sh', '-c', 'read -r word || printf "%s\\n" "$0" >&2', f'\nerror: {text}']
        cls._shell = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    @classmethod
    def dismiss(cls) -> None:
        shell, cls._shell = cls._shell, None
        if shell is not None:
            with contextlib.suppress(BrokenPipeError):
                shell.communicate(b'alive\n')
