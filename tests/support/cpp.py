"""The C++ compiler of this machine, for tests that compile programs."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterable

import jax.ffi
import pytest

XLA_FFI = pathlib.Path(__file__).parents[2] / 'xla_ffi'
NAMES = (os.environ.get('CXX', ''), 'c++', 'g++', 'clang++')
COMPILER = next((path for name in NAMES if name and (path := shutil.which(name))), '')

needs_compiler = pytest.mark.skipif(
    not COMPILER, reason='no C++ compiler: none of CXX, c++, g++, clang++ is on PATH'
)


def printed_by(sources: Iterable[str], folder: pathlib.Path) -> str:
    """Compiles a program, runs it, and returns what it prints.

    Args:
      sources: paths in xla_ffi.
      folder: gets the program. Its headers are found before those of the system.
    """
    program = folder / 'program'
    command = [COMPILER, '-std=c++17', f'-I{XLA_FFI}', '-isystem', str(folder)]
    command += ['-isystem', jax.ffi.include_dir()]
    command += [*(str(XLA_FFI / source) for source in sources), '-o', str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout
