"""Streams whose writes may fail for a while, and commands that run on such streams."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.commands import ROOT
from support.full_disk import full_disk

from jaxunet.runtime.printing import let_printing_fail


@pytest.fixture(autouse=True)
def _own_streams(monkeypatch):
    for name in ('stdout', 'stderr'):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # back after the test


def test_printing_on_a_full_disk(tmp_path, monkeypatch):
    with (tmp_path / 'log').open('w', buffering=1) as file:
        monkeypatch.setattr(sys, 'stdout', file)
        monkeypatch.setattr(sys, 'stderr', file)
        let_printing_fail()
        with full_disk(3):
            print('12345')
            print('12345', file=sys.stderr, flush=True)
            assert sys.stdout.fileno() == file.fileno()
        print('again', flush=True)
    assert (tmp_path / 'log').read_text().endswith('again\n')


def test_letters_that_stdout_lacks_are_escaped(tmp_path, monkeypatch):
    with (tmp_path / 'log').open('w', encoding='ascii') as file:
        monkeypatch.setattr(sys, 'stdout', file)
        let_printing_fail()
        print('8×8 \udcff')
    assert (tmp_path / 'log').read_text() == '8\\xd78 \\udcff\n'


def test_a_closed_stream_is_told_once(tmp_path, monkeypatch, capsys):
    file = (tmp_path / 'log').open('w')
    monkeypatch.setattr(sys, 'stdout', file)
    let_printing_fail()
    file.close()
    for _ in range(2):
        print('1')
    error = capsys.readouterr().err
    assert error.count('stdout: cannot be written (I/O operation on closed file') == 1


def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path):
    """A library that prints to stderr would write into the file."""
    script = (
        'import os\n'
        'from jaxunet.runtime.printing import let_printing_fail\n'
        'let_printing_fail()\n'
        'file = open("result", "wb")\n'
        'os.write(1, b"said"), os.write(2, b"said")\n'
        'os.system("echo said; echo said >&2")\n'
        'file.write(b"result")\n'
    )
    done = subprocess.run(
        f"{sys.executable} -c '{script}' <&- >&- 2>&-",
        shell=True,
        cwd=tmp_path,
        env=os.environ | {'PYTHONPATH': str(ROOT)},
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / 'result').read_bytes() == b'result'
