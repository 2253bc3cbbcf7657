"""The tables of docs/results/few_steps."""

from __future__ import annotations

from support.markdown import cells

from tools.docs import few_tables as tables

ORIGIN = {'git': 'abc', 'device': 'cpu', 'versions': {'jax': '1'}, 'features': 'f'}


def row(case, sampler, fid, *, seed=0, seconds=30, step=200, **more):
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
        'fields': {tables.SETTINGS['q']: 64 if case == 'tuned_q64' else 16},
        **ORIGIN,
        **more,
    }


def short(case, fid, sampler, q):
    fields = dict.fromkeys(tables.SETTINGS.values(), 0.5) | {tables.SETTINGS['q']: q}
    distances = {'0.995': fid, '0.9993': fid + 1}
    return row(case, sampler, fid, fields=fields, average='0.995', average_fid=distances)


ROWS = [
    row('teacher', 'heun:25', 4.0, seconds=60, step=900, judged={'train': {'fid': 2.0}}),
    row('tuned', 'consistency:2', 5.0),
    row('tuned', 'consistency:2', 7.0, seed=1, step=210),
    row('tuned_q64', 'consistency:2', 8.0),
    row('tuned', 'consistency:1', 9.0),
    short('q16', 8.0, 'consistency:2', 16),
    short('q16', 9.0, 'consistency:1', 16),
    short('q64', 6.0, 'consistency:2', 64),
]


def test_quality_beside_the_teacher():
    """More evaluations first, each q in turn; ± is half the range of the seeds."""
    common = ['0.5', '0.25', '']
    assert cells(tables.quality(ROWS)) == [
        ['a', 'teacher, 60 s', 'heun 25', '49', '1', '900', '4', '4', *common, '', '2', '100'],
        [
            *('a', '30 s of tuning', '16', '2', '2', '200 to 210', '6 ± 1', '6 ± 1'),
            *('0.5 ± 0', '0.25 ± 0', '', '1.50', '', '100 ± 0'),
        ],
        ['a', '30 s of tuning', '16', '1', '1', '200', '9', '9', *common, '2.25', '', '100'],
        ['a', '30 s of tuning', '64', '2', '1', '200', '8', '8', *common, '2.00', '', '100'],
    ]


def test_tunings_by_muon_come_last():
    """Each is a run of its own, whose time does not say how fast it draws."""
    fields = {tables.SETTINGS['q']: 2, 'diffusion.consistency_stages': 4}
    muon = [
        row(f'muon-{seconds}s', 'consistency:2', fid, seconds=seconds, fields=fields)
        for seconds, fid in ((120, 2.0), (30, 3.0))
    ]
    for one in muon:
        del one['seconds_per_sample']
    assert [line[1:4] + line[-1:] for line in cells(tables.quality([*muon, *ROWS]))][-2:] == [
        ['30 s of tuning', '2 to 16, Muon', '2', ''],
        ['120 s of tuning', '2 to 16, Muon', '2', ''],
    ]
    assert cells(tables.screening([*muon, *ROWS])) == cells(tables.screening(ROWS))


def test_short_tunings_the_best_first():
    assert cells(tables.screening(ROWS)) == [
        ['a', '64', '0.5', '0.5', '200', '0.995', '', '6', '', '6', '7'],
        ['a', '16', '0.5', '0.5', '200', '0.995', '9', '8', '', '8', '9'],
    ]


def test_without_rows_the_tables_say_so(tmp_path):
    found = tables.read(tmp_path)
    assert tables.quality(found) == tables.screening(found) == tables.NOTHING
