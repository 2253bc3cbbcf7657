"""The tables of docs/results/few_steps."""

from __future__ import annotations

from support.markdown import cells

from tools.docs import few_tables as tables

ORIGIN = {'git': 'abc', 'device': 'cpu', 'versions': {'jax': '1'}, 'features': 'f'}


def row(case, sampler, fid, *, seed=0, seconds=30, step=200, rate=1e-4, **more):
    evaluations = 49 if sampler == 'heun:25' else int(sampler.partition(':')[2])
    return {
        'data': 'a',
        'case': case,
        'seed': seed,
        'seconds': seconds,
        'step': step,
        'sampler': sampler,
        'evaluations': evaluations,
        'num_samples': 9,
        'seconds_per_sample': 0.01,
        'values': {'train': {'fid': fid, 'kid': fid / 1000, 'precision': 0.5, 'recall': 0.25}},
        'fields': {tables.RATE: rate, 'diffusion.consistency_q': 16},
        **ORIGIN,
        **more,
    }


def muon(rate, fid, sampler='consistency:2', seconds=30, **more):
    distances = {'0.995': fid, '0.9993': fid + 1}
    found = row(f'muon-{rate:g}-{seconds}s', sampler, fid, rate=rate, seconds=seconds, **more)
    del found['seconds_per_sample']
    return found | {'average': '0.995', 'average_fid': distances}


ROWS = [
    row('teacher', 'heun:25', 4.0, seconds=60, step=900, judged={'train': {'fid': 2.0}}),
    row('tuned', 'consistency:2', 5.0),
    row('tuned', 'consistency:2', 7.0, seed=1, step=210),
    row('tuned', 'consistency:1', 9.0),
    muon(2e-3, 3.0),
    muon(6e-4, 6.0),
    muon(6e-4, 8.0, 'consistency:1'),
]


def test_quality_beside_the_teacher():
    """More evaluations first; ± is half the range of the seeds; Muon has its best rate."""
    common = ['0.5', '0.25', '']
    assert cells(tables.quality(ROWS)) == [
        ['a', 'teacher, 60 s', 'heun 25', '49', '1', '900', '4', '4', *common, '', '2', '100'],
        [
            *('a', '30 s of tuning', 'Muon, 2e-3 falling', '2', '1', '200', '3', '3'),
            *(*common, '0.75', '', ''),
        ],
        [
            *('a', '30 s of tuning', 'AdamW, 1e-4, q = 16', '2', '2', '200 to 210'),
            *('6 ± 1', '6 ± 1', '0.5 ± 0', '0.25 ± 0', '', '1.50', '', '100 ± 0'),
        ],
        [
            *('a', '30 s of tuning', 'AdamW, 1e-4, q = 16', '1', '1', '200', '9', '9'),
            *(*common, '2.25', '', '100'),
        ],
    ]


def test_the_longest_tuning_shows_the_rate():
    """A short one of another rate may be better: it has chosen before."""
    rows = [*ROWS, muon(6e-4, 5.0, seconds=120), muon(6e-4, 2.0, seconds=120, seed=1)]
    assert [line[1:5] + line[6:7] for line in cells(tables.quality(rows))][1:4] == [
        ['30 s of tuning', 'Muon, 6e-4 falling', '2', '1', '6'],
        ['30 s of tuning', 'Muon, 6e-4 falling', '1', '1', '8'],
        ['120 s of tuning', 'Muon, 6e-4 falling', '2', '2', '3.5 ± 1.5'],
    ]


def test_rates_of_the_shortest_tunings():
    rows = [*ROWS, muon(6e-4, 5.0, seconds=120), muon(2e-3, 1.0, seed=1)]
    assert cells(tables.rates(rows)) == [
        ['a', '0.0006', '200', '0.995', '8', '6', '', '6', '7'],
        ['a', '0.002', '200', '0.995', '', '3', '', '3', '4'],
    ]
    assert '; 30 s of tuning, features' in tables.rates(rows)


def test_a_folder_without_rows(tmp_path):
    found = tables.read(tmp_path)
    assert tables.quality(found) == tables.rates(found) == tables.NOTHING
