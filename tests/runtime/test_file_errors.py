"""Files that the system refuses to open end a command in one line."""

from __future__ import annotations

import errno
import os

import pytest
from support.commands import ROOT, call_each

from jaxunet.runtime import distributed
from jaxunet.runtime.errors import USER_ERROR, UserError
from jaxunet.runtime.file_errors import explained

CONFIG = f'--config={ROOT}/configs/digits.py'
LONG = 'a' * 300  # longer than the name of a file may be


@pytest.mark.parametrize('name', ['file', b'file'])
@pytest.mark.parametrize('number', [errno.EACCES, errno.ENOSPC])
def test_the_message_has_the_file_and_the_reason(name, number):
    with pytest.raises(UserError, match=f'^file: {os.strerror(number)}$'), explained():
        raise OSError(number, os.strerror(number), name)


@pytest.mark.parametrize(
    'error',
    [
        FileNotFoundError(errno.ENOENT, 'No such file', 'file'),
        PermissionError(errno.EACCES, 'Permission denied'),
        PermissionError(errno.EACCES, 'Permission denied', 3),
        OSError('of a library'),
    ],
)
def test_other_errors_are_left(error):
    with pytest.raises(type(error)) as found, explained():
        raise error
    assert found.value is error


def test_one_of_several_processes(monkeypatch, capsys):
    """It exits by itself, and does not wait for the others."""

    def end(code, **_):
        raise SystemExit(code)

    monkeypatch.setattr(distributed, 'join', lambda start: True)
    monkeypatch.setattr(distributed, 'end', end)
    with pytest.raises(SystemExit) as ended, distributed.joined(distributed.Start()):
        raise PermissionError(errno.EACCES, 'Permission denied', 'file')
    assert ended.value.code == USER_ERROR
    assert capsys.readouterr().err == 'error: file: Permission denied\n'


def test_commands(tmp_path):
    commands = [
        ['jaxunet.sample', f'--checkpoint={LONG}'],
        ['jaxunet.train', CONFIG, f'--workdir={LONG}'],
        ['jaxunet.train', CONFIG, f'--config.data.path={LONG}'],
        ['jaxunet.evaluate', f'--samples={LONG}', '--reference=digits:'],
        ['jaxunet.prepare_data', f'--input={LONG}', '--output=a.npz', '--image_size=8'],
    ]
    for code, _, errors in call_each(commands, tmp_path):
        assert code == 2
        last = errors.strip().splitlines()[-1]
        assert last.startswith('error: ')
        assert LONG in last
        assert ': File name too long' in last
