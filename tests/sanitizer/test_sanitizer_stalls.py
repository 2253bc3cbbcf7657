"""Tests that hang under the sanitizer: they are stopped, named, and keep no others from running."""

import pytest
from support import processes
from support.fake_sanitizer import World

from tools.sanitizer import sanitizer_rows, sanitizer_run
from tools.sanitizer.sanitizer import Piece

FLAGS = ('--tools', 'memcheck', '--kernels', 'portable')


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def run(world, *flags):
    """Runs the script; returns the new rows: number of the first test, of tests, and status."""
    before = len(world.rows()) if world.output.exists() else 0
    status = world.run(*FLAGS, '--size', '5', '--stall', '1', *flags)
    found = [(row['first'], row['tests'], row['status']) for row in world.rows()[before:]]
    assert status == int(any(row[2] != 'clean' for row in found))
    return found


def test_a_test_that_stalls_is_named_and_the_others_run_again(world, capsys):
    check = ['--check', str(world.output), *FLAGS]
    world.hang('t2')
    assert run(world) == [(2, 1, 'stalled'), (0, 2, 'clean'), (3, 2, 'clean')]
    assert world.calls() == [f'memcheck portable {tests}' for tests in (5, 2, 2)]
    assert [row['where'] for row in world.rows()] == [world.tests[2], '', '']
    out = capsys.readouterr().out
    assert f'cases 3 to 3 of 5: stalled, {world.tests[2]}, 0 passed' in out
    assert '| 4 of 5 cases, 0 errors, 1 × stalled |' in out
    assert world.script['main'](check) == 1
    assert capsys.readouterr().out == (
        'memcheck, cuda linear, portable: 1 of 5 cases not run for these sources; '
        '1 of these in pieces that stalled\n'
    )
    assert run(world) == [(2, 1, 'stalled')]  # again in the next run, alone
    assert world.calls() == ['memcheck portable 1']
    world.hang()
    assert run(world) == [(2, 1, 'clean')]
    assert '| portable | 5 cases, 0 errors |' in capsys.readouterr().out
    assert world.script['main'](check) == 0
    assert run(world) == []


def test_the_first_test_stalls(world):
    world.hang('t0')
    assert run(world) == [(0, 1, 'stalled'), (1, 4, 'clean')]


def test_two_tests_of_a_piece_stall(world):
    world.hang('t1', 't3')
    assert run(world) == [
        (1, 1, 'stalled'),
        (0, 1, 'clean'),
        (3, 1, 'stalled'),
        (2, 1, 'clean'),
        (4, 1, 'clean'),
    ]


def test_where_every_test_stalls_the_rest_comes_last(world):
    world.hang('t0', 't1', 't2')
    assert run(world, '--size', '3') == [
        (0, 1, 'stalled'),
        (1, 1, 'stalled'),
        (3, 2, 'clean'),
        (2, 1, 'stalled'),
    ]


@pytest.mark.parametrize('hang', ['start', 'end'])
def test_a_process_that_hangs_outside_of_its_tests_has_a_row_of_all(world, capsys, hang):
    world.hang(hang)
    start = ('--start', '1') if hang == 'start' else ()
    assert run(world, *start) == [(0, 5, 'stalled')]
    where = world.rows()[0]['where']
    assert where == ('before the first test' if hang == 'start' else f'after {world.tests[4]}')
    out = capsys.readouterr().out
    assert f'memcheck, cuda linear, portable, cases 1 to 5 of 5: stopped, {where}' in out
    assert 'No Python stacks: pytest has not begun.' in out  # it is no pytest
    assert '| 0 of 5 cases, 0 errors, 1 × stalled |' in out
    world.hang()
    assert run(world) == [(0, 5, 'clean')]


def test_what_was_stopped_in_an_earlier_run_begins_last():
    piece = Piece('memcheck', 'cuda linear', 'portable', 0, tuple('abcdefghijklmn'), 14, 'digest')
    old = {'code': 'of other sources', 'digest': 'of other tests'}

    def row(first, tests, status, seconds):
        return piece.part(first, first + tests).row() | old | {'status': status, 'seconds': seconds}

    rows = [
        row(0, 2, 'clean', 10),
        row(2, 2, 'clean', 20),
        row(2, 2, 'timeout', 700),
        row(4, 2, 'timeout', 3),
        row(6, 1, 'stalled', 1),
        row(7, 1, 'clean', 5),
        row(8, 2, 'stalled', 800),
        row(8, 2, 'clean', 30),
        row(12, 2, 'stalled', 2),
    ]
    wanted = [piece.part(first, first + 2) for first in range(0, 14, 2)]
    left = sanitizer_rows.left(wanted, rows[4:], {'cuda linear': '1'}, rows[:4])
    left = sanitizer_rows.in_order(left, rows)
    assert [(part.first, len(part.tests)) for part in left] == [
        (10, 2),  # has no row
        (8, 2),  # whose newest row is clean
        (0, 2),
        (7, 1),
        (4, 2),  # the end of the run stopped it, rather than its limit
        (2, 2),
        (6, 1),  # alone
        (12, 2),  # not in a test of its own
    ]


FOLLOWS = """\
#!{python}
import subprocess, sys
done = subprocess.run(sys.argv[sys.argv.index({python!r}):])
print('========= ERROR SUMMARY: 0 errors')
"""
TESTS = """\
import pathlib, subprocess, sys, time

def test_before():
    pass

def waits_for_ever():
    time.sleep(600)

def test_that_hangs():
    sleep = [sys.executable, '-c', 'import time; time.sleep(600)']
    child = subprocess.Popen(sleep, start_new_session=True)
    pathlib.Path('child').write_text(str(child.pid))
    waits_for_ever()
"""


def test_pytest_tells_where_it_hangs(world, tmp_path, capsys):
    piece = world.with_pytest(FOLLOWS, TESTS, 'test_before', 'test_that_hangs')
    before = piece.part(0, 1)
    assert sanitizer_run.run(before, sanitizer_run.Limits(100, 100, 100))[0].status == 'clean'
    found, _ = sanitizer_run.run(piece, sanitizer_run.Limits(100, 2, 100))
    assert (found.status, found.where) == ('stalled', piece.tests[1])
    assert sanitizer_run.divide(piece, found) == (piece.part(1, 2), before, None)
    line = TESTS.splitlines().index('    time.sleep(600)') + 1
    assert f'test_some.py", line {line} in waits_for_ever' in found.reports[0]
    out = capsys.readouterr().out
    assert 'in test_that_hangs' in out
    assert '/_pytest/' not in out
    assert 'Threads that used most of the CPU:\n' in out
    processes.assert_ended(int((tmp_path / 'child').read_text()))
