"""The statistics, tables and plot of a comparison file, from rows as the queue writes them."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from jaxunet.compare import collected, report, statistics, step_times, tables
from jaxunet.compare.comparison import Reference, Round
from jaxunet.compare.comparison_file import read_comparison
from jaxunet.compare.statistics import Mean
from jaxunet.compare.tables import Results
from jaxunet.runtime.download import digest
from jaxunet.runtime.errors import UserError

FOLDER = pathlib.Path(__file__).parents[2] / 'docs/results/methods'
COMPARISON = dataclasses.replace(
    read_comparison(FOLDER / 'methods.toml'),
    rounds=(Round(('uniform', 'flow', 'edm', 'v_cosine'), (0, 1, 2)), Round(('p2',), (0,))),
    samplers={'': ('heun:25',)},
)
FRECHET, KERNEL = (metric.title for metric in COMPARISON.distances)
FID = COMPARISON.distances[0]
ABOUT = report.about_file(COMPARISON, FOLDER, 'the command')


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
        'driver': '1.2',
        'versions': {'jax': '1', 'jaxlib': '2', 'python': '3'},
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


def stretch(
    case, seed, outcome='trained', reason='', shared_by=1, devices=1, ended='2026-01-01', **wall
):
    return {
        'data': 'cifar10',
        'case': case,
        'seed': seed,
        'outcome': outcome,
        'reason': reason,
        'wall': wall,
        'shared_by': shared_by,
        'devices': devices,
        'ended': ended,
        'device': 'GPU',
    }


@pytest.fixture(scope='module')
def found():
    return Results(COMPARISON, ROWS)


def shown(text):
    """Cells of the table by the first two of each line."""
    lines = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in text.splitlines()
        if line.startswith('|')
    ][2:]
    return {(line[0], line[1]): line[2:] for line in lines}


def paired(first, second):
    return statistics.paired(*(statistics.numbers_of(rows, FID.find) for rows in (first, second)))


def test_large_errors_are_written_out():
    assert tables._plus_minus(Mean(350.06, 104.2, 3)) == '350.1 ± 100'


def test_means_have_standard_errors(found):
    table = shown(tables.quality(found))
    assert table['uniform', FRECHET] == ['82 ± 1.2', '42 ± 1.2']
    assert table['flow', FRECHET][1] == '21.33 ± 0.88'
    assert table['edm', FRECHET] == ['30 (1)', '']  # of its better sampler
    assert list(table)[:2] == [('uniform', FRECHET), ('flow', FRECHET)]  # as the file has them
    mean = statistics.mean_over([1.0, 2.0, 4.0])
    assert mean.error == pytest.approx(stats.sem([1.0, 2.0, 4.0]))


def test_differences_are_paired_by_seed(found):
    mine, base = found.cells['flow', 60], found.cells['uniform', 60]
    expected = stats.ttest_rel([60.0, 63.0, 64.0], [80.0, 82.0, 84.0])
    got = paired(mine, base)
    assert got.p == pytest.approx(expected.pvalue)
    assert got.difference.value == pytest.approx(-59 / 3)
    assert got.ahead
    assert not paired(base, mine).ahead
    table = shown(tables.against_baseline(found))
    assert table['flow', FRECHET][0] == '**−19.67 ± 0.33, p 0.00029**'
    assert table['flow', KERNEL][0] == '+0.01 ± 0, p 0'  # behind
    assert table['edm', FRECHET] == ['−50 (1)', '']  # one seed has no test
    assert ('uniform', FRECHET) not in table
    only = paired(mine[:1], base[1:])
    assert only is None


def test_a_small_p_is_not_enough():
    """The error bars must not overlap, either."""
    mine = [row('a', 60, seed, fid) for seed, fid in enumerate([10.0, 20.0, 30.0])]
    base = [row('b', 60, seed, fid) for seed, fid in enumerate([11.0, 21.01, 31.0])]
    got = paired(mine, base)
    assert got.p < 0.001
    assert not got.ahead


def test_the_best_other_method_is_named(found):
    table = shown(tables.against_best(found))
    assert table['flow', FRECHET][0].startswith('edm: +30')
    assert table['edm', FRECHET][0].startswith('flow: −30')
    assert table['flow', FRECHET][1].startswith('uniform: **−20.67')
    apart = Results(COMPARISON, [row('a', 60, 0, 1.0), row('b', 60, 1, 2.0)])
    assert shown(tables.against_best(apart))['a', FRECHET] == ['b: no seed of both']


def test_times_to_the_final_quality_of_the_baseline(found):
    table = shown(tables.sooner(found))
    # Of seed 0: from 60 after 60 s to 20 after 240 s; 40 is half way.
    assert table['flow', FRECHET] == ['150, 150, 148', '149.3 ± 0.73', '0.622 ± 0.003']
    assert table['uniform', FRECHET] == ['240, 240, 240', '240 ± 0', '1 ± 0']
    assert table['edm', FRECHET] == ['≤ 60', '≤ 60 (1)', '≤ 0.25 (1)']
    behind = Results(COMPARISON, [*ROWS, row('p2', 60, 0, 90.0), row('p2', 240, 0, 50.0)])
    assert shown(tables.sooner(behind))['p2', FRECHET] == ['not reached', '', '']


def test_time_to_a_quality():
    seconds = np.array([10.0, 20.0, 30.0])
    falling = np.array([50.0, 30.0, 20.0])
    assert statistics.time_to(40, seconds, falling, higher=False) == 15
    assert statistics.time_to(20, seconds, falling, higher=False) == 30
    assert statistics.time_to(60, seconds, falling, higher=False) == 10
    assert statistics.time_to(19, seconds, falling, higher=False) == np.inf
    rising = np.array([0.1, 0.3, 0.7])
    assert statistics.time_to(0.5, seconds, rising, higher=True) == pytest.approx(25)


def test_runs_of_other_lengths():
    """A shorter one is compared with the baseline at its time, halfway between two of its points;
    its own curve ends there.
    """
    own = {'p2': (150.0,), 'flow': (60.0, 120.0)}
    comparison = dataclasses.replace(
        COMPARISON, own_seconds=own, rounds=(Round(('uniform', 'p2', 'flow'), (0,)),)
    )
    rows = [row('uniform', s, 0, fid) for s, fid in ((60, 60.0), (120, 50.0), (180, 30.0))]
    rows += [row('uniform', 240, 0, 20.0), row('p2', 150, 0, 25.0)]
    rows += [row('flow', s, 0, fid) for s, fid in ((60, 90.0), (120, 80.0))]
    found = Results(comparison, rows)
    assert shown(tables.quality(found))['p2', FRECHET] == ['', '', '25 (1)', '', '']
    against = shown(tables.against_baseline(found))
    assert against['p2', FRECHET] == ['', '', '−15 (1)', '', '']
    assert against['flow', FRECHET] == ['+30 (1)', '+30 (1)', '', '', '']
    assert shown(tables.sooner(found))['flow', FRECHET][0] == 'not reached'
    ends = tables.at_the_end(found).splitlines()
    assert [line.split(' | ')[2] for line in (ends[0], *ends[2:])] == ['s', '240', '150', '120']
    assert '- `uniform`' not in tables.missing(found)


def test_a_metric_of_which_more_is_better():
    comparison = dataclasses.replace(
        COMPARISON, by=('recall',), references=(Reference('x', 'train', ('precision', 'recall')),)
    )
    rows = [
        row(case, seconds, seed, 0.0, values={'train': {'recall': value + seed / 2}})
        for case, values in (('uniform', (4, 5)), ('p2', (5, 7)), ('flow', (3, 4)))
        for seconds, value in zip((60, 120), values, strict=True)
        for seed in (0, 1)
    ]
    rows.append(row('p2', 60, 0, 0.0, sampler='ddpm:50', values={'train': {'recall': 9}}))
    found = Results(comparison, rows)
    assert shown(tables.quality(found))['p2', 'recall'] == ['5.25 ± 0.25 (2)', '7.25 ± 0.25 (2)']
    against = shown(tables.against_baseline(found))
    assert against['p2', 'recall'] == ['**+1 ± 0 (2), p 0**', '**+2 ± 0 (2), p 0**']
    assert against['flow', 'recall'][0] == '−1 ± 0 (2), p 0'
    assert shown(tables.against_best(found))['uniform', 'recall'][1] == 'p2: −2 ± 0 (2), p 0'
    assert shown(tables.sooner(found))['p2', 'recall'][:2] == ['≤ 60, ≤ 60', '≤ 60 ± 0 (2)']
    assert shown(tables.sooner(found))['flow', 'recall'][0] == 'not reached, not reached'


def test_distances_that_rows_lack_are_left_out():
    """Rows of before a metric was added to the file lack it."""
    bare = {'precision': 0.5, 'recall': 0.25}
    kid = [row('uniform', s, 0, 40.0, kid=0.02) for s in (60, 240)]
    lacking = [row('uniform', s, 1, 40.0, values={'train': bare}) for s in (60, 240)]
    other = [row('flow', s, seed, 30.0, kid=0.01) for s in (60, 240) for seed in (0, 1)]
    found = Results(COMPARISON, [*kid, *lacking, *other])
    assert shown(tables.quality(found))['uniform', KERNEL] == ['0.02 (1)', '0.02 (1)']
    assert shown(tables.against_baseline(found))['flow', KERNEL] == ['−0.01 (1)', '−0.01 (1)']
    assert shown(tables.sooner(found))['flow', KERNEL] == ['≤ 60', '≤ 60 (1)', '≤ 0.25 (1)']
    none = Results(COMPARISON, lacking)
    for table in (tables.quality, tables.sooner):
        assert not any(shown(table(none))['uniform', KERNEL])


def test_the_rest_is_shown_at_the_last_time(found):
    line = shown(tables.at_the_end(found))['flow', '0, 1, 2']
    assert line[:4] == ['heun 25', '0.15, 0.15, 0.15', '0.5 ± 0', '0.25 ± 0']
    assert line[4:] == ['0.02 ± 0', '0.25 ± 0', '24,000', '10.00']


def test_cells_without_rows_are_listed(found):
    lines = tables.missing(found).splitlines()
    assert lines[0] == '- `uniform`: ' + '; '.join(f'seed {s} at 120 s' for s in (0, 1, 2))
    assert '- `edm`: seed 0 at 120, 240 s; seed 1; seed 2' in lines
    assert lines[-1] == '- all of `v_cosine`, `p2`'
    every = [row(name, s, seed, 1.0) for name, seed in COMPARISON.cells for s in COMPARISON.seconds]
    assert tables.missing(Results(COMPARISON, every)) == 'None.'
    one = dataclasses.replace(COMPARISON, samplers={'': ('heun:25', 'ddpm:50')})
    assert tables.missing(Results(one, ROWS[:6])).startswith('- all of `uniform`'), (
        'a sampler is missing'
    )


def test_runs_that_failed_are_listed_until_they_are_done():
    stretches = [
        stretch('p2', 0, 'failed', 'not\nfinite', ended='2026-01-02'),
        stretch('edm', 1, 'failed', 'no memory', ended='2026-01-03'),
        stretch('edm', 1, 'stopped', 'the limit', ended='2026-01-04'),
        stretch('uniform', 0, 'failed', 'x', ended='2026-01-05'),
    ]
    rows = [row('uniform', s, 0, 1.0) for s in (60, 120, 240)]
    text = tables.missing(Results(COMPARISON, rows, stretches))
    assert [line for line in text.splitlines() if 'failed' in line] == [
        '- failed: `p2`, seed 0: not finite'
    ]


def test_a_time_that_was_not_measured_is_listed_with_its_reason():
    """Training goes on after it, so the run has later stretches that did not fail."""
    stretches = [
        stretch('p2', 0, 'failed', '60 s: NaN', ended='2026-01-02'),
        stretch('p2', 0, 'measured', ended='2026-01-03'),
        stretch('p2', 0, 'trained', ended='2026-01-04'),
    ]
    text = tables.missing(
        Results(COMPARISON, [row('p2', s, 0, 1.0) for s in (120, 240)], stretches)
    )
    assert '- failed: `p2`, seed 0: 60 s: NaN' in text.splitlines()


def test_the_cost_counts_parts_of_shared_devices_groups_and_repeats(found):
    assert tables.cost(found).startswith('7 runs, 25 minutes of training. What they took')
    stretches = [
        stretch('flow', 0, training=120.0, compiling=60.0),
        stretch('flow', 0, training=240.0, shared_by=2),
    ]
    text = tables.cost(Results(COMPARISON, ROWS, stretches))
    assert text.startswith('5.0 GPU minutes, repeated work included: training 4.0, compiling 1.0')
    groups = [stretch('flow', 0, devices=2, training=60.0)]
    assert tables.cost(Results(COMPARISON, ROWS, groups)).startswith('2.0 GPU minutes')
    on_cpu = [{**one, 'device': 'cpu'} for one in stretches]
    assert tables.cost(Results(COMPARISON, ROWS, on_cpu)).startswith('5.0 CPU minutes')


def test_the_origin_has_versions_and_commits(found):
    text = tables.origin(found)
    assert text.startswith('GPU (driver 1.2), jax 1, jaxlib 2, python 3, commit abc; 10000 samples')
    assert text.endswith('features classifier-1.')


def test_without_rows_the_tables_say_so():
    none = Results(COMPARISON, [])
    for table in (tables.quality, tables.against_baseline, tables.against_best, tables.sooner):
        assert table(none) == tables.NOTHING
    assert tables.at_the_end(none) == tables.origin(none) == tables.cost(none) == tables.NOTHING
    assert tables.step_times({}) == tables.NOTHING


def test_steps_are_shown_beside_the_baseline(tmp_path):
    costs = {
        'uniform': {'ms': 10.0, 'ratio': 1.0, 'quartiles': [1.0, 1.0]},
        'policy': {'ms': 20.5, 'ratio': 2.0, 'quartiles': [1.9, 2.1]},
    }
    row = {'costs': costs, 'rounds': 2, 'steps': 8, 'batch': 4, 'device': 'GPU'}
    path = tmp_path / 'step_ms.jsonl'
    path.write_text(json.dumps(row) + '\n')
    costs = tables.measured(dataclasses.replace(COMPARISON, step_ms=str(path)), []).step_costs
    assert shown(tables.step_times(costs))['policy', '20.00'] == ['2.000 (1.900 to 2.100)']


@pytest.mark.parametrize(
    'change', [{'ms': 0.0}, {'ratio': -1.0}, {'quartiles': []}, {'quartiles': [1.0, 'x']}]
)
def test_damaged_step_costs(change, tmp_path):
    """A step of 0 ms would make the clock measure time, and not count steps."""
    costs = {'uniform': {'ms': 10.0, 'ratio': 1.0, 'quartiles': [1.0, 1.0]} | change}
    row = {'costs': costs, 'rounds': 2, 'steps': 8, 'batch': 4, 'device': 'GPU'}
    (tmp_path / 'step_ms.jsonl').write_text(json.dumps(row) + '\n')
    with pytest.raises(UserError, match=r'line 1: uniform: expected ms and ratio above 0 and two'):
        step_times.step_times(str(tmp_path / 'step_ms.jsonl'), ['uniform'])


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'features': 'classifier-2'}, 'line 2: features: expected classifier-1, as in .*line 1'),
        ({'step_ms': 11.0}, r'line 2: step_ms of edm: expected 10.0, .* found 11.0: such rows do'),
        ({'step_ms': 'x'}, 'line 2: step_ms: expected a number'),
        ({'step_ms': None}, 'training time: expected counted by steps, .* found measured'),
        ({'values': {'train': {'fid': 'x'}}}, 'line 2: values: train: fid: expected a number'),
        ({'step': 'x'}, "line 2: step: expected a whole number, found 'x'; remove the line"),
    ],
)
def test_rows_that_do_not_compare_are_refused(tmp_path, change, message):
    both = [row('edm', 60, 0, 30.0), row('edm', 120, 0, 20.0, **change)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, both)) + '\n')
    with pytest.raises(UserError, match=message):
        collected.read_rows([tmp_path / 'rows.jsonl'])


def test_later_rows_replace_earlier_ones(tmp_path):
    files = []
    for number, rows in enumerate((ROWS[1:], [ROWS[0], row('edm', 60, 0, 29.0)])):
        files.append(tmp_path / f'{number}.jsonl')
        files[-1].write_text('\n'.join(map(json.dumps, rows)) + '\n')
    merged = collected.read_rows([*files, tmp_path / 'nowhere.jsonl'])
    assert len(merged) == len(ROWS)
    cells = Results(COMPARISON, merged).cells
    assert [r['values']['train']['fid'] for r in cells['edm', 60]] == [29.0]
    assert [r['seed'] for r in cells['flow', 60]] == [0, 1, 2]


def test_each_stretch_counts_once(tmp_path):
    once = [stretch('a', 0, training=1.0), stretch('a', 0, training=1.0, ended='2026-01-02')]
    for name in ('a', 'b'):
        collected.write(tmp_path / name, once)
    assert collected.read_stretches([tmp_path / 'a', tmp_path / 'b']) == once
    (tmp_path / 'a').write_text(json.dumps(stretch('a', 0, shared_by=0)))
    with pytest.raises(UserError, match='a, line 1: shared_by: expected 1 or more'):
        collected.read_stretches([tmp_path / 'a'])


def test_the_report_has_everything(found, tmp_path):
    text, paths = report.write(found, tmp_path, ABOUT, plot=True)
    assert [path.name for path in paths] == ['report.md', 'quality.png']
    assert paths[0].read_text() == text
    assert text.startswith('# Which method is sooner?\n\n`the command`\n\nProtocol: [PROTOCOL.md](')
    for part in (tables.quality, tables.sooner, tables.missing, tables.origin, tables.cost):
        assert part(found) in text
    with Image.open(paths[1]) as image:
        assert min(image.size) > 600
    again, paths = report.write(found, tmp_path, ABOUT, plot=False)
    assert ([path.name for path in paths], again) == (['report.md'], text)


def test_a_report_of_few_metrics_without_rows(tmp_path):
    comparison = dataclasses.replace(COMPARISON, references=(Reference('x', 'train', ('kid',)),))
    text, _ = report.write(Results(comparison, []), tmp_path, ABOUT, plot=True)
    assert tables.NOTHING in text
    assert '- all of `uniform`, `flow`, `edm`, `v_cosine`, `p2`' in text
    rows = [row('uniform', s, 0, 1.0, kid=0.01 - s / 10_000) for s in (60, 240)]
    _, paths = report.write(Results(comparison, rows), tmp_path, ABOUT, plot=True)
    assert paths[1].exists(), 'a kernel distance below 0'


def test_the_committed_rows_are_of_the_committed_features():
    features = FOLDER / 'features.npz'
    rows = collected.read_rows([FOLDER / 'rows.jsonl'])
    if rows:
        assert {row['features'] for row in rows} == {f'classifier-{digest(features, "sha256")[:8]}'}
    assert all(math.isfinite(FID.find(row)) for row in rows)


def test_what_is_not_measured_is_never_the_best():
    """Rows of before a metric was added to the file lack it; NaN compares with nothing."""
    missing = [row(case, 60, 0, math.nan) for case in ('uniform', 'edm')]
    found = [row('uniform', 60, 0, 50.0, sampler='ddpm:50'), row('flow', 60, 0, 70.0)]
    for rows in ([*missing, *found], [*found, *missing]):
        cells = statistics.best_cells(rows, FID)
        assert cells['uniform', 60][0]['sampler'] == 'ddpm:50'
        assert statistics.rival(cells, 'uniform', 60, FID) == 'flow'
        assert statistics.rival(statistics.best_cells(missing, FID), 'uniform', 60, FID) is None
