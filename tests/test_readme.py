"""The README's tables are what the committed measurements say, and its commands exist."""

import json
import pathlib
import re
import runpy

import pytest

from jaxunet.benchmarking import kernel_table, rows
from jaxunet.benchmarking import table as benchmark_table

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()


def table() -> str:
    """The Markdown table of `configs/elephants64.jsonl`."""
    lines = [
        '| commit | device | precision, batch | step ms, median (quartiles) | steps | training s | final loss |',
        '|---|---|---|---|---|---|---|',
    ]
    for line in (ROOT / 'configs' / 'elephants64.jsonl').read_text().splitlines():
        r = json.loads(line)
        low, high = r['quartiles_ms']
        lines.append(
            f'| {r["git"]} | {r["device"]} | {r["precision"]}, {r["batch"]} | {r["median_ms"]:.2f} ({low:.2f} to {high:.2f}) '
            f'| {r["steps"]:,} | {r["training_seconds"]:.0f} | {r["final_loss"]} |'
        )
    return '\n'.join(lines)


def test_table_is_generated_from_the_rows():
    assert table() in README, f'replace the table in README.md by\n{table()}'


@pytest.mark.parametrize(
    ('file', 'markdown'),
    [
        ('configs/benchmark.jsonl', benchmark_table.markdown),
        ('configs/benchmark_pytorch.jsonl', benchmark_table.markdown),
        ('pallas_kernels/h200.jsonl', kernel_table.summary),
    ],
)
def test_benchmark_tables_are_generated_from_the_rows(file, markdown):
    text = markdown(rows.read(ROOT / file))
    assert text in README, f'replace the table in README.md by\n{text}'


def test_commands_and_links_exist():
    for module in set(re.findall(r'python -m ((?:jaxunet|pallas_kernels)[\w.]+)', README)):
        assert (ROOT / f'{module.replace(".", "/")}.py').is_file(), module
    for path in re.findall(r'\]\(([^)h][^)]*)\)', README) + re.findall(r'`((?:configs|jaxunet|tests)/[\w./]+\.\w+)`', README):
        assert (ROOT / path).exists(), path


if __name__ == '__main__':
    print(runpy.run_path(__file__)['table']())
