"""The tables and the plot of docs/results/methods, from rows as the queue writes them."""

from __future__ import annotations

import json
import math
import pathlib
import runpy

import pytest
from PIL import Image
from scipy import stats
from support import method_tables as tables
from support import seed_statistics as statistics

from jaxunet.runtime.download import digest

COLLECT = pathlib.Path(__file__).parents[2] / 'docs/results/methods/collect.py'


def row(case, seconds, seed, fid, *, sampler='heun:25', kid=0.01, **changes):
    return {
        'case': case,
        'data': 'cifar10',
        'seed': seed,
        'seconds': seconds,
        'training_seconds': float(seconds),
        'step': 100 * seconds,
        'step_ms': 10.0,
        'batch_size': 128,
        'sampler': sampler,
        'num_samples': 10_000,
        'average': '0.15',
        'losses': {'held_out_loss': 0.25},
        'values': {
            'train': {'fid': fid, 'kid': kid, 'precision': 0.5, 'recall': 0.25},
            'test': {'kid': 0.02},
        },
        'features': 'classifier-1',
        'git': 'abc',
        'device': 'GPU',
        'versions': {'jax': '1'},
        **changes,
    }


ROWS = [
    *(row('uniform', 60, seed, fid) for seed, fid in enumerate([80.0, 82.0, 84.0])),
    *(row('uniform', 240, seed, fid) for seed, fid in enumerate([40.0, 42.0, 44.0])),
    *(row('flow', 60, seed, fid, kid=0.02) for seed, fid in enumerate([60.0, 63.0, 64.0])),
    *(row('flow', 240, seed, fid) for seed, fid in enumerate([20.0, 21.0, 23.0])),
    row('flow', 240, 0, 10.0, sampler='ddpm:50'),  # fewer seeds: does not count
    row('edm', 60, 0, 30.0),
    row('edm', 60, 0, 36.0, sampler='ddpm:50'),
]


@pytest.fixture(scope='module')
def found():
    return statistics.cells(ROWS)


def shown(text):
    """Cells of the table by the first two of each line."""
    lines = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in text.splitlines()
        if line.startswith('|')
    ][2:]
    return {(line[0], line[1]): line[2:] for line in lines}


FRECHET, KERNEL = tables.DISTANCES


def test_means_have_standard_errors(found):
    table = shown(tables.quality(found))
    assert table['uniform', FRECHET] == ['82 ± 1.2', '42 ± 1.2']
    assert table['flow', FRECHET][1] == '21.33 ± 0.88'
    assert table['edm', FRECHET] == ['30 (1)', '']  # its better sampler
    assert list(table)[:2] == [('uniform', FRECHET), ('flow', FRECHET)]  # as the protocol has them
    mean = statistics.mean_over([1.0, 2.0, 4.0])
    assert mean.error == pytest.approx(stats.sem([1.0, 2.0, 4.0]))


def test_differences_are_paired_by_seed(found):
    find = statistics.value('fid')
    mine, base = found['flow', 60], found['uniform', 60]
    expected = stats.ttest_rel([60.0, 63.0, 64.0], [80.0, 82.0, 84.0])
    got = statistics.paired(mine, base, find)
    assert got.p == pytest.approx(expected.pvalue)
    assert got.difference.value == pytest.approx(-59 / 3)
    assert got.ahead
    assert not statistics.paired(base, mine, find).ahead
    table = shown(tables.against_baseline(found))
    assert table['flow', FRECHET][0] == '**−19.67 ± 0.33, p 0.00029**'
    assert table['flow', KERNEL][0] == '+0.01 ± 0, p 0'  # behind
    assert table['edm', FRECHET] == ['−50 (1)', '']  # one seed has no test
    assert ('uniform', FRECHET) not in table
    only = statistics.paired(mine[:1], base[1:], find)
    assert only is None


def test_a_small_p_is_not_enough():
    """The error bars must not overlap, either."""
    mine = [row('a', 60, seed, fid) for seed, fid in enumerate([10.0, 20.0, 30.0])]
    base = [row('b', 60, seed, fid) for seed, fid in enumerate([11.0, 21.01, 31.0])]
    got = statistics.paired(mine, base, statistics.value('fid'))
    assert got.p < 0.001
    assert not got.ahead


def test_the_best_other_method_is_named(found):
    table = shown(tables.against_best(found))
    assert table['flow', FRECHET][0].startswith('edm: +30')
    assert table['edm', FRECHET][0].startswith('flow: −30')
    assert table['flow', FRECHET][1].startswith('uniform: **−20.67')
    apart = statistics.cells([row('a', 60, 0, 1.0), row('b', 60, 1, 2.0)])
    assert shown(tables.against_best(apart))['a', FRECHET] == ['b: no seed of both']


def test_times_to_the_final_quality_of_the_baseline(found):
    table = shown(tables.sooner(found))
    # Seed 0: from 60 after 60 s to 20 after 240 s; 40 is half way.
    assert table['flow', FRECHET] == ['150, 150, 148', '0.622 ± 0.003']
    assert table['uniform', FRECHET] == ['240, 240, 240', '1 ± 0']
    assert table['edm', FRECHET] == ['≤ 60', '≤ 0.25 (1)']
    behind = statistics.cells([*ROWS, row('p2', 60, 0, 90.0), row('p2', 240, 0, 50.0)])
    assert shown(tables.sooner(behind))['p2', FRECHET] == ['not reached', '']


def test_the_rest_is_shown_at_the_last_time(found):
    text = tables.at_the_end(found)
    line = shown(text)['flow', '0, 1, 2']
    assert line[:4] == ['heun 25', '0.15, 0.15, 0.15', '0.5 ± 0', '0.25 ± 0']
    assert line[4:] == ['0.02 ± 0', '0.25 ± 0', '24,000', '10.00']
    assert 'features classifier-1; 7 runs, 25 minutes of training.' in text


def test_cells_without_rows_are_listed(found):
    lines = tables.missing(found).splitlines()
    assert lines[0] == '- `uniform`: ' + '; '.join(f'seed {s} at 120 s' for s in (0, 1, 2))
    assert '- `edm`: seed 0 at 120, 240 s; seed 1; seed 2' in lines
    assert lines[-1].startswith('- all of `adaptive`, `v_cosine`, ')
    every = [
        row(job.case, seconds, job.seed, 1.0) for job in tables.wanted() for seconds in job.seconds
    ]
    assert tables.missing(statistics.cells(every)) == 'None.'


def test_without_rows_the_tables_say_so(tmp_path):
    none = tables.measured(tmp_path)
    for table in (tables.quality, tables.against_baseline, tables.against_best, tables.sooner):
        assert table(none) == tables.NOTHING
    assert tables.at_the_end(none) == tables.step_times(tmp_path) == tables.NOTHING
    assert tables.picture(tmp_path) == tables.NOTHING


def test_steps_are_shown_beside_the_baseline(tmp_path):
    costs = {
        'uniform': {'ms': 10.0, 'ratio': 1.0, 'quartiles': [1.0, 1.0]},
        'policy': {'ms': 20.5, 'ratio': 2.0, 'quartiles': [1.9, 2.1]},
    }
    row = {'costs': costs, 'rounds': 2, 'steps': 8, 'batch': 4, 'device': 'GPU'}
    (tmp_path / 'step_ms.jsonl').write_text(json.dumps(row) + '\n')
    assert shown(tables.step_times(tmp_path))['policy', '20.00'] == ['2.000 (1.900 to 2.100)']


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'features': 'classifier-2'}, 'several features'),
        ({'step_ms': 11.0}, 'a step counts 10.0 ms in one row and 11.0 ms in another'),
    ],
)
def test_rows_that_do_not_compare_are_refused(tmp_path, change, message):
    both = [row('edm', 60, 0, 30.0), row('edm', 120, 0, 20.0, **change)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, both)) + '\n')
    with pytest.raises(ValueError, match=message):
        tables.measured(tmp_path)


def test_a_row_whose_time_was_measured_is_refused(tmp_path):
    (tmp_path / 'rows.jsonl').write_text(
        json.dumps({k: v for k, v in ROWS[0].items() if k != 'step_ms'})
    )
    with pytest.raises(ValueError, match='uniform: a row whose time was measured'):
        tables.measured(tmp_path)


def test_new_rows_are_added_and_drawn(tmp_path):
    home, new = tmp_path / 'home', tmp_path / 'new'
    for folder, rows in ((home, ROWS[1:]), (new, [ROWS[0], row('edm', 60, 0, 29.0)])):
        folder.mkdir()
        (folder / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    script = runpy.run_path(str(COLLECT))
    script['main'].__globals__['HERE'] = home
    script['main']([new])
    after = tables.measured(home)
    assert len(after['uniform', 60]) == 3
    assert [r['values']['train']['fid'] for r in after['edm', 60]] == [29.0]
    assert [r['seed'] for r in after['flow', 60]] == [0, 1, 2]
    with Image.open(home / tables.PICTURE) as image:
        assert min(image.size) > 300
    assert tables.PICTURE in tables.picture(home)


def test_the_committed_rows_are_of_the_committed_features():
    features = tables.FOLDER / 'features.npz'
    rows = statistics.read([tables.FOLDER / 'rows.jsonl'])
    if rows:
        assert {row['features'] for row in rows} == {f'classifier-{digest(features, "sha256")[:8]}'}
    assert all(math.isfinite(statistics.value('fid')(row)) for row in rows)
