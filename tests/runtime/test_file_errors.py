"""Files that the system refuses to open end a command in one line."""

from __future__ import annotations

import errno
import os
import socket

import pytest
from support.commands import ROOT, Fork, call_each
from support.tiny import flags, tiny_config

from jaxunet.checkpoint.newest import saved_steps
from jaxunet.checkpoint.snapshots import find_snapshots
from jaxunet.data.sources import open_source
from jaxunet.metrics.arrays import read_arrays
from jaxunet.runtime import distributed, rows
from jaxunet.runtime.errors import USER_ERROR, UserError
from jaxunet.runtime.file_errors import explained
from jaxunet.runtime.whole_files import check_file, written
from jaxunet.training.logs import COLUMNS, StepTable
from jaxunet.training.workdir import opened
from jaxunet.weights.files import read_classifier, read_weights

CONFIG = f'--config={ROOT}/configs/digits.py'
LONG = 'a' * 300  # longer than the name of a file may be


@pytest.mark.parametrize('name', ['file', b'file'])
@pytest.mark.parametrize(
    'number', [errno.EACCES, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EMFILE]
)
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


def test_too_many_open_files_need_no_name():
    """As of a pipe."""
    with pytest.raises(UserError, match=r'^this process: Too many open files$'), explained():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


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


# Becomes the command, in a folder that is no longer there.
GONE = """
import os, runpy, shutil, sys
sys.argv = sys.argv[1:]
shutil.rmtree(os.getcwd())
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""
REMOVED = 'the current folder was removed; change to another one (cd), and repeat'


def in_removed_folder(folder, *arguments):
    """Returns the exit code and stderr of a command."""
    folder.mkdir()
    (folder / 'gone.py').write_text(GONE)
    process = Fork(['gone', *arguments], folder=folder)
    _, error = process.communicate()
    assert 'Traceback' not in error
    return process.returncode, error


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        (['jaxunet.train', '--workdir=run'], '--workdir: run: cannot be made: No such file'),
        (['jaxunet.sample', '--checkpoint=run'], REMOVED),
        (['jaxunet.prepare_data', '--input=digits:', '--image_size=8', '--output=x.npz'], REMOVED),
        (['jaxunet.evaluate', '--samples=digits:', '--reference=digits:', '--output=x'], REMOVED),
    ],
)
def test_relative_paths_in_a_folder_that_was_removed(arguments, told, tmp_path):
    code, error = in_removed_folder(tmp_path / 'gone', *arguments)
    assert (code, error.count('error: ')) == (2, 1)
    assert told in error


def test_absolute_paths_in_a_folder_that_was_removed(tmp_path):
    arguments = ['jaxunet.train', '--dry_run', f'--workdir={tmp_path}/run']
    code, error = in_removed_folder(tmp_path / 'gone', *arguments)
    assert code == 0, error


@pytest.mark.long
def test_a_run_goes_on_in_a_folder_that_was_removed(tmp_path):
    workdir = tmp_path / 'run'
    train = ['jaxunet.train', *flags(), f'--workdir={workdir}']
    for name, extra in (('a', []), ('b', ['--config.train.steps=8', '--restarts=1'])):
        code, error = in_removed_folder(tmp_path / name, *train, *extra)
        assert code == 0, error
    assert saved_steps(workdir)[0] == 8


def test_outputs_that_are_no_files(tmp_path):
    """Nothing waits for a FIFO's reader, and no file takes the place of a device."""
    os.mkfifo(tmp_path / 'x.npz')
    os.mkfifo(tmp_path / 'x.jsonl')
    os.mkfifo(tmp_path / 'x.safetensors')
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / 'x.png'))
    named = {
        'x.npz, found a FIFO': ['prepare_data', '--input=digits:', '--image_size=8'],
        'x.jsonl, found a FIFO': ['evaluate', '--samples=digits:', '--reference=digits:'],
        'x.png, found a socket': ['sample', '--checkpoint=x'],
        'x.safetensors, found a FIFO': ['export', '--init', CONFIG],
    }
    commands = {
        told: [f'jaxunet.{name}', *options, f'--output={tmp_path}/{told.partition(",")[0]}']
        for told, (name, *options) in named.items()
    }
    for told, (code, _, error) in zip(
        commands, call_each(commands.values(), tmp_path), strict=True
    ):
        path, _, kind = told.partition(', ')
        assert code == 2
        assert f'error: --output: {tmp_path}/{path}: expected a regular file, {kind}' in error
    with pytest.raises(UserError, match='/dev/full: expected a regular file, found a device'):
        check_file('/dev/full', '--output')
    with pytest.raises(UserError, match='found a device'), written('/dev/full'):
        pass
    with pytest.raises(UserError, match='found a FIFO'):
        rows.append(tmp_path / 'x.jsonl', {})


def test_files_of_a_run_that_are_no_files(tmp_path):
    """Inputs that nothing would ever be written to."""
    for name in ('metrics.csv', '.lock', 'x.safetensors', 'x.npz'):
        os.mkfifo(tmp_path / name)
    folder = tmp_path / 'snapshots'
    folder.mkdir()
    os.mkfifo(folder / '4.safetensors')
    opens = [
        lambda: StepTable(tmp_path / 'metrics.csv', COLUMNS, 0),
        lambda: opened(tmp_path).__enter__(),
        lambda: find_snapshots(tmp_path, 10),
        lambda: read_weights(tmp_path / 'x.safetensors'),
        lambda: read_arrays(tmp_path / 'x.npz'),
        lambda: read_weights(folder / '4.safetensors'),
    ]
    for each in opens:
        with pytest.raises(UserError, match='expected a regular file, found a FIFO'):
            each()


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    """A clone without Git LFS holds such texts in place of its large files."""
    names = ('1.png', 'x.npz', 'x.zip', 'x.tar', 'x.tar.gz', 'x.bin', 'x.pt', 'x.safetensors')
    for name in names:
        text = 'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12\n'
        (tmp_path / name).write_text(text)
    opens = [
        *(
            lambda name=name: open_source(str(tmp_path / name), image_shape=(8, 8, 1))
            for name in ('', 'x.npz', 'x.zip', 'x.tar', 'x.tar.gz', 'x.bin')
        ),
        lambda: read_weights(tmp_path / 'x.bin'),
        lambda: read_weights(tmp_path / 'x.pt'),
        lambda: read_classifier(tmp_path / 'x.safetensors', tiny_config()),
        lambda: read_arrays(tmp_path / 'x.npz'),
    ]
    for each in opens:
        with pytest.raises(UserError, match=r'pointer of Git LFS .*git lfs pull'):
            each()
