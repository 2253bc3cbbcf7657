"""tests/gpu/recipes.sh, with stand-ins for Python, so that no GPU is needed."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parent / 'recipes.sh'
CPU = min(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else 0
# A process of the queue: writes its arguments and variables, and waits until it may end.
PYTHON = """#!/bin/sh
printf '%s\\n' "$@" > "$CUDA_VISIBLE_DEVICES-$NUMBER.arguments"
env > "$CUDA_VISIBLE_DEVICES-$NUMBER.variables"
while [ ! -f end ]; do sleep 0.05; done
"""

pytestmark = pytest.mark.skipif(not shutil.which('taskset'), reason='taskset is not installed')


@pytest.fixture
def checkout(tmp_path):
    """A checkout with nothing but the script, and with jobs whose features are there."""
    checkout = tmp_path / 'checkout'
    (checkout / 'tests/gpu').mkdir(parents=True)
    shutil.copy(SCRIPT, checkout / 'tests/gpu')
    (checkout / 'features.npz').touch()
    stand_in(checkout, 'python3', PYTHON)
    yield checkout
    (checkout / 'end').touch()
    call(checkout, 'wait', 'out', '30')


def stand_in(checkout, name, text):
    """Writes a program that comes first on the PATH."""
    program = checkout / 'bin' / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(text)
    program.chmod(0o755)


def call(checkout, *arguments, path=None, **variables):
    """Runs the script."""
    path = path or f'{checkout / "bin"}:{os.environ["PATH"]}'
    own = {name: value for name, value in os.environ.items() if not name.startswith('RECIPE_')}
    return subprocess.run(
        [checkout / 'tests/gpu/recipes.sh', *arguments],
        env={**own, 'PATH': path, 'RECIPE_JOBS': 'jobs.py:all', **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def start(checkout, *gpus, **options):
    """Starts a process on each GPU."""
    places = [f'{gpu}:{CPU}' for gpu in gpus]
    return call(checkout, 'start', 'data', 'out', '60', '5.6', *places, **options)


def wait_for(checkout, *names):
    """Waits until files are there; returns their lines."""
    missing = ' '.join(f'[ -s {name} ] &&' for name in names)
    command = f'for i in $(seq 400); do {missing} exit 0; sleep 0.05; done; exit 1'
    subprocess.run(['sh', '-c', command], cwd=checkout, check=True)
    return [(checkout / name).read_text().splitlines() for name in names]


def test_commands_name_no_folder_of_the_machine(checkout):
    assert start(checkout, 2, 3).returncode == 0
    names = [f'{gpu}-{i + 1}.arguments' for i, gpu in enumerate((2, 3))]
    for i, arguments in enumerate(wait_for(checkout, *names)):
        assert arguments[arguments.index('--output') + 1] == f'out/{i + 1}'
        assert not [argument for argument in arguments if str(checkout) in argument]
    (checkout / 'end').touch()
    call(checkout, 'wait', 'out', '30')
    assert {path.name for path in (checkout / 'out').glob('*.done')} == {'1.done', '2.done'}
