"""tools/gpu/test.sh and its plugin, with stand-ins for Python and nvidia-smi: no GPU is needed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / 'tools/gpu'
PYTHON = '#!/bin/sh\nprintf "%s " "$CUDA_VISIBLE_DEVICES" "$@"; echo\n'
SPREAD = '-m pytest -m gpu -q -p no:benchmark -p show_failures -n {} -p one_gpu_each'
TOGETHER = '-m pytest -m gpu -q -p no:benchmark -p show_failures -n 6'


def run(folder: pathlib.Path, gpus: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Runs the script on a machine with these GPUs; returns its exit status and output."""
    for name, text in (('python3', PYTHON), ('nvidia-smi', f'#!/bin/sh\nprintf "{gpus}"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    environment = {k: v for k, v in os.environ.items() if k != 'CUDA_VISIBLE_DEVICES'}
    environment |= {'PATH': f'{folder}{os.pathsep}{os.environ["PATH"]}'} | variables
    done = subprocess.run(
        ['bash', FOLDER / 'test.sh', *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_workers_divide_the_gpus(tmp_path):
    assert run(tmp_path, '0\\n') == (0, f'0 {SPREAD.format(8)} \n')
    both = f'0,1 {SPREAD.format(16)}'
    every = f'0,1 {TOGETHER} tests/gpu/test_gpu.py tests/gpu/test_processes.py -k every_gpu'
    assert run(tmp_path, '0\\n1\\n') == (0, f'{both} \n{every} \n')
    assert run(tmp_path, '0\\n1\\n', '-x') == (0, f'{both} -x \n')
    one = run(tmp_path, '0\\n1\\n', CUDA_VISIBLE_DEVICES='1')
    assert one == (0, f'1 {SPREAD.format(8)} \n')
    code, out = run(tmp_path, '')
    assert (code, out) == (2, 'error: expected an NVIDIA GPU, found none\n')


@pytest.mark.parametrize(
    ('worker', 'visible', 'found'),
    [('gw0', '2,5', '2'), ('gw3', '2,5', '5'), ('', '2,5', '2,5'), ('gw3', '', '')],
)
def test_each_worker_has_one_gpu(worker, visible, found):
    variables = {'PYTEST_XDIST_WORKER': worker, 'CUDA_VISIBLE_DEVICES': visible}
    code = 'import os, one_gpu_each; print(os.environ["CUDA_VISIBLE_DEVICES"])'
    out = subprocess.check_output(
        [sys.executable, '-c', code],
        env=os.environ | variables | {'PYTHONPATH': str(FOLDER)},
        text=True,
    )
    assert out.strip() == found
