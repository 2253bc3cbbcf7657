"""The tables of docs/results/widths, and what docs/training.md says of its rows."""

from __future__ import annotations

from support.markdown import cells

from tools.docs import width_tables as tables

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
    metric('none', None, 0, 4.0),
    metric('0.995', None, 0, 3.0),
    metric('0.20', 0.2, 0, 1.0),
    metric('0.20', 0.2, 1, 2.0),
    metric('0.03', 0.03, 0, 2.5),
    {**metric('0.03', 0.03, 0, 7.0), 'schedule': 'constant'},
]


def test_metrics_by_average():
    """Widths in their order, then the others; ± is half the range of the seeds."""
    assert [line[:3] for line in cells(tables.quality(ROWS))] == [
        ['cosine', 'width 0.03', '2.5'],
        ['cosine', 'width 0.2', '1.5 ± 0.5'],
        ['cosine', 'rate 0.995', '3'],
        ['cosine', 'none', '4'],
        ['constant', 'width 0.03', '7'],
    ]
    assert 'cpu, jax 1, commit abc; 2 seeds, 9 samples each, f.' in tables.quality(ROWS)


def test_without_rows_the_tables_say_so(tmp_path):
    found = tables.read(tmp_path)
    assert tables.quality(found) == tables.picture(tmp_path) == tables.NOTHING


def test_reconstructed_averages_are_as_exact_as_the_docs_say():
    """At most 1e-4 from a width of 0.075 on, and 3.6e-4 for 0.03."""
    errors = {}
    for row in tables.read():
        if 'relative_error' in row:
            errors.setdefault(row['width'], []).append(row['relative_error'])
    assert len(errors) >= 5
    assert max(max(found) for width, found in errors.items() if width >= 0.075) <= 1e-4
    assert f'{max(errors[0.03]):.1e}' == '3.6e-04'
