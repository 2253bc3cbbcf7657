"""tools/gpu/recipes.sh, with stand-ins for Python and NVIDIA's programs: no GPU is needed."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tarfile
import time

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'tools/gpu/recipes.sh'
CPU = min(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else 0
# A process of the queue: writes its arguments and variables, and waits until it may end.
PYTHON = """#!/bin/sh
printf '%s\\n' "$@" > "$CUDA_VISIBLE_DEVICES-$NUMBER.arguments"
env > "$CUDA_VISIBLE_DEVICES-$NUMBER.variables"
while [ ! -f end ]; do sleep 0.05; done
"""
# NVIDIA's program: writes what it is asked to do, and answers like a service that runs or does not.
CONTROL = """#!/bin/sh
service=$CUDA_MPS_PIPE_DIRECTORY/service
if [ "${1:-}" = -d ]; then
  echo "start for ${CUDA_VISIBLE_DEVICES:-all GPUs}" >> asked
  [ ! -f broken ] || exit 1
  touch "$service"
  exit
fi
read -r command
[ "$command" = get_server_list ] || echo "$command $(ls out/*.done | wc -l)" >> asked
if [ ! -f "$service" ]; then
  echo 'Cannot find MPS control daemon process'
  exit 1
fi
[ "$command" != quit ] || rm "$service"
"""
# The programs of the script before it starts a process.
TOOLS = ('bash', 'env', 'realpath', 'dirname', 'mkdir', 'flock')

pytestmark = pytest.mark.skipif(
    not (shutil.which('taskset') and shutil.which('flock')), reason='no util-linux here'
)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with nothing but the script, and with jobs whose features are there."""
    checkout = tmp_path / 'checkout'
    (checkout / 'tools/gpu').mkdir(parents=True)
    shutil.copy(SCRIPT, checkout / 'tools/gpu')
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
        [checkout / 'tools/gpu/recipes.sh', *arguments],
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


def test_slowdown_and_judge_are_those_of_the_variables(checkout):
    assert start(checkout, 2).returncode == 0
    own = {'RECIPE_SLOWDOWN': '1.9', 'RECIPE_JUDGE': 'effnet.pth'}
    assert start(checkout, 3, **own).returncode == 0
    for arguments, slowdown, judge in zip(
        wait_for(checkout, '2-1.arguments', '3-2.arguments'),
        ('0', '1.9'),
        ('', 'effnet.pth'),
        strict=True,
    ):
        assert arguments[arguments.index('--slowdown') + 1] == slowdown
        assert arguments[arguments.index('--judge') + 1] == judge


def test_without_an_action_it_says_how_it_is_used(checkout):
    ended = call(checkout)
    assert ended.returncode == 2
    usage = ended.stderr.splitlines()
    assert usage[0].startswith('# Runs jobs of docs/results/recipes')
    assert usage[-1].startswith('# Example, ')
    assert all(line.startswith('#') for line in usage)


def variables(checkout, *names):
    """Returns the variables of processes that have started."""
    return [
        dict(line.partition('=')[::2] for line in lines)
        for lines in wait_for(checkout, *(f'{name}.variables' for name in names))
    ]


def test_processes_share_a_service_until_the_last_one_ends(checkout):
    stand_in(checkout, 'nvidia-cuda-mps-control', CONTROL)
    assert start(checkout, 2, 2, RECIPE_MPS='true', CUDA_VISIBLE_DEVICES='2').returncode == 0
    assert start(checkout, 3, RECIPE_MPS='true').returncode == 0
    shares = ('.29', '.29', '.44')
    for found, share in zip(variables(checkout, '2-1', '2-2', '3-3'), shares, strict=True):
        assert found['XLA_PYTHON_CLIENT_MEM_FRACTION'] == share
        assert found['CUDA_MPS_PIPE_DIRECTORY'] == str(checkout / 'out/mps')
    assert (checkout / 'asked').read_text() == 'start for all GPUs\n'
    (checkout / 'end').touch()
    call(checkout, 'wait', 'out', '30')
    for _ in range(100):  # the last process ends the service after it has said that it ends
        asked = (checkout / 'asked').read_text().splitlines()
        if len(asked) > 1:
            break
        time.sleep(0.05)
    assert asked == ['start for all GPUs', 'quit 3']
    # The next start makes a service of its own.
    (checkout / 'end').unlink()
    assert start(checkout, 4, RECIPE_MPS='true', RECIPE_PROCESSES='3').returncode == 0
    (found,) = variables(checkout, '4-1')
    assert found['XLA_PYTHON_CLIENT_MEM_FRACTION'] == '.22'
    assert (checkout / 'asked').read_text().splitlines()[-1] == 'start for all GPUs'


def test_without_the_option_there_is_no_service(checkout):
    stand_in(checkout, 'nvidia-cuda-mps-control', CONTROL)
    assert start(checkout, 2).returncode == 0
    (found,) = variables(checkout, '2-1')
    assert 'CUDA_MPS_PIPE_DIRECTORY' not in found
    (checkout / 'end').touch()
    call(checkout, 'wait', 'out', '30')
    assert not (checkout / 'asked').exists()


def test_a_service_that_does_not_start_is_an_error(checkout):
    stand_in(checkout, 'nvidia-cuda-mps-control', CONTROL)
    (checkout / 'broken').touch()
    ended = start(checkout, 2, RECIPE_MPS='true')
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: NVIDIA's multi-process service did not start")
    assert not list((checkout / 'out').glob('*.log'))


def test_the_error_names_the_missing_program(checkout, tmp_path):
    for tool in TOOLS:  # a PATH that has NVIDIA's program on no machine
        (tmp_path / tool).symlink_to(shutil.which(tool))
    ended = start(checkout, 2, RECIPE_MPS='true', path=str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.startswith('error: RECIPE_MPS=true needs nvidia-cuda-mps-control')
    assert not list((checkout / 'out').glob('*.log'))


@pytest.mark.parametrize('output', ['out', 'out/'])
def test_results_of_all_processes_are_packed(checkout, output):
    for number in (1, 10):
        folder = checkout / f'out/{number}'
        (folder / 'logs').mkdir(parents=True)
        (folder / 'rows.jsonl').write_text(f'{number}\n')
        (folder / f'logs/{number}.csv').touch()
        (checkout / f'out/{number}.log').write_text('begins\rends')
        (checkout / f'out/{number}.done').touch()
    (checkout / 'out/work/1/logs').mkdir(parents=True)
    (checkout / 'out/work/1/logs/unfinished.csv').touch()
    assert call(checkout, 'pack', output, 'packed').returncode == 0
    packed = checkout / 'packed'
    assert sorted((packed / 'rows.jsonl').read_text().split()) == ['1', '10']
    assert (packed / '10.log').read_text() == 'begins\nends'
    with tarfile.open(packed / 'pictures.tar') as archive:
        assert sorted(archive.getnames()) == ['logs/1.csv', 'logs/10.csv']
