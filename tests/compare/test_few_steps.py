"""docs/results/few_steps/measure.py, on the embedded digits."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from jaxunet.runtime import rows

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = ['--sets=digits', '--rates=1e-3,4e-3', '--step_ms=10,15']


def distances(row):
    values = row['values']['train']
    return row['case'], row['seed'], row['step'], row['sampler'], values['fid'], values['kid']


@pytest.mark.long
def test_the_best_short_tuning_chooses_the_rate_of_the_others(tmp_path):
    command = [sys.executable, 'docs/results/few_steps/measure.py', *FLAGS]
    command += [f'--output={tmp_path}/1', f'--data={tmp_path}']

    def run():
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
        return done.stdout

    run()
    found = list(rows.read(tmp_path / '1/rows.jsonl'))
    two = {
        row['case']: row['values']['train']['fid']
        for row in found
        if (row['sampler'], row['seed'], row['seconds']) == ('consistency:2', 0, 0.5)
    }
    assert two.keys() == {'muon-0.001-0.5s', 'muon-0.004-0.5s'}
    best = min(two, key=two.get).removesuffix('-0.5s')
    others = {(row['case'], row['seed']) for row in found} - {('teacher', 0)}
    assert others == {(case, 0) for case in two} | {
        (f'{best}-0.5s', 1),
        (f'{best}-1s', 0),
        (f'{best}-1s', 1),
    }
    assert {row['step'] for row in found if row['seconds'] == 0.5} == {34}  # 0.5 s of 15 ms
    assert run().count('is done already') == 7  # of the best rate, one is asked for twice

    (tmp_path / '1/rows.jsonl').unlink()
    run()
    again = list(rows.read(tmp_path / '1/rows.jsonl'))
    assert [distances(row) for row in again] == [distances(row) for row in found]
