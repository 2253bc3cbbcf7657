"""Runs over several processes or hosts: start, agreement, and termination when one is lost.

JAX's coordination service runs in process 0. The death of process 0 is noticed at once, that of
another process when its heartbeats have been missing for `heartbeat_seconds`. A thread of JAX then
aborts the other processes, even if they are waiting for something.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from jaxunet.runtime.by_hand import (
    check_by_hand,
    check_listens,
    listens_at,
    shared_gpu_error,
    shares_gpu,
)
from jaxunet.runtime.errors import ERROR, UserError
from jaxunet.runtime.file_errors import explained
from jaxunet.runtime.launchers import (
    STARTED,
    all_devices,
    check_launcher,
    coordinator,
    detect,
    lone_task,
)
from jaxunet.runtime.no_device import needs_device
from jaxunet.runtime.out_of_memory import memory_for
from jaxunet.runtime.untrusted import one_line

# Process 0 waits this long before it exits with an error, because its exit makes JAX abort the
# others: processes that fail for the same reason can report it themselves.
LAST_WORDS_SECONDS = 3.0
FINISH_SECONDS = 3600  # time limit of process 0 for its last checkpoint, while the others wait
PEERS_MISSING = 4  # exit code of processes that did not find each other
# In the errors of collective operations and of the coordination service.
LOST_PEER = re.compile(r'\b(gloo|nccl)|by peer|UNAVAILABLE|unhealthy|heartbeat', re.IGNORECASE)


class PeersMissingError(UserError):
    """The processes of a run did not find each other."""

    exit_code = PEERS_MISSING


@dataclass(frozen=True)
class Start:
    """The launcher of this process, and time limits for the other processes.

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
        with memory_for('this process', 'lower its batch size'), needs_device():
            with explained():
                yield
            jax.distributed.shutdown()  # waits for the others
        _AbortMessage.disarm()
    except BaseException as error:
        if shares_gpu(error):
            error = shared_gpu_error()
        if isinstance(error, UserError):
            print(f'error: {error}', file=sys.stderr)
            end(error.exit_code)
        if isinstance(error, KeyboardInterrupt):
            raise
        if is_of_lost_peer(error):
            print(f'error: {one_line(error)}', file=sys.stderr)
        else:
            traceback.print_exc()
        end(ERROR, explained=False)


def is_of_lost_peer(error: BaseException) -> bool:
    """Returns True for JAX's error when a process that others wait for has died or is cut off."""
    return isinstance(error, jax.errors.JaxRuntimeError) and bool(LOST_PEER.search(str(error)))


def check_flags(start: Start) -> None:
    """Raises `UserError` if the flags are inconsistent."""
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


def join(start: Start) -> bool:
    """Connects all processes of the run; returns True if there are several.

    Call it before anything asks JAX for devices.

    Raises:
      UserError: the processes cannot find each other, or the flags are inconsistent.
    """
    check_flags(start)
    if start.coordinator is not None:
        if start.processes == 1:
            return False
        bind = listens_at(start.coordinator) if start.process == 0 else None
        _connect(start, 'by hand', start.coordinator, bind, 'deactivate')
        return True
    methods = {'auto': detect(os.environ), 'none': ''}
    method = methods.get(start.cluster, start.cluster)
    if not method:
        if start.cluster == 'auto' and (warning := lone_task(os.environ)):
            logging.warning('%s', warning)
        return False
    finalize = check_launcher(method, os.environ, asked=start.cluster != 'auto')
    devices: list[int] | None = (
        None if 'JAX_LOCAL_DEVICE_IDS' in os.environ or not all_devices(method, os.environ) else []
    )
    # [] gives this process all devices that it sees; None gives it the one with its local index.
    _connect(
        start, STARTED[method], *coordinator(method, os.environ), method, local_device_ids=devices
    )
    finalize()
    return True


def _connect(
    start: Start, how: str, address: str, bind: str | None, detection: str, **arguments: Any
) -> None:
    """Connects to process 0.

    Args:
      start: gives the time limits.
      how: phrase that says how the processes were started, for messages.
      address: HOST:PORT of process 0.
      bind: HOST:PORT that this process listens at, if it is process 0.
      detection, arguments: for `jax.distributed.initialize`.

    Raises:
      PeersMissingError: the processes do not find each other.
      UserError: process 0 cannot listen at its address.
    """
    if bind:
        check_listens(bind)
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
            address,
            start.processes,
            start.process,
            cluster_detection_method=detection,
            coordinator_bind_address=bind,
            initialization_timeout=start.wait_seconds,
            heartbeat_timeout_seconds=start.heartbeat_seconds,
            shutdown_timeout_seconds=FINISH_SECONDS,
            **arguments,
        )
    except (RuntimeError, ValueError) as error:  # JaxRuntimeError is a RuntimeError
        _AbortMessage.disarm()
        raise PeersMissingError(f'{not_found}\n{error}') from None
    _AbortMessage.disarm()
    # JAX aborts this process if another one dies; absl would then print the stacks of all threads.
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
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
      UserError: a value of some process differs from that of process 0; raised on every process.
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


def wait_for_others(place: str) -> None:
    """Waits until all processes of the run have called this.

    A collective operation: every process must call it.

    Args:
      place: name of the place in the code, the same on all processes.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def of_process_0(values: Sequence[bool]) -> list[bool]:
    """Returns the values of process 0; a collective operation, which every process must call."""
    return [bool(x) for x in multihost_utils.broadcast_one_to_all(np.array(values))]


def number_of_process_0(value: float) -> float:
    """Returns the number of process 0, as float32 if there are several processes.

    A collective operation, which every process must call.
    """
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.array(value, np.float32)))


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

    JAX then aborts the other processes, unless they have ended.

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
    """An error message that appears if this process is killed or aborted.

    Python cannot print anything in that case. So a child process, a shell, waits for the end of
    this process and prints the message.
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
