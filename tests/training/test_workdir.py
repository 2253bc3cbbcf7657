"""One run at a time trains in a workdir."""

import shutil
import subprocess
import sys

import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.store import read
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.whole_files import machine
from jaxunet.training import workdir as lock
from jaxunet.training.loop import train
from jaxunet.training.saving import Saver


def test_one_run_at_a_time_in_a_workdir(tmp_path, source):
    (tmp_path / 'file').touch()
    for name in ('file', 'file/run'):
        with pytest.raises(UserError, match=f'{name}: cannot be made: .*file is a file, not a fo'):
            train(tiny_config(), tmp_path / name, source)
    (tmp_path / 'link').symlink_to('nowhere/run')
    with pytest.raises(UserError, match=r'link: cannot be made: .* is a link to nowhere/run'):
        train(tiny_config(), tmp_path / 'link', source)
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


@pytest.mark.usefixtures('counted_steps')
@pytest.mark.parametrize('anew', [False, True])
def test_a_run_whose_folder_is_moved_saves_there_and_ends(anew, tmp_path, source, monkeypatch):
    """Nothing is written to its old path, where another run may train."""
    workdir, moved, save = tmp_path / 'x', tmp_path / 'x_old', Saver.save

    def move_first(self, step, *args):
        if step == 2:
            workdir.rename(moved)
            if anew:
                workdir.mkdir()
                (workdir / '.lock').touch()
        save(self, step, *args)

    monkeypatch.setattr(Saver, 'save', move_first)
    with pytest.raises(UserError, match=f'x is no longer .* was moved to {moved}; .*: go on with'):
        train(tiny_config(), workdir, source)
    assert [p.name for p in tmp_path.iterdir() if p != moved] == ['x'] * anew
    assert not anew or [p.name for p in workdir.iterdir()] == ['.lock']
    restored = read(moved)
    assert 2 <= restored.state.step < 6
    assert train(tiny_config(), moved, source) == 6


def test_a_lock_is_on_the_folder_at_the_path(tmp_path):
    workdir = tmp_path / 'x'
    with lock.opened(workdir) as held:
        assert held.why_lost() == ''
        shutil.rmtree(workdir)
        assert held.why_lost() == ''  # made anew
        assert locked_by_another(workdir)
        workdir.rename(tmp_path / 'y')
        assert held.why_lost().endswith(f'go on with --workdir {tmp_path}/y')
        assert not workdir.exists()
        workdir.symlink_to('y')
        assert held.why_lost() == ''
        workdir.unlink()
        shutil.rmtree(tmp_path / 'y')
        workdir.mkdir()
        (workdir / '.lock').touch()
        assert 'another is there now' in held.why_lost()
        assert held.moved_to() is None
        with pytest.raises(UserError, match='x is no longer the folder of this run'):
            held.check()


def test_what_a_killed_run_left_is_removed(tmp_path):
    (tmp_path / 'snapshots').mkdir()
    child = subprocess.Popen([sys.executable, '-c', ''])
    child.wait()
    name = f'.48.safetensors.{machine()}.{child.pid}.partial'
    (tmp_path / 'snapshots' / name).write_bytes(b'half')
    with lock.opened(tmp_path):
        assert not list((tmp_path / 'snapshots').iterdir())


def locked_by_another(workdir) -> bool:
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX | "
        'fcntl.LOCK_NB)'
    )
    command = [sys.executable, '-c', program, str(workdir / '.lock')]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode != 0
