"""Rows of benchmarks in their file, and the table of the latest."""

from __future__ import annotations

import pathlib

import jax
import pytest
from support.benchmarks import example

from jaxunet.benchmark import table
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError


def test_rows_are_appended_and_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / 'new' / 'rows.jsonl'
    rows.append(path, {'a': 1})
    rows.append(path, rows.provenance())
    first, second = rows.read(path)
    assert first == {'a': 1}
    assert second['versions']['jax'] == jax.__version__
    with pytest.raises(ValueError, match='JSON'):
        rows.append(path, {'a': float('nan')})
    assert len(rows.read(path)) == 2
    path.write_text('{"a": 1}\n[1]\n')
    with pytest.raises(UserError, match='line 2: expected a JSON object'):
        rows.read(path)
    with pytest.raises(UserError, match='missing'):
        rows.read(tmp_path / 'missing')


def test_table_shows_the_latest_row_of_a_case() -> None:
    row = example()
    text = table.markdown(
        [
            row,
            {'kind': 'sweep'},
            row | {'median_ms': 1.5, 'bytes_moved': 1, 'bandwidth_share': 0.25, 'ratio': 0.75},
        ]
    )
    assert text.splitlines()[0].startswith(
        'GPU; jax 1; driver 5; commit abc. Measured rates of the device: float32 matrix product '
        '1 TFLOP/s'
    )
    assert (
        text.splitlines()[-1]
        == '| x | float32, 8 | step | xla | 1.5 (1 to 3) | 0.75 | 4,000 | 50.0% | 25% | – | 3.0 |'
    )
    several = [
        {'steps_per_call': 1},
        {'steps_per_call': 20},
        {'steps_per_call': 20, 'concurrent_kernels': True},
    ]
    lines = table.markdown([row | changes for changes in several]).splitlines()[-3:]
    assert [line.split(' | ')[2] for line in lines] == [
        'step',
        'step, 20 per call',
        'step, 20 per call, concurrent kernels',
    ]
    caption = table.markdown([row, row | {'batch_size': 4, 'matmul_flops': 2e12}]).splitlines()[0]
    assert caption.endswith('float32 matrix product 1 to 2 TFLOP/s; copy 1000 GB/s.')
    with pytest.raises(UserError, match='no benchmark rows'):
        table.markdown([{'kind': 'sweep'}])
    with pytest.raises(UserError, match='expected a field git'):
        table.markdown([{name: value for name, value in row.items() if name != 'git'}])


def test_a_table_of_several_runs_tells_them_apart() -> None:
    """The sides of a case stand together, each with its commit, as its ratio is to another side of
    that commit.
    """
    cases = [
        (8, 'xla', 'old'),
        (9, 'xla', 'old'),
        (8, 'cuda', 'new'),
        (8, 'xla', 'new'),
        (9, 'broken', 'new'),
    ]
    found = [example(batch_size=size, backend=side, git=git) for size, side, git in cases]
    found[-1]['error'] = 'gone'
    lines = table.markdown(found).splitlines()[4:]
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    assert [(c[1], c[3], c[-1]) for c in cells] == [
        ('float32, 8', 'xla', 'new'),
        ('float32, 8', 'cuda', 'new'),
        ('float32, 9', 'xla', 'old'),
        ('float32, 9', 'broken', 'new'),
    ]
    assert {len(c) for c in cells} == {12}
