"""The table of whole training steps in README, from docs/results/step/rows.jsonl."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from support import markdown

from jaxunet.runtime.rows import Row, read

ROWS = pathlib.Path(__file__).parents[2] / 'docs/results/step/rows.jsonl'
# Side in the rows -> its name in the README's table.
SIDES = {
    'pytorch-eager': 'PyTorch, eager',
    'pytorch-compiled': 'PyTorch, `torch.compile`',
    'pytorch-best': 'PyTorch, `torch.compile`, whole step in one CUDA graph',
    'xla': 'jaxunet `backend=xla` (plain JAX)',
    'pallas': 'jaxunet `backend=pallas`',
    'auto': 'jaxunet `backend=auto`',
}
NEEDED = ('pytorch-best', 'xla', 'auto')
BATCHES = (32, 256)


def step_summary() -> str:
    """Milliseconds of a training step of elephants64 by side, and how they were measured."""
    chosen = newest_steps(read(ROWS))
    body = []
    for side, shown in SIDES.items():
        if (side, BATCHES[0]) not in chosen:
            continue
        rows = [chosen[side, batch] for batch in BATCHES]
        ops = ''
        if side == 'auto':
            mixed = 'attention=pallas' in rows[-1]['ops']
            ops = f' (CUDA kernels{", attention in Pallas" * mixed})'
        times = [f'{row["median_ms"]:.1f} ms' for row in rows]
        rate, memory = rows[-1]['images_per_second'], rows[-1]['peak_bytes'] / 2**30
        body.append([shown + ops, *times, f'{rate:,.0f}', f'{memory:.1f} GiB'])
    used = chosen['auto', BATCHES[0]]
    versions = {name: used['versions'][name] for name in ('jax', 'torch')}
    head = [
        'a whole training step',
        *(f'batch {batch}' for batch in BATCHES),
        f'images/s at {BATCHES[-1]}',
        f'memory at {BATCHES[-1]}',
    ]
    return (
        f'{markdown.table(head, body)}\n\n'
        f'{used["device"]}, bfloat16, medians; jax {versions["jax"]}, '
        f'torch {versions["torch"]}; commit {used["git"]}.\n'
        f'{steps_per_call(chosen)}'
    )


def newest_steps(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Returns the rows of README's table, by side and batch.

    They are of the newest commit that has rows of `NEEDED` for all batches, and of the other sides
    that it has for all. Rows with several steps per call come before those with one. Rows with
    concurrent kernels are left out, except for `auto`, which uses them by default where they help.
    """
    by_commit: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        key = row['backend'], row['batch_size']
        if (
            (row['config'], row['direction'], row['error']) == ('elephants64', 'step', None)
            and (row['backend'] == 'auto' or not row.get('concurrent_kernels', False))
            and row['backend'] in SIDES
            and row['batch_size'] in BATCHES
        ):
            known = by_commit.setdefault(str(row['git']), {})
            if row.get('steps_per_call', 1) >= known.get(key, row).get('steps_per_call', 1):
                known[key] = row
    whole = [
        {(s, b): row for (s, b), row in found.items() if all((s, c) in found for c in BATCHES)}
        for found in by_commit.values()
        if all((side, batch) in found for side in NEEDED for batch in BATCHES)
    ]
    return max(whole, key=lambda found: max(row['time'] for row in found.values()))


def steps_per_call(chosen: Mapping[tuple[str, int], Row]) -> str:
    """Returns a sentence that says how many steps per call jaxunet's rows ran.

    Args:
      chosen: rows by side and batch.
    """
    by_number: dict[int, list[str]] = {}
    for (side, batch), row in sorted(chosen.items()):
        if not side.startswith('pytorch'):
            ran = by_number.setdefault(row.get('steps_per_call', 1), [])
            ran.append(f'`{side}` at batch {batch}')
    usual = max(by_number)
    text = f'jaxunet ran {usual} step{"s" * (usual > 1)} per call'
    others = [
        f'{" and ".join(ran)}, which ran {number} per call'
        for number, ran in by_number.items()
        if number != usual
    ]
    return f'{text}, except {"; and ".join(others)}.' if others else f'{text}.'
