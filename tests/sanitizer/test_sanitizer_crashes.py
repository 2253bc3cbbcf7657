"""Tests in which the sanitizer crashes: they are named, tried once more, and keep no others from
running.
"""

import time

import pytest
from support import processes
from support.fake_sanitizer import World

from tools.sanitizer import sanitizer_run
from tools.sanitizer.sanitizer_output import parse

FLAGS = ('--tools', 'memcheck', '--kernels', 'portable')
PASSED = """\
========= COMPUTE-SANITIZER
...                                                                      [100%]
3 passed, 61 deselected in 31.20s
"""
DIED = """\
========= COMPUTE-SANITIZER
.compiled 3 kernels in 4.20s
Fatal Python error: Segmentation fault
========= Error: process didn't terminate successfully
========= ERROR SUMMARY: {} errors
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def run(world, *flags):
    """Runs the script; returns its exit status, and of each new row the number of the first test,
    of tests, and the status.
    """
    before = len(world.rows()) if world.output.exists() else 0
    status = world.run(*FLAGS, '--size', '5', *flags)
    return status, [(row['first'], row['tests'], row['status']) for row in world.rows()[before:]]


def test_what_counts_as_crashed():
    found = parse(PASSED, where='after t3', exit_status=-9)
    assert (found.status, found.passed, found.errors) == ('crashed', 3, None)
    assert found.ending() == 'crashed, after t3, signal 9 (Killed)'
    found = parse(DIED.format(0), where='t2', exit_status=255)  # pytest has no summary
    assert (found.status, found.where, found.exit_status) == ('crashed', 't2', 255)
    assert found.reports == ["Error: process didn't terminate successfully"]
    assert found.ending() == 'crashed, t2, exit status 255'
    found = parse(DIED.format(2), where='t2', exit_status=255)  # perhaps because of the errors
    assert (found.status, found.where) == ('errors', '')
    found = parse(PASSED + '========= ERROR SUMMARY: 0 errors', where='after t3', exit_status=0)
    assert (found.status, found.where, found.exit_status) == ('clean', '', 0)
    assert found.ending() == 'clean'
    nothing = 'no tests ran in 0.01s\n========= ERROR SUMMARY: 0 errors'
    assert parse(nothing, exit_status=5).status == 'failed'


def test_a_test_that_crashes_is_named_and_tried_once_more(world, capsys):
    world.crash('t2')
    rows = [(2, 1, 'crashed'), (0, 2, 'clean'), (3, 2, 'clean'), (2, 1, 'clean')]
    assert run(world) == (0, rows)
    assert world.calls() == [f'memcheck portable {tests}' for tests in (5, 2, 2, 1)]
    assert [(row['where'], row['exit_status']) for row in world.rows()] == [
        (world.tests[2], -9),
        ('', 0),
        ('', 0),
        ('', 0),
    ]
    out = capsys.readouterr().out
    how = f'crashed, {world.tests[2]}, signal 9 (Killed)'
    assert f'cases 1 to 5 of 5: {how}\n\n========= COMPUTE-SANITIZER\nthe last words\n' in out
    assert f'cases 3 to 3 of 5: {how}, 0 passed' in out
    assert '| portable | 5 cases, 0 errors |' in out
    assert world.script['main'](['--check', str(world.output), *FLAGS]) == 0
    assert run(world) == (0, [])


def test_a_test_that_crashes_twice_waits_for_the_next_run(world, capsys):
    world.crash('t4', 't4', 't4')
    assert run(world) == (1, [(4, 1, 'crashed'), (0, 4, 'clean'), (4, 1, 'crashed')])
    assert '| 4 of 5 cases, 0 errors, 1 × crashed |' in capsys.readouterr().out
    check = ['--check', str(world.output), *FLAGS]
    assert world.script['main'](check) == 1
    assert capsys.readouterr().out == (
        'memcheck, cuda linear, portable: 1 of 5 cases not run for these sources; '
        '1 of these in pieces that crashed\n'
    )
    # Alone, and after those that are not done: the next run has fewer rows.
    world.output.write_text(''.join(world.output.read_text().splitlines(keepends=True)[::2]))
    assert run(world) == (0, [(0, 4, 'clean'), (4, 1, 'crashed'), (4, 1, 'clean')])
    assert world.script['main'](check) == 0


def test_crashed_tests_are_tried_again_after_all_others(world):
    world.crash('t0', 't1')
    assert run(world, '--size', '3') == (
        0,
        [
            (0, 1, 'crashed'),
            (1, 1, 'crashed'),
            (3, 2, 'clean'),
            (2, 1, 'clean'),  # after a test that crashed after another
            (0, 1, 'clean'),
            (1, 1, 'clean'),
        ],
    )


def test_no_crashed_test_is_tried_again_after_the_time(world, monkeypatch, capsys):
    world.crash('t0')
    real = sanitizer_run.run

    def run_late(piece, limits):
        found = real(piece, limits)
        now = time.monotonic()
        monkeypatch.setattr(time, 'monotonic', lambda: now + 10_000)
        return found

    monkeypatch.setattr(sanitizer_run, 'run', run_late)
    assert run(world) == (1, [(0, 1, 'crashed')])
    assert '2 pieces were not begun' in capsys.readouterr().out


def test_a_crash_after_the_tests_has_rows_of_all(world, capsys):
    world.crash('end', 'end')
    assert run(world) == (1, [(0, 5, 'crashed'), (0, 5, 'crashed')])
    assert world.rows()[0]['where'] == f'after {world.tests[4]}'
    assert '| 0 of 5 cases, 0 errors, 1 × crashed |' in capsys.readouterr().out
    assert run(world) == (0, [(0, 5, 'clean')])


def test_a_test_that_crashes_and_then_stalls_counts_as_stalled(world, capsys):
    world.crash('t0')
    world.hang('t0')
    rows = [(0, 1, 'crashed'), (1, 4, 'clean'), (0, 1, 'stalled')]
    assert run(world, '--stall', '1') == (1, rows)
    assert '| 4 of 5 cases, 0 errors, 1 × stalled |' in capsys.readouterr().out


CRASHES = """\
#!{python}
import os, pathlib, signal, subprocess, sys, time
subprocess.Popen(sys.argv[sys.argv.index({python!r}):])
while not pathlib.Path('child').exists():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
TESTS = """\
import os, pathlib, time

def test_before():
    pass

def test_that_outlives_the_tool():
    pathlib.Path('number').write_text(str(os.getpid()))
    pathlib.Path('number').rename('child')
    time.sleep(600)
"""


def test_pytest_ends_with_the_tool(world, tmp_path, capsys):
    piece = world.with_pytest(CRASHES, TESTS, 'test_before', 'test_that_outlives_the_tool')
    found, _ = sanitizer_run.run(piece, sanitizer_run.Limits(100, 100, 100))
    assert (found.status, found.where, found.exit_status) == ('crashed', piece.tests[1], -9)
    assert sanitizer_run.divide(piece, found) == (piece.part(1, 2), piece.part(0, 1), None)
    assert 'signal 9 (Killed)' in capsys.readouterr().out
    processes.assert_ended(int((tmp_path / 'child').read_text()))
