"""One flipped bit anywhere in a checkpoint: the one before it is used, or nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import threading

import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint import damaged
from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.content import OtherVersionError
from jaxunet.checkpoint.damaged import set_aside
from jaxunet.checkpoint.meta import RunFacts
from jaxunet.checkpoint.newest import newest_config
from jaxunet.checkpoint.refused import RefusedError, raise_if_whole
from jaxunet.checkpoint.state import fresh_state
from jaxunet.runtime.errors import UserError
from jaxunet.training.rollback import TooManySkippedError, last_good

FACTS = RunFacts(1.5, ('cow', 'bull'), rollbacks=2, milestone=1.25, images=9)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A run with checkpoints of the steps 1 and 2."""
    workdir, config = tmp_path_factory.mktemp('saved'), tiny_config()
    state, checkpoints = fresh_state(config), checkpoint.Checkpoints(workdir, keep=3)
    for step in (1, 2):
        checkpoints.save(step, state.replace(step=np.int32(step)), config, FACTS)
    checkpoints.wait()
    checkpoints.close()
    return workdir


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / 'run')


def restore(run):
    checkpoints = checkpoint.Checkpoints(run, keep=3)
    try:
        return checkpoints.restore()
    finally:
        checkpoints.close()


def replace(path, old, new):
    before = path.read_bytes()
    assert before.count(old) >= 1
    assert len(old) == len(new)
    path.write_bytes(before.replace(old, new, 1))


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize(
    ('file', 'old', 'new'),
    [
        ('meta/metadata', b'attention_res', b'attentyon_res'),
        ('meta/metadata', b'class_names', b'clasr_names'),
        ('meta/metadata', b'"seconds": 1.5', b'"seconds": 0.5'),
        ('meta/metadata', b'"seed": 0', b'"seed": 1'),
        ('meta/metadata', b'"config"', b'"config\xff'),
        ('state/_METADATA', b'"key": "params"', b'"key": "pqrams"'),
        ('state/_METADATA', b'"key": "timesteps"', b'"key": "timesteqs"'),
    ],
)
def test_the_checkpoint_before_a_damaged_one(file, old, new, run, caplog):
    replace(run / 'checkpoints/2' / file, old, new)
    restored = restore(run)
    assert (restored.state.step, restored.facts) == (1, FACTS)
    assert newest_config(run) == restored.config == tiny_config()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
    assert warning.startswith(f'damaged checkpoint {run}/checkpoints/2: using ')
    assert [p.name for p in (run / 'damaged').iterdir()] == ['2']


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_nothing_is_moved_if_no_checkpoint_can_be_read(run):
    for step in (1, 2):
        replace(run / f'checkpoints/{step}/meta/metadata', b'"seed": 0', b'"seed": 1')
    with pytest.raises(UserError, match=r'no readable checkpoint:\n.*checksum of meta') as error:
        restore(run)
    assert str(error.value).endswith('\nTo start over, choose another --workdir.')
    assert not (run / 'damaged').exists()


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize(
    ('path', 'advice'),
    [
        ('.', 'Give another run.'),
        ('checkpoints/2', "Give the run's workdir or another of its checkpoints."),
    ],
)
def test_other_commands_than_training_have_their_own_advice(path, advice, run):
    for step in (1, 2):
        replace(run / f'checkpoints/{step}/meta/metadata', b'"seed": 0', b'"seed": 1')
    with pytest.raises(UserError, match=r'no readable checkpoint:\n') as error:
        checkpoint.read(run / path)
    assert str(error.value).splitlines()[-1] == advice


def test_metadata_of_earlier_versions_have_no_checksum(run):
    for step in (1, 2):
        path = run / f'checkpoints/{step}/meta/metadata'
        meta = json.loads(path.read_text())
        del meta['meta_checksum']
        path.write_text(json.dumps(meta))
    assert restore(run).state.step == 2
    replace(path, b'attention_res', b'attentyon_res')
    assert restore(run).state.step == 1


def test_a_field_of_a_later_version_is_no_damage(run):
    """Its checksum is right, so the run is not continued from an earlier step."""
    path = run / 'checkpoints/2/meta/metadata'
    meta = json.loads(path.read_text())
    del meta['meta_checksum']
    meta['config']['model']['depth'] = 3
    path.write_text(json.dumps(checkpoint.sealed(meta)))
    with pytest.raises(OtherVersionError, match=r'checkpoints/2: .*model.depth'):
        restore(run)
    assert not (run / 'damaged').exists()


def test_damaged_checkpoints_are_bounded(tmp_path):
    for step in range(10, 16):
        folder = tmp_path / 'checkpoints' / str(step)
        folder.mkdir(parents=True)
        set_aside(tmp_path, folder)
    (tmp_path / 'metrics.csv').write_text('?')
    set_aside(tmp_path, tmp_path / 'metrics.csv')
    names = sorted(p.name for p in (tmp_path / damaged.FOLDER).iterdir())
    assert names == ['13', '14', '15', 'metrics.csv']


def test_damage_is_set_aside_on_another_file_system(run, monkeypatch):
    """The checkpoints may be a link to another disk, to which nothing can be renamed."""

    def refuse(*_, **__):
        raise OSError(errno.EXDEV, 'Invalid cross-device link')

    replace(run / 'checkpoints/2/meta/metadata', b'"seed": 0', b'"seed": 1')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'rename', refuse)
        assert restore(run).state.step == 1
    assert [p.name for p in (run / 'checkpoints').iterdir()] == ['1']
    assert (run / 'damaged/2/meta/metadata').is_file()


def test_a_lack_of_memory_is_no_damage(run, monkeypatch):
    read = checkpoint.Checkpoints._read

    def fail(self, step):
        if step == 2:
            raise MemoryError
        return read(self, step)

    monkeypatch.setattr(checkpoint.Checkpoints, '_read', fail)
    with pytest.raises(MemoryError):
        restore(run)
    assert not (run / 'damaged').exists()


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize(
    ('file', 'target', 'reason'),
    [
        ('meta/metadata', '/proc/self/mem', 'Input/output error'),
        ('state/_METADATA', '/proc/self/mem', 'Input/output error'),
        ('state/manifest.ocdbt', 'manifest.ocdbt', 'Too many levels of symbolic links'),
    ],
)
def test_a_file_that_the_system_refuses_to_read_is_no_damage(file, target, reason, run):
    path = run / 'checkpoints/2' / file
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(RefusedError, match=f'checkpoints/2: cannot be read: {reason}. The'):
        restore(run)
    assert not (run / 'damaged').exists()


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('number', range(3))
@pytest.mark.parametrize('every', [False, True])
def test_a_thread_that_cannot_start_is_no_damage(number, every, run, monkeypatch):
    """As a container's limit of processes: one start fails, or all from some moment on."""
    checkpoints, counted = checkpoint.Checkpoints(run, keep=3), itertools.count()
    start = threading.Thread.start

    def refuse(thread):
        count = next(counted)
        if count == number or (every and count > number):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, 'start', refuse)
        with contextlib.suppress(RefusedError):
            assert checkpoints.restore().state.step == 2
            assert next(counted) <= number  # so many threads are not needed
    checkpoints.close()
    assert not (run / 'damaged').exists()
    assert restore(run).state.step == 2


@pytest.mark.parametrize(
    ('error', 'damage'),
    [
        (RuntimeError('cannot schedule new futures after shutdown'), False),
        (ValueError('RESOURCE_EXHAUSTED: Error reading local file'), False),
        (ValueError('DATA_LOSS: CRC-32C checksum verification failed'), True),
        (ValueError('NOT_FOUND: Error opening "zarr" driver'), True),
        (json.JSONDecodeError('Expecting value', '', 0), True),
        (KeyError('key_type'), True),
        (TimeoutError(), False),
        (OSError(errno.ESTALE, 'Stale file handle'), False),
    ],
)
def test_damage_is_proved_and_everything_else_is_a_refusal(error, damage, tmp_path):
    """Also if it is the cause of another error."""
    outer = UserError('cannot be read')
    outer.__context__ = error
    for raised in (error, outer):
        if damage:
            raise_if_whole(tmp_path, raised)
        else:
            with pytest.raises(RefusedError):
                raise_if_whole(tmp_path, raised)


def test_a_rollback_does_not_pass_over_a_refused_checkpoint(run, monkeypatch):
    """The checkpoints after the one that it goes back to are moved away."""
    read = checkpoint.Checkpoints._read

    def refuse(self, step):
        if step == 2:
            raise OSError(errno.EIO, 'Input/output error')
        return read(self, step)

    monkeypatch.setattr(checkpoint.Checkpoints, '_read', refuse)
    checkpoints = checkpoint.Checkpoints(run, keep=3)
    with pytest.raises(RefusedError, match='Input/output error'):
        last_good(checkpoints, TooManySkippedError(tiny_config(), 5, 3, 2, 0))
    checkpoints.close()


def test_a_file_that_is_missing_is_damage(run):
    (run / 'checkpoints/2/meta/metadata').unlink()
    assert restore(run).state.step == 1
    assert [p.name for p in (run / 'damaged').iterdir()] == ['2']
