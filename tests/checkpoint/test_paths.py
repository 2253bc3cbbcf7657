"""Checkpoints below any path, and read back before an older one is removed."""

from __future__ import annotations

import errno
import logging
import os
import pathlib

import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint import store
from jaxunet.checkpoint.newest import newest_config
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints, CheckpointWriteError, read
from jaxunet.runtime import plain_path
from jaxunet.runtime.errors import UserError

CONFIG = tiny_config()
NAMES = ('proj [1]', '[!a]', 'a*b', 'what?', 'back\\slash', '#%41 {x}', 'line\nbreak', '\udcff')


@pytest.fixture(scope='module')
def state():
    return fresh_state(CONFIG)


def save(checkpoints, state, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, state.replace(step=np.int32(step)), CONFIG)
        checkpoints.wait()


def saved(workdir: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / 'checkpoints').iterdir())


@pytest.mark.parametrize('name', NAMES)
def test_a_run_below_any_path(name: str, state, tmp_path) -> None:
    workdir = tmp_path / name / 'run'
    workdir.mkdir(parents=True)
    checkpoints = Checkpoints(workdir, keep=1)
    save(checkpoints, state, 1, 2)
    checkpoints.close()
    assert saved(workdir) == [2]
    assert read(workdir).state.step == 2
    assert read(workdir / 'checkpoints/2').config == newest_config(workdir) == CONFIG


def test_a_run_whose_folder_got_such_a_name(state, tmp_path) -> None:
    """Every kept checkpoint can be read, older ones and new ones."""
    checkpoints = Checkpoints(tmp_path / 'run', keep=2)
    save(checkpoints, state, 1, 2)
    checkpoints.close()
    workdir = (tmp_path / 'run').rename(tmp_path / 'run [old]')
    checkpoints = Checkpoints(workdir, keep=2)
    assert checkpoints.restore().state.step == 2
    save(checkpoints, state, 3)
    checkpoints.close()
    assert saved(workdir) == [2, 3]
    assert [read(workdir / f'checkpoints/{step}').state.step for step in (2, 3)] == [2, 3]


def test_a_system_without_proc_refuses_such_a_path(state, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plain_path, 'DESCRIPTORS', tmp_path / 'no proc')
    (tmp_path / 'plain').mkdir()
    checkpoints = Checkpoints(tmp_path / 'plain', keep=1)
    save(checkpoints, state, 1)
    checkpoints.close()
    assert read(tmp_path / 'plain').state.step == 1
    (tmp_path / '[1]').mkdir()
    with pytest.raises(UserError, match=r'\[1\]: expected a path without .*; rename the folder'):
        Checkpoints(tmp_path / '[1]', keep=1)


def test_an_older_checkpoint_stays_until_the_new_one_has_been_read(
    state, tmp_path, monkeypatch
) -> None:
    """The new one is damaged: it is told, and moved away."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, state, 1)
    checksum = store.checksum
    monkeypatch.setattr(store, 'checksum', lambda tree: checksum(tree) + (int(tree.step) == 2))
    checkpoints.save(2, state.replace(step=np.int32(2)), CONFIG)
    monkeypatch.setattr(store, 'checksum', checksum)
    with pytest.raises(CheckpointWriteError, match=r'checksum: .*; the last good one is step 1'):
        checkpoints.wait()
    assert checkpoints.latest() == 1
    save(checkpoints, state, 3)
    checkpoints.close()
    assert saved(tmp_path) == [3]
    assert [path.name for path in (tmp_path / 'damaged').iterdir()] == ['2']


@pytest.mark.parametrize(
    'refusal',
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        RuntimeError("can't start new thread"),
        MemoryError('no memory'),
    ],
)
def test_a_refusal_to_read_back_removes_nothing(
    refusal, state, tmp_path, monkeypatch, caplog
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, state, 1)

    def refuse(*_):
        raise refusal

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(store, 'read_state', refuse)
        save(checkpoints, state, 2)
    assert saved(tmp_path) == [1, 2]
    assert f'{refusal!s})' in caplog.text
    assert 'so no older checkpoint is removed' in caplog.text
    save(checkpoints, state, 3)
    checkpoints.close()
    assert saved(tmp_path) == [3]
