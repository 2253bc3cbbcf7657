"""The table of docs/results/soak, from the rows of `tools/soak/run.py`."""

from __future__ import annotations

import pathlib

from support import markdown

from jaxunet.runtime import rows

ROWS = pathlib.Path(__file__).parents[2] / 'docs/results/soak/rows.jsonl'
QUANTITIES = {
    'own_mib': 'memory of its own, MiB',
    'gpu_mib': 'GPU memory, MiB',
    'threads': 'threads',
    'open_files': 'open files',
    'step_ms': 'step, ms',
}


def table() -> str:
    """Returns a table of every quantity after the run settled and at its end, and the versions."""
    body, notes = [], []
    for row in rows.read(ROWS):
        shown = [
            ' → '.join(markdown.number(value, 3) for value in row['ends'].get(name, []))
            for name in QUANTITIES
        ]
        settled = row['settled'] * row['minutes']
        body.append(
            [
                f'{row["devices"]} x {row["device"]}',
                f'{settled:.0f} → {row["minutes"]:.0f}',
                f'{row["steps"]:,}',
                *shown,
                str(row.get('pool_threads', '')),
                ', '.join(QUANTITIES[name].split(',')[0] for name in row['grown']) or 'nothing',
            ]
        )
        versions = row['versions']
        notes.append(
            f'{row["device"]}: jax {versions["jax"]}, python {versions["python"]}, commit '
            f'{row["git"]}; `{row["command"]}`'
        )
    head = ['device', 'minutes', 'steps', *QUANTITIES.values(), "most of tensorstore's pool"]
    head += ['keeps growing']
    return '\n\n'.join([markdown.table(head, body), *notes])
