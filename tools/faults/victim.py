"""A command of jaxunet that something happens to: `tools.faults.victim FAULT MODULE ARGUMENTS`.

It is a module for `support.commands.Fork`. FAULT is JSON:
  marks: a file that gets a line for every stage that the command enters, for the process that kills
    it from outside.
  die_at_write: the command kills itself at this change of a file below `below`, counted from 1. It
    is the moment before Python makes, renames, opens for writing or removes something.
  clock: a seed; Python's wall clock jumps by years now and then, forwards and backwards.
  full: [stage, count]; the device has no memory left when the command enters the stage for the
    count-th time. A step then loses the state that it was given, as a real one does.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from support.full_memory import exhaust, exhausting

from jaxunet.checkpoint.store import Checkpoints
from jaxunet.sampling.generator import Generator
from jaxunet.training.evaluation import Evaluator
from jaxunet.training.outputs import UNetOutputs
from jaxunet.training.parallel import Parallel
from jaxunet.training.session import Session

# The functions that begin a stage.
STAGES = {
    'restore': (Checkpoints, 'restore'),
    'compile': (Session, 'compile'),
    'step': (Session, 'call'),
    'checkpoint': (Checkpoints, 'save'),
    'sampling': (UNetOutputs, 'sample'),
    'evaluation': (UNetOutputs, 'evaluate'),
    'generation': (Generator, '__call__'),
}
# The functions in which a device runs out of memory.
FULL = {
    'load': (Parallel, 'replicate'),
    'compile': (Parallel, 'compile'),
    'step': (Session, 'call'),
    'generation': (Generator, '__call__'),
    'evaluation': (Evaluator, 'compare'),
}
YEAR = 365 * 86400.0
CHANGES = {'os.mkdir', 'os.rename', 'os.remove', 'os.rmdir'}  # audit events whose path comes first


def main() -> None:
    """Prepares the fault and becomes the command."""
    fault = json.loads(sys.argv[1])
    sys.argv = sys.argv[2:]
    if 'marks' in fault:
        _mark_stages(fault['marks'])
    if 'die_at_write' in fault:
        sys.addaudithook(_Death(fault['die_at_write'], fault['below']))
    if 'full' in fault:
        _fill(*fault['full'])
    if 'clock' in fault:
        _jump(random.Random(fault['clock']))
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)


def _mark_stages(path: str) -> None:
    marks = os.open(path, os.O_WRONLY | os.O_APPEND)

    def marking(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*arguments: Any, **named: Any) -> Any:
            os.write(marks, f'{stage}\n'.encode())
            return function(*arguments, **named)

        return marked

    os.write(marks, b'start\n')
    for stage, (place, name) in STAGES.items():
        setattr(place, name, marking(stage, getattr(place, name)))


class _Death:
    """An audit hook that kills the process at one of its changes of files."""

    def __init__(self, number: int, below: str) -> None:
        self.left, self.below = number, below

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == 'open' and isinstance(arguments[2], int) and arguments[2] & 3
        if not writes and event not in CHANGES:
            return
        if not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.fspath(arguments[0])
        if path.startswith('/proc/self/fd/'):  # the folder of a run that is open
            path = os.path.realpath(path)
        if path.startswith(self.below):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def _fill(stage: str, count: int) -> None:
    place, name = FULL[stage]
    function, calls = getattr(place, name), itertools.count(1)

    @functools.wraps(function)
    def filling(*arguments: Any, **named: Any) -> Any:
        if next(calls) == count:
            if stage != 'step':
                exhaust()
            arguments[0].step = exhausting(arguments[0].step)
        return function(*arguments, **named)

    setattr(place, name, filling)


def _jump(rng: random.Random) -> None:
    now, offset = time.time, 0.0

    def jumping() -> float:
        nonlocal offset
        if rng.random() < 0.002:
            offset = rng.uniform(-20, 20) * YEAR
        return now() + offset

    time.time = jumping
    time.time_ns = lambda: int(jumping() * 1e9)


if __name__ == '__main__':
    main()
