"""The tables of the comparison files, from rows as the queue writes them."""

from __future__ import annotations

from jaxunet.compare import tables
from jaxunet.compare.tables import Results
from tools.docs import comparison_tables


def row(case, seconds, sampler, fid):
    return {
        'case': case,
        'seed': 0,
        'seconds': seconds,
        'sampler': sampler,
        'step': 70 * seconds,
        'values': {'train': {'fid': fid, 'kid': 0.25}},
    }


def test_the_long_run_stands_beside_published_values():
    comparison = comparison_tables.measured('long_run').comparison
    rows = [row('uniform', s, 'ddpm:50', 9000 / s) for s in (900, 300)]
    rows += [row('flow', 300, 'heun:25', 20.0), row('flow', 300, 'ddpm:50', 25.0)]
    lines = comparison_tables.long_run(Results(comparison, rows)).splitlines()
    assert lines[0].startswith('| run | s | steps | Fréchet distance, our features |')
    assert lines[2:5] == [
        '| flow | 300 | 21,000 | 20 | 0.25 |  |',
        '| uniform | 300 | 21,000 | 30 | 0.25 |  |',
        '| uniform | 900 | 63,000 | 10 | 0.25 |  |',
    ]
    assert lines[5] == '| ddpm-torch, published |  | 46,800 |  |  | 9.16 |'
    assert lines[-1] == '| ddpm-torch, published |  | 187,200 |  |  | 4.08 |'
    assert comparison_tables.long_run(Results(comparison, [])) == tables.NOTHING
