"""One run at a time trains in a workdir."""

import subprocess
import sys

import pytest
from support.tiny import tiny_config

from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError
from jaxunet.training import workdir as lock
from jaxunet.training.loop import train


@pytest.fixture(scope='module')
def source():
    return open_source('digits:', image_shape=(8, 8, 1))


def test_one_run_at_a_time_in_a_workdir(tmp_path, source):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='file: cannot be made: File exists'):
        train(tiny_config(), tmp_path / 'file', source)
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, '-c', program, str(tmp_path / '.lock')]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == 'held\n'
        with pytest.raises(UserError, match=f'another run is training in {tmp_path}'):
            train(tiny_config(), tmp_path, source)
        other.stdin.close()
    assert not (tmp_path / 'checkpoints').exists()


def test_a_workdir_that_cannot_be_locked_is_told(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(
        lock.fcntl,
        'lockf',
        lambda *_: (_ for _ in ()).throw(OSError(95, 'Operation not supported')),
    )
    monkeypatch.setattr(lock.logging, 'warning', lambda text, *values: told.append(text % values))
    with lock.opened(tmp_path):
        assert told == [
            f'--workdir: {tmp_path} cannot be locked (Operation not supported): nothing keeps a '
            'second run out of it'
        ]
