"""Starts commands as forks of one process that has imported what they need.

A command behaves as with `python -m`, with its own exit code, but saves a second or two of imports.
`support.commands.Fork` sends requests to this process:

    python tests/support/forks.py

Every line of stdin is a request in JSON, and gets a line of JSON as the answer:
  {"start": ARGUMENTS, "folder", "environment", "stdout", "stderr"}: starts a command; the answer is
    its process id. ARGUMENTS are those of `python -m`, `folder` is the working folder, and stdout
    and stderr are paths of files.
  {"wait": PROCESS, "seconds"}: the answer is the exit code, or null if the process still runs then.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import runpy
import signal
import sys
import time

# Imported for the forks. A fork loses threads, but of these imports only OpenBLAS starts threads,
# and it replaces them.
import jaxunet.checkpoint.load
import jaxunet.checkpoint.snapshots
import jaxunet.config.cli
import jaxunet.data.automatic
import jaxunet.metrics.table
import jaxunet.sampling.generator
import jaxunet.sampling.partial_output
import jaxunet.training.loop  # noqa: F401

SECONDS = 400  # limit of a command; without it, one that misses a mistake could train for ever


def main() -> None:
    gc.collect()
    gc.freeze()  # otherwise a fork scans all imported objects when it ends, for half a second
    while line := sys.stdin.readline():
        request = json.loads(line)
        if 'wait' in request:
            answer = wait(request['wait'], request['seconds'])
        elif not (answer := os.fork()):
            return become(request)
        print(json.dumps(answer), flush=True)


def wait(process: int, seconds: float) -> int | None:
    """Returns the exit code of a fork, or None if it still runs after this number of seconds."""
    end = time.monotonic() + seconds
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() >= end:
            return None
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def become(request: dict) -> None:
    """Turns this process into the command, which ends as a Python process does."""
    files = (os.devnull, request['stdout'], request['stderr'])
    for descriptor, (path, flags) in enumerate(
        zip(files, (os.O_RDONLY, *[os.O_WRONLY | os.O_APPEND] * 2), strict=True)
    ):
        file = os.open(path, flags)
        os.dup2(file, descriptor)
        os.close(file)
    fcntl.flock(2, fcntl.LOCK_SH)  # held until all processes that print there have ended
    os.environ.clear()
    os.environ.update(request['environment'])
    os.chdir(request['folder'])
    sys.path[0] = request['folder']
    signal.alarm(SECONDS)
    sys.argv = request['start']
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    main()
