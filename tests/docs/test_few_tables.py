"""The tables of docs/results/few_steps."""

from __future__ import annotations

from support.markdown import cells

from tools.docs import few_tables as tables

ORIGIN = {'git': 'abc', 'device': 'cpu', 'versions': {'jax': '1'}, 'features': 'f'}


def row(case, sampler, fid, *, seed=0, seconds=30, step=200, rate=6e-4, **more):
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
        'values': {'train': {'fid': fid, 'kid': fid / 1000, 'precision': 0.5, 'recall': 0.25}},
        'fields': {tables.RATE: rate},
        **ORIGIN,
        **more,
    }


ROWS = [
    row('teacher', 'heun:25', 4.0, seconds=60, step=900, judged={'train': {'fid': 2.0}}),
    row('muon-0.0006-30s', 'consistency:2', 5.0),
    row('muon-0.0006-30s', 'consistency:2', 7.0, seed=1, step=210),
    row('muon-0.0006-30s', 'consistency:1', 9.0),
    row('muon-0.0006-120s', 'consistency:2', 3.0, seconds=120),
]


def test_quality_beside_the_teacher():
    """More evaluations first; ± is half the range of the seeds."""
    common = ['0.5', '0.25', '']
    assert cells(tables.quality(ROWS)) == [
        ['a', 'teacher, 60 s', 'heun 25', '49', '1', '900', '4', '4', *common, '', '2'],
        [
            *('a', '30 s of tuning', '6e-4', '2', '2', '200 to 210'),
            *('6 ± 1', '6 ± 1', '0.5 ± 0', '0.25 ± 0', '', '1.50', ''),
        ],
        ['a', '30 s of tuning', '6e-4', '1', '1', '200', '9', '9', *common, '2.25', ''],
        ['a', '120 s of tuning', '6e-4', '2', '1', '200', '3', '3', *common, '0.75', ''],
    ]


def test_rates_are_not_seeds():
    other = row('muon-0.002-30s', 'consistency:2', 8.0, rate=2e-3)
    found = cells(tables.quality([*ROWS, other]))
    assert [line[2:5] for line in found if line[1] == '30 s of tuning'] == [
        ['6e-4', '2', '2'],
        ['6e-4', '1', '1'],
        ['2e-3', '2', '1'],
    ]


def test_a_folder_without_rows(tmp_path):
    assert tables.quality(tables.read(tmp_path)) == tables.NOTHING
