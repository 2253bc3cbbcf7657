"""Runs over several processes or hosts: start, agreement, and termination when one is lost.

JAX's coordination service runs in process 0 and notices a process that dies: immediately if it is
process 0, otherwise when its heartbeats have been missing for `heartbeat_seconds`. A thread of JAX
then aborts the other processes, even if they are waiting for something.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from jaxunet.runtime.by_hand import check_by_hand, check_listens, listens_at
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.interrupt import INTERRUPTED
from jaxunet.runtime.out_of_memory import is_out_of_memory, out_of_memory_error

CLUSTERS = ('auto', 'none', 'slurm', 'ompi', 'mpi4py')
SLURM_VARIABLES = (  # set by srun and read by JAX
    'SLURM_JOB_ID',
    'SLURM_STEP_NODELIST',
    'SLURM_NTASKS',
    'SLURM_PROCID',
    'SLURM_LOCALID',
)
OPEN_MPI = 'OMPI_MCA_orte_hnp_uri'  # Open MPI up to version 4; JAX reads the host of mpirun from it
# Process 0 waits this long before it exits with an error, because its exit makes JAX abort the
# others: processes that fail for the same reason can report it themselves.
LAST_WORDS_SECONDS = 3.0
FINISH_SECONDS = 3600  # time for process 0 to write the last checkpoint while the others wait
PEERS_MISSING = 4  # exit code of processes that did not find each other
ERROR = 1  # exit code after any exception that is not a UserError


class PeersMissingError(UserError):
    """The processes of a run did not find each other."""

    exit_code = PEERS_MISSING


@dataclass(frozen=True)
class Start:
    """The launcher of this process and the time limits for the others.

    Fields:
      cluster: launcher of the processes, one of `CLUSTERS`. auto: by hand if the next three fields
        are given, else the launcher whose environment variables are set (mpirun, srun), else a run
        of one process. none: a run of one process.
      coordinator: HOST:PORT of process 0, for a start by hand.
      processes: number of processes, for a start by hand.
      process: index of this process, for a start by hand.
      wait_seconds: maximum time to wait for the other processes to start.
      heartbeat_seconds: a process without a sign of life for this long counts as dead.
    """

    cluster: str = 'auto'
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    wait_seconds: int = 300
    heartbeat_seconds: int = 30


@contextlib.contextmanager
def joined(start: Start) -> Iterator[None]:
    """Connects this process to the others of its run for the duration of the block.

    Does nothing for a run of one process. With several, every process waits for all at the end of
    the block. An error in the block prints its message and exits with its `exit_code`, or
    `ERROR`, without waiting for the others, which may hang in a collective operation.

    Raises:
      UserError: the processes cannot find each other, or the flags are inconsistent.
    """
    if not join(start):
        yield
        return
    try:
        yield
        jax.distributed.shutdown()  # waits for the others
        _AbortMessage.disarm()
    except BaseException as error:
        if is_out_of_memory(error):
            error = out_of_memory_error(error, 'this process', 'lower its batch size')
        if isinstance(error, UserError):
            print(f'error: {error}', file=sys.stderr)
            end(error.exit_code)
        if isinstance(error, KeyboardInterrupt):
            end(INTERRUPTED)
        # Collective operations fail in many ways when another process has died.
        traceback.print_exc()
        end(ERROR, explained=False)


def join(start: Start) -> bool:
    """Connects all processes of the run; returns True if there are several.

    Call it before anything asks JAX for devices.

    Raises:
      UserError: the processes cannot find each other, or the flags are inconsistent.
    """
    by_hand = {
        'coordinator': start.coordinator,
        'num_processes': start.processes,
        'process_id': start.process,
    }
    given = [name for name, value in by_hand.items() if value is not None]
    if given and start.cluster != 'auto':
        raise UserError(
            f'--{given[0]}: starts processes by hand, found --cluster={start.cluster} beside it; '
            'leave one of them out'
        )
    missing = [name for name, value in by_hand.items() if value is None]
    if given and missing:
        raise UserError(
            f'--{missing[0]}: missing; a start by hand needs --coordinator, --num_processes and '
            '--process_id'
        )
    if given:
        check_by_hand(str(start.coordinator), int(start.processes or 0), int(start.process or 0))
        if start.processes == 1:
            return False
        address = listens_at(str(start.coordinator)) if start.process == 0 else None
        if address:
            check_listens(address)
        _connect(
            start,
            'by hand',
            cluster_detection_method='deactivate',
            coordinator_bind_address=address,
        )
        return True
    methods = {'auto': detect(os.environ), 'none': ''}
    method = methods.get(start.cluster, start.cluster)
    if not method:
        return False
    finalize = check_launcher(method, os.environ, asked=start.cluster != 'auto')
    devices: list[int] | None = (
        None if 'JAX_LOCAL_DEVICE_IDS' in os.environ or not all_devices(method, os.environ) else []
    )
    # [] gives this process all devices that it sees; None gives it the one with its local index.
    _connect(start, method, cluster_detection_method=method, local_device_ids=devices)
    finalize()
    return True


def detect(environ: Mapping[str, str]) -> str:
    """Returns the launcher that set the environment variables of a run of several processes.

    'ompi' (Open MPI 4), 'mpi4py' (any other mpirun), 'slurm', or '' for none. mpirun takes
    precedence: inside a SLURM job its processes inherit SLURM's variables, which then count
    mpirun's helper processes.
    """
    if _number(environ, 'OMPI_COMM_WORLD_SIZE') > 1:
        return 'ompi' if OPEN_MPI in environ else 'mpi4py'
    if _number(environ, 'PMI_SIZE') > 1 and 'MPI_LOCALNRANKS' in environ:  # MPICH, Intel MPI
        return 'mpi4py'
    # A shell or batch script of the job also has its variables, but is not one of several tasks.
    tasks = _number(environ, 'SLURM_STEP_NUM_TASKS') or _number(environ, 'SLURM_NTASKS')
    return 'slurm' if tasks > 1 and all(name in environ for name in SLURM_VARIABLES) else ''


def check_launcher(method: str, environ: Mapping[str, str], *, asked: bool) -> Callable[[], object]:
    """Checks that this process was started by the launcher `method`.

    Args:
      method: one of 'slurm', 'ompi' and 'mpi4py'.
      environ: the environment variables.
      asked: True if the user named the method, False if it was detected.

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

    It may if it is alone on its host, or if its launcher gave each process its own GPUs. Otherwise
    each process of a host uses the GPU with its local index.
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


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, '')
    return int(value) if value.isdigit() else 0


def _connect(start: Start, how: str, **arguments: Any) -> None:
    logging.info(
        'started %s; waiting for the other processes, up to %d s ...', how, start.wait_seconds
    )
    not_found = (
        f'the processes did not find each other in {start.wait_seconds} s (--wait_seconds). '
        'Each needs the address of process 0, which must be reachable, the same number of '
        'processes, and its own index.'
    )
    _AbortMessage.arm(not_found)
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
        _AbortMessage.disarm()
        raise PeersMissingError(f'{not_found}\n{error}') from None
    _AbortMessage.disarm()
    me = f'process {jax.process_index()} of {jax.process_count()}'
    _AbortMessage.arm(
        f'{me} ended early: it was killed, or another process of the run died or cannot '
        'be reached any more (see above, and the output of the others). The same command on all '
        'processes, or on fewer, resumes from the last checkpoint.'
    )
    logging.info('%s, started %s', me, how)


def agree(values: Mapping[str, object]) -> None:
    """Checks that all processes of the run have the same values.

    A collective operation: every process must call it.

    Raises:
      UserError: on every process, if a value of one differs from that of process 0.
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
                f'{n}: {texts[0].get(n, "not there")} on process 0, '
                f'{other.get(n, "not there")} on process {number}'
                for n in names
            ]
            raise UserError(
                'the processes of a run must agree:\n  '
                + '\n  '.join(lines)
                + '\nGive each the same command, files and versions.'
            )


def _gather(value: dict[str, str]) -> list[dict[str, str]]:
    """Returns the value of every process, by process index."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([data.size], np.int32))).reshape(
        -1
    )
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def end(code: int, *, explained: bool = True) -> NoReturn:
    """Exits at once, without waiting for threads of libraries or for the other processes.

    JAX aborts the other processes unless they are done.

    Args:
      code: the exit code.
      explained: True if the reason was printed; otherwise the message of `_AbortMessage` follows.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if explained:
        _AbortMessage.disarm()
    if jax.distributed.is_initialized() and jax.process_index() == 0:
        time.sleep(LAST_WORDS_SECONDS)
    os._exit(code)


class _AbortMessage:
    """An error message for the case that this process is killed or aborted.

    Python cannot print anything then, so a child shell waits for the end of this process and prints
    the message.
    """

    _shell: subprocess.Popen[bytes] | None = None

    @classmethod
    def arm(cls, text: str) -> None:
        """Starts the shell."""
        # In its own session, so that signals to the process group do not reach it.
        command = ['/bin/sh', '-c', 'read -r word || printf "%s\\n" "$0" >&2', f'\nerror: {text}']
        cls._shell = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    @classmethod
    def disarm(cls) -> None:
        """Ends the shell without a message."""
        shell, cls._shell = cls._shell, None
        if shell is not None:
            with contextlib.suppress(BrokenPipeError):
                shell.communicate(b'alive\n')
