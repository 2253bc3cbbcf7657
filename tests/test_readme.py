"""The README's tables are what the committed measurements say, and its commands exist."""

import csv
import json
import pathlib
import re
import runpy
import statistics

import pytest

from jaxunet.benchmark import table as benchmark_table
from jaxunet.benchmark.kernels import table as kernel_table
from jaxunet.runtime import rows

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()
CACHES = ('empty', 'compilation cache alone', 'kept step')  # what an earlier start left


def table() -> str:
    """The Markdown table of `docs/results/elephants64/rows.jsonl`."""
    lines = [
        '| commit | device | precision, batch | step ms, median (quartiles) | steps | training s | final loss |',
        '|---|---|---|---|---|---|---|',
    ]
    for line in (ROOT / 'docs/results/elephants64/rows.jsonl').read_text().splitlines():
        r = json.loads(line)
        low, high = r['quartiles_ms']
        lines.append(
            f'| {r["git"]} | {r["device"]} | {r["precision"]}, {r["batch"]} | {r["median_ms"]:.2f} ({low:.2f} to {high:.2f}) '
            f'| {r["steps"]:,} | {r["training_seconds"]:.0f} | {r["final_loss"]} |'
        )
    return '\n'.join(lines)


def starts() -> str:
    """Seconds from the command to the first step, of docs/results/start/rows.jsonl."""
    lines = ['| backend | ' + ' | '.join(CACHES) + ' |', '|---|' + '---|' * len(CACHES)]
    found = [
        json.loads(line)
        for line in (ROOT / 'docs/results/start/rows.jsonl').read_text().splitlines()
    ]
    for backend in dict.fromkeys(r['backend'] for r in found):
        seconds = {
            r['cache']: ' and '.join(f'{s:.1f}' for s in r['seconds'])
            for r in found
            if r['backend'] == backend
        }
        lines.append(
            f'| {backend} | ' + ' | '.join(f'{seconds[cache]} s' for cache in CACHES) + ' |'
        )
    return '\n'.join(lines)


def curves() -> str:
    """Mean losses of docs/results/elephants64/curves.csv, whose rows are means of 50 steps."""
    with (ROOT / 'docs/results/elephants64/curves.csv').open() as file:
        found = list(csv.DictReader(file))
    spans = [(1, 500), (501, 1000), (1001, 1500), (1501, 2000)]
    lines = [
        '| steps | ' + ' | '.join(f'{a:,} to {b:,}' for a, b in spans) + ' |',
        '|---|' + '---|' * len(spans),
    ]
    for name in [n for n in found[0] if n != 'step']:
        means = [
            statistics.mean(float(r[name]) for r in found if a <= int(r['step']) <= b)
            for a, b in spans
        ]
        lines.append(f'| {name} | ' + ' | '.join(f'{m:.5f}' for m in means) + ' |')
    return '\n'.join(lines)


def comparison() -> str:
    """The table of docs/results/methods/report.md, whose features the README's text names."""
    lines = (ROOT / 'docs/results/methods/report.md').read_text().splitlines()
    return re.sub(
        r'\[features=[^]]+\] at the end',
        '',
        '\n'.join(line for line in lines if line.startswith('|')),
    )


@pytest.mark.parametrize('make', [table, starts, curves, comparison])
def test_tables_are_generated_from_the_rows(make):
    assert make() in README, f'replace the table in README.md by\n{make()}'


@pytest.mark.parametrize(
    ('file', 'markdown'),
    [
        ('docs/results/step/rows.jsonl', benchmark_table.markdown),
        ('docs/results/kernels/rows.jsonl', kernel_table.summary),
    ],
)
def test_benchmark_tables_are_generated_from_the_rows(file, markdown):
    text = markdown(rows.read(ROOT / file))
    assert text in README, f'replace the table in README.md by\n{text}'


def test_commands_and_links_exist():
    for module in set(re.findall(r'python -m ((?:jaxunet|pallas_kernels)[\w.]+)', README)):
        path = ROOT / module.replace('.', '/')
        assert path.with_suffix('.py').is_file() or (path / '__main__.py').is_file(), module
    for path in re.findall(r'\]\(([^)h][^)]*)\)', README) + re.findall(
        r'`((?:configs|jaxunet|tests)/[\w./]+\.\w+)`', README
    ):
        assert (ROOT / path).exists(), path


if __name__ == '__main__':
    for name in ('table', 'starts', 'curves'):
        print(runpy.run_path(__file__)[name]())
