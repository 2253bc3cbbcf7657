"""The splits of the weight gradients of one launch, printed by `hopper/splits_test.cc`."""

import pathlib

from support.cpp import needs_compiler, printed_by

SOURCES = ('conv3x3/hopper/splits_test.cc', 'conv3x3/hopper/splits.cc')
# What splits.cc needs of CUDA, which this machine may lack.
CUDA = """\
#pragma once
using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
"""


@needs_compiler
def test_a_linear_layer_does_not_keep_a_launch_from_being_split(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'cuda_runtime_api.h').write_text(CUDA)
    printed = printed_by(SOURCES, tmp_path)
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
