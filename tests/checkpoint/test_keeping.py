"""Checkpoints that are kept and deleted."""

from __future__ import annotations

import errno
import os
import pathlib

import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint import store
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints, CheckpointWriteError


@pytest.fixture(scope='module')
def state():
    """A state of few arrays, which is written at once."""
    weights = {'kernel': np.ones(3, np.float32)}
    return fresh_state(tiny_config()).replace(params=weights, ema={}, opt_state=())


@pytest.mark.parametrize(
    ('options', 'kept'),
    [
        ({'keep': 2}, [5, 6]),
        ({'keep': 1, 'keep_every': 2}, [2, 4, 6]),
        ({'keep': 1, 'keep_best': 1}, [3, 6]),
        ({'keep': 1, 'keep_best': 2}, [2, 3, 6]),
        ({'keep': 2, 'keep_every': 4, 'keep_best': 1}, [3, 4, 5, 6]),
    ],
)
def test_a_checkpoint_stays_for_one_of_three_reasons(
    options: dict[str, int], kept: list[int], state, tmp_path: pathlib.Path
) -> None:
    """Steps 2 and 3 score best; those without a score are no candidates."""
    scores: dict[int, float] = {}
    checkpoints = Checkpoints(tmp_path, scores=lambda: scores, **options)
    for step in range(1, 7):
        checkpoints.save(step, state, tiny_config())
        checkpoints.wait()
        scores |= {2: {2: 0.5}, 3: {3: 0.9}, 4: {4: -1.0}}.get(step, {})  # evaluated once saved
    checkpoints.close()
    assert sorted(int(p.name) for p in (tmp_path / 'checkpoints').iterdir()) == kept


def test_a_checkpoint_is_on_the_disk_before_an_older_one_is_removed(
    state, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power leaves files empty that were never flushed."""
    events: list[pathlib.Path | int] = []
    flush, remove = os.fsync, store.remove_unread

    def flushed(descriptor: int) -> None:
        events.append(pathlib.Path(f'/proc/self/fd/{descriptor}').resolve())
        flush(descriptor)

    def removed(folder: pathlib.Path) -> None:
        events.append(int(folder.name))
        remove(folder)

    monkeypatch.setattr(os, 'fsync', flushed)
    monkeypatch.setattr(store, 'remove_unread', removed)
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(step, state, tiny_config())
    checkpoints.close()
    folder = tmp_path.resolve() / 'checkpoints'
    on_disk = {*folder.glob('2/**/*'), folder / '2', folder}
    assert len(on_disk) > 5
    assert on_disk <= {*events[: events.index(1)]}


def test_a_disk_that_fails_to_flush_keeps_the_older_checkpoint(
    state, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota or a network may refuse what `write` took."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, tiny_config())
    checkpoints.wait()

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, 'fsync', full)
    checkpoints.save(2, state, tiny_config())
    with pytest.raises(CheckpointWriteError, match=r'quota exceeded.*last good one is step 1'):
        checkpoints.wait()
    checkpoints.close()
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['1']
    assert [p.name for p in (tmp_path / 'damaged').iterdir()] == ['2']
