"""The commands of the project as processes of their own."""

import os
import socket
import subprocess
import sys

from support.settings import QUICK

# The environment of this process without what a cluster's launcher sets.
NO_LAUNCHER = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(('SLURM_', 'OMPI_', 'PMI'))
}


def call(*arguments, code=0, devices=1):
    """Runs `python -m ARGUMENTS` and returns its stdout, or its stderr where `code` is not 0."""
    environment = os.environ | {
        'XLA_FLAGS': f'{QUICK} --xla_force_host_platform_device_count={devices}',
        'JAX_PLATFORMS': 'cpu',
    }
    done = subprocess.run(
        [sys.executable, '-m', *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert 'Traceback' not in done.stderr
    return done.stdout if code == 0 else done.stderr


def free_port():
    """Returns a TCP port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(('localhost', 0))
        return listener.getsockname()[1]
