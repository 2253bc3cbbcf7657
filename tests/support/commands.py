"""Runs the commands of the project in their own processes."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import itertools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping

from support.settings import QUICK

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 400  # limit of a command; without it, one that misses a mistake could train for ever
CHILDREN_SECONDS = 5  # time for a command's children to print their last messages
# The environment of this process without what a cluster's launcher sets.
NO_LAUNCHER = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(('SLURM_', 'OMPI_', 'PMI'))
}


def python_path() -> str:
    """Returns PYTHONPATH for a command of this checkout in any working folder.

    It has the folders of the checkout first, then those of this process.
    """
    given = os.environ.get('PYTHONPATH', '').split(os.pathsep)
    return os.pathsep.join([str(ROOT), *(os.path.abspath(folder) for folder in given if folder)])


def environment(devices: int = 1) -> dict[str, str]:
    """Returns the environment of a command on CPU devices."""
    return os.environ | {
        'XLA_FLAGS': f'{QUICK} --xla_force_host_platform_device_count={devices}',
        'JAX_PLATFORMS': 'cpu',
    }


class Forks:
    """The process of `forks.py`, and a folder for what its forks print."""

    def __init__(self, platform: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()
        self._errors = self.file()
        with self._errors.open('w') as errors:
            self._process = subprocess.Popen(
                [sys.executable, ROOT / 'tests' / 'support' / 'forks.py'],
                env=environment() | {'PYTHONPATH': python_path(), 'JAX_PLATFORMS': platform},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def file(self) -> pathlib.Path:
        """Returns the path of a new, empty file."""
        path = pathlib.Path(self._folder.name) / str(next(self._numbers))
        path.touch()
        return path

    def ask(self, **request: object) -> int | None:
        """Returns the answer to a request of `forks.py`: a process, its exit code, or None."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, self._errors.read_text()
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process, but not the forks that still run."""
        self._process.communicate()
        self._folder.cleanup()


@functools.cache
def forks(platform: str) -> Forks:
    """Returns the `Forks` that all commands of this process on a platform share.

    Args:
      platform: JAX_PLATFORMS, which JAX reads while it is imported.
    """
    started = Forks(platform)
    atexit.register(started.close)
    return started


class Fork:
    """`python -m ARGUMENTS`, forked from a process that has done its imports; used like a `Popen`.

    Attributes:
      pid: id of the process.
      returncode: exit code, or None before the process was found to have ended.
      stdout, stderr: files with what it has printed so far.
    """

    def __init__(
        self,
        arguments: Iterable[object],
        env: Mapping[str, str] | None = None,
        folder: pathlib.Path | None = None,
    ) -> None:
        """Starts the command.

        Args:
          arguments: those of `python -m`.
          env: environment variables; default: `environment()`.
          folder: working folder of the command; default: that of this process.
        """
        env = dict(environment() if env is None else env)
        self._forks = forks(env['JAX_PLATFORMS'])
        self.stdout, self.stderr = self._forks.file(), self._forks.file()
        self.returncode: int | None = None
        self.pid = self._forks.ask(
            start=[str(argument) for argument in arguments],
            folder=str(folder or pathlib.Path.cwd()),
            environment=env,
            stdout=str(self.stdout),
            stderr=str(self.stderr),
        )

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._forks.ask(wait=self.pid, seconds=0)
        return self.returncode

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """Waits until the process ends; returns what it printed to stdout and stderr.

        Raises:
          subprocess.TimeoutExpired: it runs for longer than `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._forks.ask(wait=self.pid, seconds=timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout, stderr=self.stderr.read_bytes())
        self._wait_for_children()
        return self.stdout.read_text(), self.stderr.read_text()

    def _wait_for_children(self) -> None:
        """Waits up to `CHILDREN_SECONDS` for the children that share stderr to end.

        If a command is killed, only a child of it can print a message about that.
        """
        end = time.monotonic() + CHILDREN_SECONDS
        with self.stderr.open() as file:
            while time.monotonic() < end:
                with contextlib.suppress(BlockingIOError):
                    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def call(
    *arguments: object,
    code: int = 0,
    devices: int = 1,
    variables: Mapping[str, str] | None = None,
    folder: pathlib.Path | None = None,
    fresh: bool = False,
) -> str:
    """Runs a command.

    Args:
      arguments: those of `python -m`.
      code: the exit code that it must have.
      devices: number of CPU devices that JAX emulates.
      variables: further environment variables.
      folder: working folder of the command; default: that of this process.
      fresh: start a new Python process, as a user does, instead of a `Fork`.

    Returns:
      its stdout, or its stderr if `code` is not 0.
    """
    env = environment(devices) | {'PYTHONPATH': python_path()} | (variables or {})
    process = (
        subprocess.Popen(
            [sys.executable, '-m', *map(str, arguments)],
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if fresh
        else Fork(arguments, env, folder)
    )
    try:
        out, error = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == code, out + error
    assert 'Traceback' not in error
    return out if code == 0 else error


def call_each(commands, folder):
    """Runs each of the commands in its own `Fork` and its own folder.

    Args:
      commands: lists of arguments of `python -m`.
      folder: gets an empty working folder for every command, named by its number.

    Returns:
      (exit code, stdout, stderr) of every command.
    """
    results = []
    for number, arguments in enumerate(commands):
        here = folder / str(number)
        here.mkdir()
        process = Fork(arguments, folder=here)
        printed = process.communicate()
        results.append((process.returncode, *printed))
    return results


def free_port():
    """Returns a TCP port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(('localhost', 0))
        return listener.getsockname()[1]
