"""The tables of the comparison files, from rows as the queue writes them."""

from __future__ import annotations

from support import study_tables

from jaxunet.compare import tables
from jaxunet.compare.tables import Measured


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
    study = study_tables.measured('long_run').study
    rows = [row('uniform', s, 'ddpm:50', 9000 / s) for s in (900, 300)]
    rows += [row('flow', 300, 'heun:25', 20.0), row('flow', 300, 'ddpm:50', 25.0)]
    lines = study_tables.long_run(Measured(study, rows)).splitlines()
    assert lines[0].startswith('| run | s | steps | Fréchet distance, our features |')
    assert lines[2:5] == [
        '| flow | 300 | 21,000 | 20 | 0.25 |  |',
        '| uniform | 300 | 21,000 | 30 | 0.25 |  |',
        '| uniform | 900 | 63,000 | 10 | 0.25 |  |',
    ]
    assert lines[5] == '| ddpm-torch, published |  | 46,800 |  |  | 9.16 |'
    assert lines[-1] == '| ddpm-torch, published |  | 187,200 |  |  | 4.08 |'
    assert study_tables.long_run(Measured(study, [])) == tables.NOTHING


def test_distances_by_sampler_have_the_averages_that_were_chosen():
    study = study_tables.measured('methods').study
    rows = [row('flow', 60, sampler, fid) for sampler, fid in (('heun:25', 30), ('ddpm:50', 50))]
    rows += [row('flow', 60, 'heun:25', 40) | {'seed': 1}, row('uniform', 120, 'ddpm:50', 90)]
    averages = ('0.15', '0.15', '0.05', '0.9999')
    found = [{**row, 'average': average} for row, average in zip(rows, averages, strict=True)]
    lines = study_tables.by_sampler(Measured(study, found)).splitlines()
    assert lines[0] == (
        '| method | 60 s: averages | 60 s: ddpm 50 | 60 s: heun 25 | 120 s: averages | '
        '120 s: ddpm 50 | 120 s: heun 25 |'
    )
    assert lines[2:] == [
        '| uniform |  |  |  | 0.9999 | 90 |  |',
        '| flow | 0.15, 0.05 | 50 | 35 |  |  |  |',
    ]
    assert study_tables.by_sampler(Measured(study, [])) == tables.NOTHING
