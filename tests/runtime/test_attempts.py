"""Files whose writes may fail for a while."""

from __future__ import annotations

import contextlib
import errno
import os

import pytest
from support.full_disk import full_disk

from jaxunet.runtime import attempts
from jaxunet.runtime.attempts import Attempts, PatientFile, quietly


def test_what_a_full_disk_refused_is_written_later(tmp_path, caplog):
    file = PatientFile(tmp_path / 'new' / 'a.csv', start=b'head\n')
    file.write(b'one\n')
    with full_disk(12):
        for _ in range(5):
            file.write(b'two\n')
        assert file.path.read_bytes() == b'head\none\n'  # not the three bytes that had room
    assert caplog.text.count('cannot be written') == 1
    file.write(b'three\n')
    assert file.path.read_bytes() == b'head\none\n' + b'two\n' * 5 + b'three\n'
    with full_disk(0):
        file.write(b'four\n')
    assert caplog.text.count('cannot be written') == 2


def test_new_content_that_a_full_disk_refused(tmp_path):
    path = tmp_path / 'a.csv'
    path.write_bytes(b'old')
    file = PatientFile(path, content=b'new\n')
    with full_disk(2):
        file.write()
        file.write(b'one\n')
    assert path.read_bytes() == b'old'
    assert os.listdir(tmp_path) == ['a.csv']
    file.write(b'two\n')
    assert path.read_bytes() == b'new\none\ntwo\n'


def test_a_file_that_somebody_removed_or_put_a_folder_in_place_of(tmp_path):
    file = PatientFile(tmp_path / 'a.csv', start=b'head\n', content=b'head\none\n')
    file.path.mkdir()
    file.write(b'two\n')
    file.path.rmdir()
    file.write(b'three\n')
    assert file.path.read_bytes() == b'head\none\ntwo\nthree\n'
    file.path.unlink()
    file.write(b'four\n')
    assert file.path.read_bytes() == b'head\nfour\n'


def test_memory_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(attempts, 'LIMIT', 10)
    file = PatientFile(tmp_path / 'a')
    file.path.mkdir()
    for _ in range(4):
        file.write(b'0123')
    assert '12 bytes that could not be written are lost' in caplog.text
    file.path.rmdir()
    file.write(b'!')
    assert file.path.read_bytes() == b'0123!'


def test_what_can_be_written_is_not_lost(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(attempts, 'LIMIT', 10)
    file = PatientFile(tmp_path / 'a')
    file.path.mkdir()
    file.write(b'0123456789')
    file.path.rmdir()
    file.write(b'!')
    assert file.path.read_bytes() == b'0123456789!'
    file.write(b'more than ten bytes at once')
    assert file.path.read_bytes() == b'0123456789!more than ten bytes at once'
    assert 'lost' not in caplog.text


def test_one_warning_a_kind_until_it_works_again(caplog):
    attempt = Attempts().attempt

    def fail(kind):
        with attempt(kind):
            raise OSError(errno.ENOSPC, 'no space')

    for kind in ('samples', 'samples', 'logs', 'samples'):
        fail(kind)
    assert [r.getMessage().split(':')[0] for r in caplog.records] == ['samples', 'logs']
    with attempt('samples'):
        pass
    fail('samples')
    assert caplog.text.count('samples: cannot be written') == 2
    with pytest.raises(ZeroDivisionError), attempt('samples'):
        raise ZeroDivisionError  # a mistake of the code


def test_closing_never_replaces_the_first_error(caplog):
    def run():
        with contextlib.ExitStack() as stack:
            stack.callback(quietly, 'logs', lambda: 1 // 0)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert 'logs: closing failed (ZeroDivisionError' in caplog.text
