"""Tables of the kernels' rows."""

from __future__ import annotations

import pathlib

import pytest
from support.commands import call
from support.kernel_measurements import ORIGIN

from jaxunet.benchmark.kernels import table as kernel_table
from jaxunet.benchmark.kernels import verdict
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


def example(
    case: str, batch: int, ratio: float, op: str = 'conv3x3', **changes: object
) -> rows.Row:
    row = {
        'op': op, 'case': case, 'direction': 'forward', 'batch': batch, 'dtype': 'bfloat16',
        'error': None, 'us_pallas': 10.0, 'us_xla': 10.0 * ratio, 'ratio': ratio, 'tflops': 600.4,
        'gbps': 1234.5,
    }  # fmt: skip
    return ORIGIN | row | changes


def test_tables(tmp_path: pathlib.Path) -> None:
    found = [
        {'kind': 'benchmark'},
        example('a', 32, 9.0),  # a later row takes its place
        example('a', 32, 2.0),
        example('b', 32, 0.5),
        example('a', 256, 3.0),
        example('b', 256, 1.0, error='broken'),
        example(
            'n',
            32,
            1.5,
            op='group_norm',
            tflops=None,
            us_cuda=5.0,
            ratio_cuda=3.0,
            tflops_cuda=None,
            gbps_cuda=2469.0,
        ),
    ]
    path = tmp_path / 'rows.jsonl'
    for row in found:
        rows.append(path, row)
    printed = call('jaxunet.benchmark.kernels.__main__', f'--table={path}').splitlines()
    missed = 'not met: mean under 1.5, rates unknown; 1 under 0.95 of XLA'
    assert f'| conv3x3 | forward | 32 | 2 | 1.00 | 0.50 | b | – | {missed} |' in printed
    assert '| conv3x3 | forward | 256 | 1 | 3.00 | 3.00 | a | – | met |' in printed
    assert '| a | 10.0 | 600 | 1234 | 2.00 | 10.0 | 600 | 1234 | 3.00 |' in printed
    assert '| b | 10.0 | 600 | 1234 | 0.50 | – | – | – | – |' in printed
    assert '| n | 10.0 | – | 1234 | 1.50 |' in printed
    (cuda,) = (
        at for at, line in enumerate(printed) if line.endswith("XLA's time over the CUDA kernels'.")
    )
    assert printed[cuda + 4] == '| group_norm | forward | 32 | 1 | 3.00 | 3.00 | n | – | met |'
    assert '| n | 5.0 | – | 2469 | 3.00 |' in printed
    assert sum('NVIDIA H200' in line for line in printed) == 5
    assert printed == kernel_table.tables(found).splitlines()


RATES = {'matmul_flops': 700e12, 'copy_bytes_per_s': 4e12}


@pytest.mark.parametrize(
    ('cases', 'share', 'text'),
    [
        # (XLA's time over the kernel's, its TFLOP/s, its GB/s); the rates are 700 and 4,000
        ([(1.5, 100.0, 100.0), (1.6, None, 200.0)], 0.05, 'met'),
        ([(1.0, 600.0, 100.0), (0.95, None, 3500.0)], 600 / 700, 'met'),
        (
            [(1.0, 600.0, 100.0), (1.2, 500.0, 100.0), (1.0, 10.0, 3000.0)],
            500 / 700,
            'not met: mean under 1.5, 2 under 85% of the rates',
        ),
        ([(9.0, 600.0, 100.0), (0.94, 650.0, 100.0)], 600 / 700, 'not met: 1 under 0.95 of XLA'),
    ],
)
def test_a_verdict_names_the_bars_that_a_group_misses(cases, share, text):
    group = [
        example(str(i), 32, ratio, tflops=tflops, gbps=gbps) | RATES
        for i, (ratio, tflops, gbps) in enumerate(cases)
    ]
    found = verdict.verdict(group)
    assert found.share == pytest.approx(share)
    assert found.text == text
    assert verdict.verdict([*group, example('old', 32, 9.0)]).share is None


@pytest.mark.parametrize(
    ('op', 'direction', 'bar'),
    [
        ('conv3x3', 'forward', 1.5),
        ('conv3x3', 'weight_gradient', 1.3),
        ('attention', 'forward+backward', 3.0),
        ('adamw', 'step', 1.5),
        ('adamw', 'step_with_copies', 1.5),
        ('project', 'forward+backward', 1.5),
    ],
)
def test_the_bar_of_a_group(op, direction, bar):
    for ratio, met in ((bar - 0.01, False), (bar, True)):
        row = example('a', 32, ratio, op=op) | RATES | {'direction': direction, 'tflops': 1.0}
        assert (verdict.verdict([row]).text == 'met') == met


def test_committed_rows_make_a_table_of_each_backend() -> None:
    """Without the CUDA kernels' columns the table is of Pallas alone, which has fewer ops."""
    committed = list(rows.read(ROOT / 'docs/results/kernels/rows.jsonl'))
    three = kernel_table.summary(committed)
    both = [row for row in committed if 'us_pallas' in row]
    alone = {row['op'] for row in committed if row not in both}
    assert {'linear', 'adamw'} <= alone <= {'linear', 'project', 'adamw'}
    two = kernel_table.summary(
        {name: value for name, value in row.items() if not name.endswith('_cuda')} for row in both
    )
    assert "XLA's time over the Pallas kernels'." in two
    assert 'CUDA' not in two
    assert "XLA's time over the CUDA kernels'." in three
    assert set(two.split('\n\n')) <= set(three.split('\n\n'))  # titles and tables


@pytest.mark.parametrize(
    ('found', 'message'),
    [
        ([], 'no measurements of kernels'),
        ([{'kind': 'kernel', 'op': 'conv3x3', 'error': None}], 'expected a field device, found'),
    ],
)
def test_rows_that_make_no_table(found: list[rows.Row], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kernel_table.tables(found)
