"""tools/gpu/release.sh, with stand-ins for Python and others: no GPU is needed."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'tools/gpu/release.sh'
STAND_INS = {
    'python3': 'echo "$CUDA_VISIBLE_DEVICES $*" >> "$CALLS"',
    'nvidia-smi': 'printf "0\\n1\\n"',
    'taskset': '[ "$1" = -p ] || { shift 2; exec "$@"; }',
}


@pytest.mark.parametrize(
    ('visible', 'every', 'first', 'last'),
    [('', '', '0', '1'), ('3,5,7', '3,5,7', '3', '7')],
)
def test_it_keeps_to_the_visible_gpus(
    visible: str, every: str, first: str, last: str, tmp_path: pathlib.Path
) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{text}\n')
        (tmp_path / name).chmod(0o700)
    for name in ('images.zip', 'calls'):
        (tmp_path / name).touch()
    done = subprocess.run(
        ['bash', SCRIPT, tmp_path / 'out', '1', 'scaling', 'steps', 'soak'],
        env=os.environ
        | {
            'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}',
            'CALLS': str(tmp_path / 'calls'),
            'IMAGES': str(tmp_path / 'images.zip'),
            'CUDA_VISIBLE_DEVICES': visible,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / 'calls').read_text().splitlines()

    def gpus(what: str) -> set[str]:
        return {line.split(' ', maxsplit=1)[0] for line in calls if what in line}

    count = len(visible.split(',')) if visible else 2
    assert gpus('every_gpu') == gpus(f'--vary parallel.devices=1,{count} ') == {every}
    assert gpus('--preset amp') == gpus('tools/gpu/steps.py') == {first}
    assert gpus('tools/soak/run.py') == {last}
