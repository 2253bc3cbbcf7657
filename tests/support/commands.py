"""The commands of the project as processes of their own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

from support.settings import QUICK

ROOT = pathlib.Path(__file__).parents[2]
# The environment of this process without what a cluster's launcher sets.
NO_LAUNCHER = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(('SLURM_', 'OMPI_', 'PMI'))
}


def environment(devices=1):
    """Returns the environment of a command on CPU devices."""
    return os.environ | {
        'XLA_FLAGS': f'{QUICK} --xla_force_host_platform_device_count={devices}',
        'JAX_PLATFORMS': 'cpu',
    }


def call(*arguments, code=0, devices=1):
    """Runs `python -m ARGUMENTS` and returns its stdout, or its stderr where `code` is not 0."""
    done = subprocess.run(
        [sys.executable, '-m', *arguments],
        env=environment(devices),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,  # a command that should stop at a mistake could train for ever
    )
    assert done.returncode == code, done.stderr
    assert 'Traceback' not in done.stderr
    return done.stdout if code == 0 else done.stderr


def call_each(commands, folder):
    """Runs each of the commands by a process of its own, all of which share their imports.

    Args:
      commands: lists of arguments of `python -m`.
      folder: gets an empty working folder for every command, named by its number.

    Returns:
      (exit code, stdout, stderr) of every command.
    """
    requests = []
    for number, arguments in enumerate(commands):
        files = {name: str(folder / f'{number}.{name}') for name in ('stdout', 'stderr')}
        here = folder / str(number)
        here.mkdir()
        requests.append({'arguments': arguments, 'folder': str(here), **files})
    done = subprocess.run(
        [sys.executable, ROOT / 'tests' / 'support' / 'forks.py'],
        env=environment() | {'PYTHONPATH': str(ROOT)},
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        (code, *(pathlib.Path(request[name]).read_text() for name in ('stdout', 'stderr')))
        for code, request in zip(json.loads(done.stdout), requests, strict=True)
    ]


def free_port():
    """Returns a TCP port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(('localhost', 0))
        return listener.getsockname()[1]
