"""Runs commands one after another, each in a fork of a process that has imported what they need.

A command is then what `python -m` makes of it, with its own exit code, but without the second or
two of imports.

    python tests/support/forks.py < REQUESTS

REQUESTS is a JSON list of objects: `arguments` (the module's name first), the working `folder`, and
the files `stdout` and `stderr`. Prints the exit codes as a JSON list.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys

# Imported for the forks. A thread would be lost, but only OpenBLAS starts one, and replaces it.
import jaxunet.sampling.partial_output
import jaxunet.sampling.sampler
import jaxunet.training.loop  # noqa: F401

SECONDS = 200  # of a command: one that should stop at a mistake could train for ever


def main() -> None:
    codes = []
    for request in json.load(sys.stdin):
        if not (process := os.fork()):
            return become(request)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    print(json.dumps(codes))


def become(request: dict) -> None:
    """Makes this process the command; it ends as Python does."""
    for name, descriptor in (('stdout', 1), ('stderr', 2)):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(request['folder'])
    signal.alarm(SECONDS)
    sys.argv = request['arguments']
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    main()
