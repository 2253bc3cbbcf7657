"""Commands that nobody listens to any more: they do their work, and end as if they were heard."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest
from support.commands import ROOT, Fork
from support.tiny import tiny_config
from support.untrained_features import write_untrained
from support.weight_cases import random_params

from jaxunet.weights import write_weights

# Loses the streams, as a shell or a terminal does, and becomes the command.
LOSE = """
import os, runpy, sys

way, sys.argv = sys.argv[1], sys.argv[2:]
which, _, how = way.partition(' ')
for descriptor in {'stdout': [1], 'stderr': [2], 'both': [1, 2]}[which]:
    name = ('stdout', 'stderr')[descriptor - 1]
    if how == 'closed':
        os.close(descriptor)
        setattr(sys, name, None)
        continue
    if how == 'on a full disk':
        lost = os.open('/dev/full', os.O_RDWR)
    elif how == 'without a reader':
        reader, lost = os.pipe()
        os.close(reader)
    else:
        terminal, lost = os.openpty()
        os.close(terminal)
    os.dup2(lost, descriptor)
    os.close(lost)
    lines = name == 'stderr' or 'terminal' in how
    setattr(sys, name, open(descriptor, 'w', buffering=1 if lines else -1, closefd=False))
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""
WAYS = (
    'stdout closed',
    'stderr closed',
    'both closed',
    'stdout on a full disk',
    'both on a full disk',
    'stdout without a reader',
    'stderr without a reader',
    'both at a closed terminal',
)


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    """A folder with the files that the commands read."""
    folder = tmp_path_factory.mktemp('inputs')
    config = tiny_config()
    write_weights(folder / 'w.safetensors', random_params(config), config)
    rng = np.random.default_rng(0)
    for name in ('a', 'b'):
        images = rng.integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)
        np.savez(folder / f'{name}.npz', images=images)
    write_untrained(folder)
    return folder


COMMANDS = {
    'prepare_data': ('y.npz', ['--input=digits:', '--image_size=8', '--channels=1']),
    'export': ('y.safetensors', ['--checkpoint={inputs}/w.safetensors']),
    'sample': ('y.npz', ['--checkpoint={inputs}/w.safetensors', '--num_samples=3', '--steps=2']),
    'evaluate': (
        'y.jsonl',
        [
            '--samples={inputs}/a.npz',
            '--reference={inputs}/b.npz',
            '--metrics=fid',
            '--features={inputs}/random.npz',
        ],
    ),
}


def check(path: pathlib.Path) -> None:
    """Checks that the result of a command is complete."""
    if path.suffix == '.npz':
        with np.load(path) as arrays:
            assert len(arrays['images']) in (3, 1797)
    elif path.suffix == '.jsonl':
        assert json.loads(path.read_text())['metric'].startswith('frechet_distance')
    else:
        assert path.stat().st_size > 1000


FEW = ('both closed', 'both on a full disk', 'stdout without a reader')


@pytest.mark.parametrize(
    ('command', 'ways'),
    [('prepare_data', WAYS), ('export', FEW), ('evaluate', FEW[:1]), ('sample', FEW[:1])]
    + [
        pytest.param(command, WAYS, marks=pytest.mark.long)
        for command in ('export', 'evaluate', 'sample')
    ],
)
def test_the_work_is_done(command, ways, inputs, tmp_path):
    (tmp_path / 'lose.py').write_text(LOSE)
    name, options = COMMANDS[command]
    options = [option.format(inputs=inputs) for option in options]
    processes = {}
    for way in ways:
        output = tmp_path / way / name
        output.parent.mkdir()
        arguments = ['lose', way, f'jaxunet.{command}', *options, f'--output={output}']
        processes[way] = Fork(arguments, folder=tmp_path)
    for way, process in processes.items():
        said, error = process.communicate()
        assert process.returncode == 0, (way, error)
        check(tmp_path / way / name)
        assert [path.name for path in (tmp_path / way).iterdir()] == [name]
        assert 'Traceback' not in error + said
        assert 'INFO:' not in error  # a second handler of the log
        told = re.findall(r'stdout: cannot be written .*', error)
        assert len(told) == (way == 'stdout on a full disk'), (way, error)
        if way.startswith('stderr'):
            assert said, way


@pytest.mark.parametrize('way', WAYS)
def test_a_mistake_keeps_its_exit_code(way, tmp_path):
    """Also one that is found before the command runs."""
    (tmp_path / 'lose.py').write_text(LOSE)
    commands = [
        ['jaxunet.prepare_data', '--input=nowhere', '--image_size=8', '--output=y.npz'],
        ['jaxunet.train', '--config.seeed=1'],
        ['jaxunet.prepare_data', '--inptu=digits:'],
    ]
    for command in commands if way in FEW else commands[:1]:
        process = Fork(['lose', way, *command], folder=tmp_path)
        process.communicate()
        assert process.returncode == 2, command


def test_every_command_runs_in_the_same_way():
    """All `python -m` of the package with flags, as `command.run` is what bears a lost output."""
    with_flags = [
        path
        for path in (ROOT / 'jaxunet').rglob('*.py')
        if re.search(r"^if __name__ == '__main__':\n", text := path.read_text(), re.M)
        and 'flags.DEFINE' in text
    ]
    assert len(with_flags) > 10
    for path in with_flags:
        assert re.search(r'\n    command\.run\(main.*\)\n$', path.read_text()), path
