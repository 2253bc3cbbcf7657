"""The sanitizer's runs: what its output says, which pieces are left, and the table; with a program
in place of compute-sanitizer, so that no GPU is needed.
"""

import json
import pathlib
import threading
import time

import pytest
from support.fake_sanitizer import World

from tools.sanitizer import sanitizer, sanitizer_rows, sanitizer_run, tested_sources
from tools.sanitizer.sanitizer import OPS, Piece
from tools.sanitizer.sanitizer_output import parse

CLEAN = """\
========= COMPUTE-SANITIZER
......................                                                   [100%]
20 passed, 2 skipped, 61 deselected in 31.20s
========= ERROR SUMMARY: 0 errors
"""
READ = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 2 bytes
=========     at kernel+0x10
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Host API uninitialized memory access on access by cudaMemcpy source
.
1 passed in 3.1s
========= ERROR SUMMARY: 27 errors
========= ERROR SUMMARY: 7 errors were not printed because of print limit; they can be shown
"""
RACE = """\
.....========= Warning: Race reported between Write access at a+0x1
=========     and Read access at b+0x2 [32 hazards]
=========     and Write access at c+0x3 [4 hazards]
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= Error: Race reported between Write access at a+0x1 and Read access at b+0x2 [4 hazards]
=========         Host Frame: PyObject_Vectorcall [0x1499b4] in python3
=========     and Read access at another place
..
1 passed in 0:03:01
3 passed in 182.01s (0:03:02)
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_what_the_output_says():
    assert parse(CLEAN) == (20, 0, 2, 0, 'clean', [], '', None)
    found = parse(READ)
    assert (found.passed, found.errors, found.status) == (1, 27, 'errors')
    assert found.reports == [
        'Uninitialized __global__ memory read of size 2 bytes',
        'Host API uninitialized memory access on access by cudaMemcpy source',
    ]
    found = parse(RACE)
    assert (found.passed, found.errors, found.status) == (3, 1, 'errors')
    race = 'Race reported between Write access at a+0x1 and Read access at b+0x2'
    assert found.reports == [
        f'Warning: {race} [32 hazards] and Write access at c+0x3 [4 hazards]',
        f'Error: {race} [4 hazards]',
    ]
    assert parse(CLEAN + CLEAN.replace('0 errors', '2 errors')).errors == 2  # of two processes
    assert parse(CLEAN.replace('20 passed', '1 failed, 19 passed'))[:2] == (19, 1)
    assert parse(CLEAN.replace('20 passed', '1 failed, 19 passed')).status == 'failed'
    assert parse(CLEAN.replace('20 passed, ', '')).status == 'failed'  # nothing ran
    assert parse(CLEAN.split('====', 2)[0]).status == 'crashed'
    assert parse(CLEAN, stopped='timeout', where='t1', exit_status=-9)[4:] == (
        'timeout',
        [],
        't1',
        None,
    )
    lost = '========= Internal Sanitizer Error: (Unable to allocate enough memory to perform it)'
    assert parse(f'{lost}\n{READ}').status == 'no memory'


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def test_pieces_have_rows_and_are_not_run_twice(world, capsys):
    assert world.run('--tools', 'memcheck', '--kernels', 'portable') == 0
    assert world.calls() == ['memcheck portable 2'] * 2 + ['memcheck portable 1']
    assert [(r['first'], r['tests'], r['passed'], r['of']) for r in world.rows()] == [
        (0, 2, 2, 5),
        (2, 2, 2, 5),
        (4, 1, 1, 5),
    ]
    row = world.rows()[0]
    assert row['status'] == 'clean'
    assert row['git'] == 'abc'
    assert row['command'].startswith('python3 tools/sanitizer/sanitize.py --output')
    assert '| cuda linear | portable | 5 cases, 0 errors | not run |' in capsys.readouterr().out
    assert world.run('--tools', 'memcheck') == 0  # the other kernels alone
    assert world.calls() == ['memcheck fastest 2'] * 2 + ['memcheck fastest 1']
    assert world.run('--tools', 'memcheck') == 0
    assert world.calls() == []
    assert world.run('--tools', 'memcheck', '--kernels', 'portable', '--again') == 0
    assert len(world.calls()) == 3


def test_errors_are_counted_and_end_with_1(world, capsys):
    assert world.run('--tools', 'initcheck') == 1
    out = capsys.readouterr().out
    assert '| cuda linear | fastest | not run | not run | not run | 5 cases, 3 errors |' in out
    assert '| cuda linear | portable | not run | not run | not run | 5 cases, 0 errors |' in out
    assert 'some GPU, driver 1, tool 1, commit abc.' in out
    assert 'Uninitialized __global__ memory read' in out


def test_what_takes_too_long_is_ended_and_tried_again(world, capsys):
    world.hang('racecheck')
    began = time.monotonic()
    flags = ('--tools', 'racecheck', '--kernels', 'portable')
    assert world.run(*flags, '--limit', '0.5', '--size', '5') == 1
    assert time.monotonic() - began < 30  # it would sleep for a minute
    assert world.rows()[-1]['status'] == 'timeout'
    assert '| 0 of 5 cases, 0 errors, 1 × timeout |' in capsys.readouterr().out
    world.hang()
    assert world.run(*flags, '--size', '5') == 0
    assert '| cuda linear | portable | not run | 5 cases, 0 errors |' in capsys.readouterr().out


def test_pieces_run_at_the_same_time(world, monkeypatch):
    together, run = threading.Barrier(3, timeout=60), sanitizer_run.run

    def run_together(piece, limits):
        together.wait()  # fails if the three pieces come one after the other
        return run(piece, limits)

    monkeypatch.setattr(sanitizer_run, 'run', run_together)
    assert world.run('--tools', 'memcheck', '--kernels', 'portable', '--processes', '3') == 0
    assert sorted(r['first'] for r in world.rows()) == [0, 2, 4]


def test_no_piece_begins_after_the_time(world, capsys):
    assert world.run('--seconds', '0', '--tools', 'memcheck', '--kernels', 'portable') == 0
    assert '3 pieces were not begun' in capsys.readouterr().out
    assert world.calls() == []


def test_a_commit_keeps_the_rows_of_the_same_sources(world, monkeypatch, capsys):
    flags = ('--tools', 'memcheck', '--kernels', 'portable')
    assert world.run(*flags, '--seconds', '0') == 0
    assert world.run(*flags) == 0
    assert len(world.calls()) == 3
    world.origin |= {'git': 'def'}
    assert world.run(*flags) == 0
    assert world.calls() == []
    assert ', commit abc.' in capsys.readouterr().out
    world.output.write_text('\n'.join(world.output.read_text().split('\n')[1:]))
    assert world.run(*flags) == 0  # the missing piece alone
    assert len(world.calls()) == 1
    assert 'tool 1, commits abc, def: the cells are of several commits.' in capsys.readouterr().out
    for change in ({'device': 'other GPU'}, {'nvcc': '12.9'}, {'versions': {'jax': '1'}}):
        world.origin |= change
        assert world.run(*flags) == 0
        assert len(world.calls()) == 3, change
        assert '| portable | 5 cases, 0 errors |' in capsys.readouterr().out
    monkeypatch.setattr(tested_sources, 'digest', lambda test: f'other sources of {test}')
    assert world.run(*flags) == 0
    assert len(world.calls()) == 3


def test_rows_of_other_tests_or_sources_do_not_count():
    piece = Piece('memcheck', 'cuda linear', 'portable', 2, ('a', 'b'), 5, 'digest')
    row = piece.row() | {'git': 'abc', 'code': '1', 'status': 'clean', 'seconds': 1}

    def left(*rows, code='1'):
        return sanitizer_rows.left([piece], rows, {'cuda linear': code})

    assert left(row) == []
    assert left(row, code='2') == [piece]
    assert left({name: value for name, value in row.items() if name != 'code'}) == [piece]
    for change in ({'digest': 'other'}, {'status': 'timeout'}, {'status': 'stalled'}):
        assert left(row | change) == [piece]
    assert left(row | {'tests': 1}) == [piece.part(1, 2)]
    assert left(row | {'first': 3}) == [piece.part(0, 1)]
    assert left(row | {'tests': 1}, row | {'first': 3, 'tests': 1}) == []
    assert sanitizer_rows.left([piece], [row], {}) == [piece]


def test_long_pieces_begin_first(world):
    names = tuple('abcde')
    unknown, *known = (
        Piece('memcheck', 'cuda linear', 'portable', first, names[:2], 8, 'digest')
        for first in (6, 0, 2, 4)
    )
    rows = [
        piece.row() | {'status': status, 'seconds': seconds, 'digest': 'of other tests'}
        for piece, status, seconds in (
            (known[0], 'clean', 20),
            (known[1], 'timeout', 90),
            (known[1], 'clean', 40),
            (known[2], 'errors', 30),
            (known[2], 'crashed', 50),
        )
    ]
    assert sanitizer_rows.in_order([*known, unknown], rows) == [
        unknown,
        known[1],
        known[0],
        known[2],  # its newest row says that it crashed
    ]
    flags = ('--tools', 'memcheck', '--kernels', 'portable')
    assert world.run(*flags) == 0
    times = world.output.with_name('times.jsonl')
    slower = [row | {'seconds': 100 + row['first']} for row in world.rows()]
    times.write_text(''.join(f'{json.dumps(row)}\n' for row in slower))
    world.output.unlink()
    assert world.run(*flags, '--times', str(times)) == 0
    assert [row['first'] for row in world.rows()] == [4, 2, 0]


def test_the_check_tells_what_rows_lack(world, monkeypatch, capsys):
    def check(*flags):
        status = world.script['main'](['--check', str(world.output), *flags])
        return status, capsys.readouterr().out

    def write(rows):
        world.output.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))

    missing = 'memcheck, cuda linear, portable: {} of 5 cases not run for these sources\n'
    flags = ('--tools', 'memcheck', '--kernels', 'portable')
    assert world.run(*flags) == 0
    all_rows = world.output.read_text()
    capsys.readouterr()
    assert check(*flags)[0] == 0
    assert check('--kernels', 'portable')[0] == 1  # the other tools
    rows = world.rows()
    write(rows[1:])
    assert check(*flags) == (1, missing.format(2))
    write([*rows, rows[0] | {'status': 'timeout'}])  # it has been run, earlier
    assert check(*flags)[0] == 0
    write([*rows, rows[2] | {'status': 'errors'}])
    bad = '1 cases in pieces with errors or failed tests\n'
    assert check(*flags) == (1, f'memcheck, cuda linear, portable: {bad}')
    write([*rows[1:], rows[2] | {'status': 'failed'}])
    assert check(*flags) == (1, missing.format(2).rstrip() + f'; {bad}')
    for change in ({'device': 'other GPU'}, {'code': 'other'}, {'digest': 'other'}):
        write([rows[0] | change, *rows[1:]])
        assert check(*flags) == (1, missing.format(2)), change
    write([{name: value for name, value in row.items() if name != 'code'} for row in rows])
    assert check(*flags) == (1, missing.format(5))
    world.output.write_text(all_rows)
    monkeypatch.setattr(tested_sources, 'digest', lambda test: f'other sources of {test}')
    assert check(*flags) == (1, missing.format(5))
    with pytest.raises(SystemExit):
        world.script['main'](['--check', 'no_file.jsonl'])
    assert 'no_file.jsonl: cannot be read: No such file' in capsys.readouterr().err


def test_the_table_shows_rows_without_a_code():
    piece = Piece('memcheck', 'cuda linear', 'portable', 0, ('a', 'b'), 2, 'digest')
    row = piece.row() | {'git': 'abc', 'device': 'some GPU', 'driver': '1', 'sanitizer': 'tool 1'}
    row |= parse(CLEAN)._asdict()
    assert '| cuda linear | portable | 2 cases, 0 errors, 2 skipped |' in sanitizer_rows.table(
        [row]
    )
    newer = row | {'git': 'def', 'code': '1', 'skipped': 0, 'first': 1, 'tests': 1}
    text = sanitizer_rows.table([row, newer])
    assert '| cuda linear | portable | 1 of 2 cases, 0 errors |' in text
    assert text.endswith('tool 1, commit def.')


def test_a_missing_sanitizer_is_named(world, monkeypatch, capsys):
    monkeypatch.setenv('PATH', '')
    assert world.run() == 2
    assert 'compute-sanitizer is not on PATH' in capsys.readouterr().err


def test_an_unknown_tool_is_named(world, capsys):
    with pytest.raises(SystemExit):
        world.run('--tools', 'memchek')
    assert "expected some of memcheck, racecheck, synccheck, initcheck, found 'memchek'" in (
        capsys.readouterr().err
    )


def test_every_op_has_its_tests():
    paths = {op.path for op in OPS.values()}
    found = {
        str(path.relative_to(sanitizer.ROOT))
        for package in ('xla_ffi', 'pallas_kernels')
        for path in pathlib.Path(sanitizer.ROOT / package).glob('*/parity_test.py')
    }
    assert paths == found | {'xla_ffi/conv3x3/test_upsampled.py'}


@pytest.mark.long
@pytest.mark.parametrize('name', list(OPS))
def test_the_expressions_select_cases_of_every_type(name):
    found = sanitizer.collect(OPS[name])
    assert len(found) >= 4
    types = {'pallas attention': ('bfloat16', 'float16')}  # it has no kernels of float32
    for dtype in types.get(name, ('float32', 'bfloat16')) if 'adamw' not in name else ():
        assert any(dtype in test for test in found), found
