"""The splits of the weight gradients of one launch, printed by `hopper/splits_test.cc`."""

import os
import pathlib
import shutil
import subprocess

import jax.ffi
import pytest

XLA_FFI = pathlib.Path(__file__).parents[1]
SOURCES = ('conv3x3/hopper/splits_test.cc', 'conv3x3/hopper/splits.cc')
NAMES = (os.environ.get('CXX', ''), 'c++', 'g++', 'clang++')
COMPILER = next((path for name in NAMES if name and (path := shutil.which(name))), '')
# What splits.cc needs of CUDA, which this machine may lack.
CUDA = """\
#pragma once
using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
"""


@pytest.mark.skipif(
    not COMPILER, reason='no C++ compiler: none of CXX, c++, g++, clang++ is on PATH'
)
def test_a_linear_layer_does_not_keep_a_launch_from_being_split(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'cuda_runtime_api.h').write_text(CUDA)
    program = tmp_path / 'splits_test'
    command = [COMPILER, '-std=c++17', f'-I{XLA_FFI}', '-isystem', str(tmp_path)]
    command += ['-isystem', jax.ffi.include_dir()]
    command += [*(str(XLA_FFI / source) for source in SOURCES), '-o', str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    splits = {
        name: [int(count) for count in counts.split()]
        for name, counts in (line.split(':') for line in printed.splitlines())
    }
    # Without splits, a few blocks would compute everything, while most of the GPU is idle.
    assert splits == {
        'convolution': [64],
        'convolution and linear layer': [64, 16],
        'convolution with shortcut and linear layer': [52, 13],
    }
