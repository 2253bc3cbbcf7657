"""The tables of docs/results/widths, and what docs/training.md says of its rows."""

from __future__ import annotations

from support import width_tables as tables

ORIGIN = {'schedule': 'cosine', 'git': 'abc', 'device': 'cpu', 'versions': {'jax': '1'}}


def metric(ema, width, seed, value):
    return {
        'metric': 'frechet_distance[features=f]',
        'value': value,
        'ema': ema,
        'width': width,
        'seed': seed,
        'num_samples': 9,
        'features': 'f',
        **ORIGIN,
    }


ROWS = [
    {'width': 0.2, 'relative_error': 2e-4, 'seed': 0, **ORIGIN},
    {'width': 0.03, 'relative_error': 1e-5, 'seed': 0, **ORIGIN},
    {'width': 0.03, 'relative_error': 3e-5, 'seed': 1, **ORIGIN},
    metric('none', None, 0, 4.0),
    metric('0.995', None, 0, 3.0),
    metric('0.20', 0.2, 0, 1.0),
    metric('0.20', 0.2, 1, 2.0),
    metric('0.03', 0.03, 0, 2.5),
    {**metric('0.03', 0.03, 0, 7.0), 'schedule': 'constant'},
]


def lines(text):
    return [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in text.splitlines()
        if line.startswith('|')
    ][2:]


def test_errors_by_width_and_seed():
    assert lines(tables.errors(ROWS)) == [['0.03', '1.0e-05', '3.0e-05'], ['0.2', '2.0e-04', '']]


def test_metrics_by_average():
    """Widths in their order, then the others; ± is half the range of the seeds."""
    assert [line[:3] for line in lines(tables.quality(ROWS))] == [
        ['cosine', 'width 0.03', '2.5'],
        ['cosine', 'width 0.2', '1.5 ± 0.5'],
        ['cosine', 'rate 0.995', '3'],
        ['cosine', 'none', '4'],
        ['constant', 'width 0.03', '7'],
    ]
    assert 'cpu, jax 1, commit abc; 2 seeds, 9 samples each, f.' in tables.quality(ROWS)


def test_without_rows_the_tables_say_so(tmp_path):
    found = tables.read(tmp_path)
    assert tables.errors(found) == tables.quality(found) == tables.picture(tmp_path)


def test_reconstructed_averages_are_as_exact_as_the_docs_say():
    """At most 0.001 for every width that the snapshots of a run allow."""
    measured = [row['relative_error'] for row in tables.read() if 'relative_error' in row]
    assert len(measured) >= 10
    assert max(measured) <= 1e-3
