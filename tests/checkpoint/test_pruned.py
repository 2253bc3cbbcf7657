"""Readers beside a run that removes its older checkpoints."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.keeping import reading, remove_unread
from jaxunet.checkpoint.newest import newest_config, read_meta
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints, read
from jaxunet.runtime.errors import UserError

CONFIG = tiny_config()


@pytest.fixture(scope='module')
def state():
    return fresh_state(CONFIG)


@pytest.fixture
def run(state, tmp_path):
    """A run with checkpoint 1, and function that replaces the newest checkpoint by a newer one."""
    (tmp_path / 'run').mkdir()
    checkpoints = Checkpoints(tmp_path / 'run', keep=1)
    checkpoints.save(1, state.replace(step=np.int32(1)), CONFIG)
    checkpoints.wait()
    checkpoints.close()
    return tmp_path / 'run'


def test_readers_beside_a_run_that_keeps_one_checkpoint(state, tmp_path) -> None:
    checkpoints, stop = Checkpoints(tmp_path, keep=1), threading.Event()
    checkpoints.save(1, state.replace(step=np.int32(1)), CONFIG)
    checkpoints.wait()

    def write() -> None:
        step = 1
        while not stop.is_set():
            step += 1
            checkpoints.save(step, state.replace(step=np.int32(step)), CONFIG)
            checkpoints.wait()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        steps = [int(read(tmp_path).state.step) for _ in range(8)]
    finally:
        stop.set()
        writer.join()
        checkpoints.close()
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]
    assert not (tmp_path / 'damaged').exists()


def test_checkpoints_are_listed_again(run, monkeypatch) -> None:
    """The run has replaced its only checkpoint after it was listed."""
    restore = Checkpoints._read

    def replace_first(self, step):
        if step == 1 and (run / 'checkpoints/1').exists():
            (run / 'checkpoints/1').rename(run / 'checkpoints/2')
        return restore(self, step)

    monkeypatch.setattr(Checkpoints, '_read', replace_first)
    assert read(run).config == CONFIG
    shutil.rmtree(run / 'checkpoints/2')
    with pytest.raises(UserError, match='no finished checkpoint in it yet'):
        read(run)


def test_the_config_of_a_run_is_looked_for_again(run, monkeypatch) -> None:
    def replace_first(folder):
        if (run / 'checkpoints/1').exists():
            (run / 'checkpoints/1').rename(run / 'checkpoints/2')
        return read_meta(folder)

    monkeypatch.setattr('jaxunet.checkpoint.newest.read_meta', replace_first)
    assert newest_config(run) == CONFIG


def test_a_checkpoint_stays_while_it_is_read(run) -> None:
    folder = run / 'checkpoints/1'
    with reading(folder), reading(folder):
        remove_unread(folder)
        assert (folder / 'meta/metadata').is_file()
    remove_unread(folder)
    remove_unread(folder)  # it is gone
    assert not folder.exists()


def test_a_named_checkpoint_that_was_removed(run) -> None:
    checkpoints = Checkpoints(run, keep=1, read_only=True)
    with pytest.raises(UserError, match=r'no readable checkpoint:\n.*/9: FileNotFoundError'):
        checkpoints.restore(9)
