"""The sides that `tools/gpu/steps.py` times in turns."""

import pathlib
import runpy
import subprocess
import sys
import unittest.mock

import pytest

from jaxunet.runtime import rows

STEPS = runpy.run_path(str(pathlib.Path(__file__).parents[2] / 'tools/gpu/steps.py'))
OLD, NEW = pathlib.Path('old'), pathlib.Path('new')
SHARD = 'parallel.shard_optimizer=True'


@pytest.mark.parametrize(
    ('lists', 'labels'),
    [
        (([OLD, NEW], ['auto'], ['fastest'], [1], [''], ['']), ['old', 'new']),
        (([OLD], ['xla', 'cuda'], ['portable'], [2], [''], ['']), ['xla', 'cuda']),
        (
            ([OLD], ['xla', 'cuda', 'cuda'], ['fastest', 'fastest', 'ada'], [1], [''], ['']),
            ['xla fastest', 'cuda fastest', 'cuda ada'],
        ),
        (
            ([OLD, OLD, NEW], ['auto'], ['fastest'], [1, 2, 2], [''], ['']),
            ['old 1', 'old 2', 'new 2'],
        ),
        (([OLD], ['auto'], ['fastest'], [2], ['', 'A=1 B=2'], ['']), ['no variables', 'A=1 B=2']),
        (([OLD], ['auto'], ['fastest'], [1], [''], ['']), ['old']),
        (([OLD], ['auto'], ['fastest'], [2], [''], ['', SHARD]), ['no fields', SHARD]),
    ],
)
def test_sides_have_the_values_of_every_list(lists, labels):
    found = STEPS['sides'](*lists)
    assert STEPS['labels'](found) == labels
    for i, values in enumerate(lists):
        assert [side[i] for side in found] == (values * len(found))[: len(found)]


def test_lists_of_different_lengths_are_an_error():
    with pytest.raises(SystemExit, match='--kernels: expected 1 or 3 values, found 2'):
        STEPS['sides']([OLD], ['xla', 'auto', 'cuda'], ['fastest', 'ada'], [1], [''], [''])


@pytest.mark.parametrize('variable', ['A', '=1'])
def test_a_variable_without_name_or_value_is_an_error(variable):
    with pytest.raises(SystemExit, match=f'--variables: expected NAME=VALUE, found {variable}'):
        STEPS['sides']([OLD], ['auto'], ['fastest'], [1], ['', f'B=2 {variable}'], [''])


def test_a_field_without_section_is_an_error():
    with pytest.raises(SystemExit, match=r'--fields: expected SECTION\.NAME=VALUE, found seed=1'):
        STEPS['sides']([OLD], ['auto'], ['fastest'], [1], [''], ['seed=1'])


def test_a_side_has_its_environment_variables(monkeypatch):
    found = {}
    monkeypatch.setattr(subprocess, 'Popen', lambda *_, env, **__: found.update(env))
    (side,) = STEPS['sides']([OLD], ['auto'], ['ada'], [1], ['A=1=2 B=3'], [''])
    STEPS['start'](side, 'configs/elephants64.py', None)
    assert (found['A'], found['B'], found['JAXUNET_KERNELS']) == ('1=2', '3', 'ada')


def test_rounds_without_quartiles_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['steps.py', '.', '--rounds=1'])
    monkeypatch.setitem(STEPS['main'].__globals__, 'start', lambda *_: pytest.fail('starts'))
    with pytest.raises(SystemExit):
        STEPS['main']()
    assert '--rounds: quartiles need 2 or more, found 1' in capsys.readouterr().err


def test_unknown_peaks_are_null_in_the_rows(monkeypatch, capsys, tmp_path):
    def asked(worker, what, number=0):
        return {'peak': 0.0, 'run': 1.5}[what]

    output = tmp_path / 'rows.jsonl'
    monkeypatch.setattr(sys, 'argv', ['steps.py', '.', '--batch_sizes=2', f'--output={output}'])
    functions = STEPS['main'].__globals__
    monkeypatch.setitem(functions, 'start', lambda *_: unittest.mock.Mock())
    monkeypatch.setitem(functions, 'ask', lambda *_: None)
    monkeypatch.setitem(functions, 'answer', lambda worker: 0.1)
    monkeypatch.setitem(functions, 'ask_for', asked)
    STEPS['main']()
    assert capsys.readouterr().out.splitlines()[-1] == '2 | 1.500 |  | unknown'
    (row,) = rows.read(output)
    assert (row['peak_bytes'], row['medians']) == ([None], [1.5])
