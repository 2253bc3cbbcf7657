"""The table of kernels beside other libraries, and what docs/kernels.md says of its rows."""

from __future__ import annotations

import pathlib
import re

from support.markdown import cells

from jaxunet.runtime import rows
from tools.docs import peer_table as table

ORIGIN = {
    'git': 'abc',
    'device': 'gpu',
    'versions': {'jax': '1', 'torch': '2', 'nvidia-cudnn-cu13': '3'},
    'batch': 32,
    'dtype': 'bfloat16',
}


def group(op, cases, direction='forward'):
    return {**ORIGIN, 'op': op, 'direction': direction, 'cases': cases}


ROWS = [
    group(
        'attention',
        {
            'a': {'us_cuda': 2.0, 'us_xla': 3.0, 'us_cudnn': 5.0, 'us_pytorch': 1.0},
            'b': {'us_cuda': 4.0, 'us_xla': 8.0, 'us_cudnn': None},
        },
    ),
    group(
        'linear',
        {
            'a': {'us_cuda': 2.0, 'us_xla': 3.0, 'us_pytorch': 1.0},
            'b': {'us_cuda': 4.0, 'us_xla': 6.0, 'us_pytorch': 8.0},
            'c': {'us_cuda': 100.0, 'us_xla': 900.0},
        },
    ),
    {**ORIGIN, 'op': 'conv3x3', 'direction': 'input_gradient', 'case': 'a'}
    | {'us_cuda': 8.0, 'us_xla': 10.0},
]


def test_attention_has_a_line_for_each_shape_and_other_ops_sum_those_with_all_times():
    shown = table.beside(table.cases(ROWS))
    head = shown.splitlines()[0]
    assert head.endswith(' µs | XLA / CUDA | cuDNN / CUDA | PyTorch / CUDA |')
    assert cells(shown) == [
        ['attention', 'forward', '32', 'a', '2.0', '1.50', '2.50', '0.50'],
        ['attention', 'forward', '32', 'b', '4.0', '2.00', '–', '–'],
        ['linear', 'forward', '32', '2 of 3', '6.0', '1.50', '–', '1.50'],
        ['conv3x3', 'input_gradient', '32', '1 of 1', '8.0', '1.25', '–', '–'],
    ]
    assert shown.endswith('\n\ngpu, jax 1, commit abc; torch 2, nvidia-cudnn-cu13 3; bfloat16.')


def test_the_page_says_where_others_are_as_fast():
    """The ranges of `linear`, and the number of measurements without times of PyTorch."""
    page = pathlib.Path(__file__).parents[2] / 'docs/kernels.md'
    text = re.sub(r'\s+', ' ', page.read_text())
    text = text[text.index('### Kernels beside other libraries') :]
    measured = table.cases(rows.read(table.ROWS))
    lost = sum(not table.time(row, 'pytorch') for row in measured)
    assert f'no times in {lost} of the {len(measured)} measurements' in text
    for direction, told in (
        ('forward', 'XLA takes {} times as long as the CUDA kernels, and PyTorch {}:'),
        ('forward+backward', 'XLA takes {} times as long, and PyTorch {}.'),
    ):
        mine = [r for r in measured if (r['op'], r['direction']) == ('linear', direction)]
        ranges = []
        for side in ('xla', 'pytorch'):
            found = [table.time(r, side) / table.time(r, 'cuda') for r in mine]
            found = [ratio for ratio in found if ratio]
            ranges.append(f'{min(found):.2f} to {max(found):.2f}')
        assert told.format(*ranges) in text
