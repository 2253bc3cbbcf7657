"""Averages of any width from the snapshots of a run."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import shutil
import unittest.mock
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from support.no_network import no_network
from support.tiny import tiny_config

from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.power_average import exponent
from jaxunet.checkpoint.snapshots import SnapshotWriter, find_snapshots, spacing
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints, checksum, read
from jaxunet.config import Config
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.whole_files import machine
from jaxunet.training.loop import train
from jaxunet.training.session import Session
from jaxunet.training.step import Metrics


@pytest.fixture(scope='module', autouse=True)
def _no_network() -> Iterator[None]:
    with no_network():
        yield


STEPS = 96
OTHERS = (0.03, 0.075, 0.15, 0.25)  # widths that the run does not average


def config_of(widths: tuple[float, ...], **train: int) -> Config:
    return tiny_config(
        ema={'widths': widths},
        optimizer={'learning_rate': 3e-3},
        train={'steps': STEPS, 'checkpoint_every': 32, 'log_every': 32} | train,
        parallel={'devices': 1},
    )


@pytest.fixture(scope='module')
def finished(taken) -> pathlib.Path:
    """The folder of a finished run, in which no test changes anything."""
    return taken[0]


@pytest.fixture(scope='module')
def direct(taken) -> dict[tuple[int, float], np.ndarray]:
    """Averages by step and width, updated at every step of the run."""
    return taken[1]


@pytest.fixture(scope='module')
def taken(source, tmp_path_factory) -> tuple[pathlib.Path, dict[tuple[int, float], np.ndarray]]:
    workdir, call = tmp_path_factory.mktemp('run'), Session.call
    averages = dict.fromkeys((0.10, *OTHERS), 0.0)
    kept, steps = {}, itertools.count(1)

    def call_and_average(session: Session, *arguments: object, **options: object) -> Metrics:
        metrics, step = call(session, *arguments, **options), next(steps)
        weights = flat(session.parallel.fetch(session.state.params))
        for width in averages:
            decay = (1 - 1 / step) ** (exponent(width) + 1)
            averages[width] = decay * averages[width] + (1 - decay) * weights
            kept[step, width] = averages[width]
        return metrics

    with unittest.mock.patch.object(Session, 'call', call_and_average):
        assert train(config_of((0.05, 0.10)), workdir, source) == STEPS
    assert len(kept) == STEPS * len(averages)
    return workdir, kept


@pytest.fixture
def run(finished, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(finished, tmp_path / 'run'))


def flat(tree: Params) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


def error(found: Params, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(flat(found) - wanted) / np.linalg.norm(wanted))


def snapshot_files(workdir: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (workdir / 'snapshots').iterdir()}


@pytest.mark.long
def test_a_run_keeps_32_snapshots_in_16_bits(finished) -> None:
    found = find_snapshots(finished, STEPS)
    assert [(s.step, s.updates) for s in found] == [(3 * i, 3 * i) for i in range(1, 33)]
    assert {(s.widths, s.dtype) for s in found} == {((0.05, 0.1), 'float16')}
    state = read(finished).state
    parameters = len(flat(state.params))
    assert found[-1].path.stat().st_size < 2 * 2 * parameters + 20_000
    last = found[-1].read()
    for name, width in (('width_0.05', 0.05), ('width_0.1', 0.1)):
        for got, wanted in zip(last[width], jax.tree.leaves(state.ema[name]), strict=True):
            np.testing.assert_array_equal(got, wanted.astype(np.float16))


def test_others_may_read_a_snapshot_if_the_umask_lets_them(finished) -> None:
    modes = {path.stat().st_mode for path in (finished / 'snapshots').iterdir()}
    assert modes == {(finished / 'metrics.csv').stat().st_mode}


def test_any_width_is_the_directly_averaged_one(finished, direct) -> None:
    state = read(finished).state
    assert error(state.ema['width_0.1'], direct[STEPS, 0.10]) <= 1e-5
    for width in OTHERS:
        model = load_model(str(finished), ema=str(width))
        wanted = direct[STEPS, width]
        assert error(model.params, wanted) <= 1e-3
        # The averages differ by far more than that.
        assert min(error(state.ema[name], wanted) for name in ('width_0.05', 'width_0.1')) > 5e-3
        assert f'the average of width {width}, from 32 snapshots' in model.note
    kept = load_model(str(finished), ema='0.10')
    assert checksum(kept.params) == checksum(state.ema['width_0.1'])
    assert kept.note.endswith('the average of width 0.1, as trained')


def test_an_average_is_of_the_checkpoint_that_is_named(finished, direct) -> None:
    """Later snapshots play no part."""
    model = load_model(str(finished / 'checkpoints' / '64'), ema='0.075')
    assert error(model.params, direct[64, 0.075]) <= 1e-3
    assert 'from 21 snapshots' in model.note


def test_a_resumed_run_has_the_snapshots_of_an_uninterrupted_one(run, source) -> None:
    wanted = snapshot_files(run)
    for step in (64, 96):
        shutil.rmtree(run / 'checkpoints' / str(step))
    for stale in ('65', '66'):  # beside and in place of one that is written again
        (run / 'snapshots' / f'{stale}.safetensors').write_bytes(b'of steps that are taken again')
    assert train(config_of((0.05, 0.10)), run, source) == STEPS
    assert snapshot_files(run) == wanted


def test_skipped_steps_do_not_count_as_updates(tmp_path) -> None:
    config = config_of((0.05,))
    writer = SnapshotWriter(tmp_path, config, start=0)
    tree = {'a': np.array([1.0, 1e5], np.float32)}
    assert writer.write(3, 0, {'width_0.05': tree}) == ''
    assert writer.write(6, 2, {'width_0.05': tree}) == ''
    assert writer.wait() == ''
    writer.close()
    (found,) = find_snapshots(tmp_path, 9)
    assert (found.step, found.updates) == (6, 2)
    assert found.dtype == 'float32'  # 1e5 is beyond float16
    np.testing.assert_array_equal(found.read()[0.05][0], tree['a'])


def test_a_snapshot_that_cannot_be_written_is_told(tmp_path) -> None:
    (tmp_path / 'snapshots').write_text('a file is in the way')
    writer = SnapshotWriter(tmp_path, config_of((0.05,)), start=0)
    writer.write(3, 3, {'width_0.05': {'a': np.ones(2, np.float32)}})
    warning = writer.wait()
    writer.close()
    assert 'could not be written' in warning
    assert 'less exact' in warning


def test_spacing() -> None:
    assert spacing(config_of((0.05,), steps=1000), 1) == 32
    assert spacing(config_of((0.05,), steps=1000), 20) == 40
    assert spacing(config_of((0.05,)).replace(ema={'snapshot_every': 50}), 10) == 50
    assert spacing(config_of(()), 1) == 0


@pytest.mark.parametrize(
    ('ema', 'message'),
    [
        (
            '0.01',
            r'the 32 snapshots up to step 96 do not allow width 0.01, .* 0.02\d to 0.2',
        ),
        ('0.28', r'do not allow width 0.28'),
        ('0.3', r'expected 0.995 \(a rate\), a width below 0.2887, or none, found .0.3.'),
        ('0.9', r'found .0.9.'),
        ('nan', r'found .nan.'),
        ('wide', r'found .wide.'),
    ],
)
def test_averages_that_the_run_does_not_have(ema: str, message: str, finished) -> None:
    with pytest.raises(UserError, match=r'^--ema: .*' + message):
        load_model(str(finished), ema=ema)


def test_a_run_with_few_or_no_snapshots(run) -> None:
    files = sorted((run / 'snapshots').iterdir(), key=lambda path: int(path.stem))
    for path in files[:-1]:
        path.unlink()
    with pytest.raises(UserError, match=r'the 1 snapshots? up to .* expected .*0\.05.* and '):
        load_model(str(run), ema='0.07')
    files[-1].unlink()
    with pytest.raises(UserError, match=r'has none up to step 96; .* only the widths 0.05, 0.1'):
        load_model(str(run), ema='0.07')
    assert load_model(str(run), ema='0.05').note.endswith('as trained')


def damage_payload(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 0xFF
    path.write_bytes(data)


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: pathlib.Path) -> None:
    path.write_bytes(b'not a snapshot')


def rewrite(path: pathlib.Path, **changes: object) -> None:
    """Changes the metadata, but not their checksum; None removes a field."""
    with safetensors.safe_open(path, framework='numpy') as file:
        metadata = json.loads(file.metadata()['snapshot']) | changes
    metadata = {name: value for name, value in metadata.items() if value is not None}
    arrays = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(arrays, path, {'snapshot': json.dumps(metadata)})


def halve_updates(path: pathlib.Path) -> None:
    rewrite(path, updates=24)


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        ({'widths': [-1, 0.1]}, r'expected widths below 0.2887, found \[-1, 0.1\]'),
        ({'widths': [0.05, float('inf')]}, None),
        ({'widths': [0.1, 0.1]}, r'expected distinct widths, found \[0.1, 0.1\]'),
        ({'widths': []}, 'expected distinct widths'),
        ({'widths': [True, 0.1]}, 'expected widths below'),
        ({'updates': 49}, 'expected at most 48 updates, found 49'),
        ({'updates': -1}, 'expected at most 48 updates, found -1'),
    ],
)
def test_metadata_without_a_checksum_are_checked_by_their_values(changes, reason, run) -> None:
    """Snapshots of earlier versions have none."""
    path = run / 'snapshots' / '48.safetensors'
    rewrite(path, meta_checksum=None)
    assert len(find_snapshots(run, STEPS)) == 32
    rewrite(path, **changes)
    with pytest.raises(UserError, match=reason or r'48\.safetensors: snapshot: expected a JSON'):
        find_snapshots(run, STEPS)


def test_a_snapshot_that_the_system_refuses_to_read_is_not_called_damaged(run) -> None:
    path = run / 'snapshots' / '48.safetensors'
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(UserError, match=r'48\.safetensors: cannot be read: Too many levels of'):
        load_model(str(run), ema='0.07')


def test_only_our_own_temporary_file_is_beside_a_snapshot(tmp_path, monkeypatch) -> None:
    """A later run removes it by its name after a kill."""
    found = []
    monkeypatch.setattr(
        os, 'fsync', lambda _: found.extend(p.name for p in (tmp_path / 'snapshots').iterdir())
    )
    writer = SnapshotWriter(tmp_path, config_of((0.05,)), start=0)
    writer.write(3, 3, {'width_0.05': {'a': np.ones(2, np.float32)}})
    writer.wait()
    writer.close()
    assert found == [f'.3.safetensors.{machine()}.{os.getpid()}.partial']


@pytest.mark.parametrize('damage', [damage_payload, halve_updates, truncate, garble])
def test_a_damaged_snapshot_is_named(damage, run) -> None:
    path = run / 'snapshots' / '48.safetensors'
    damage(path)
    with pytest.raises(UserError, match=r'48\.safetensors: damaged snapshot .*move it away'):
        load_model(str(run), ema='0.07')
    path.unlink()
    assert 'from 31 snapshots' in load_model(str(run), ema='0.07').note


def test_runs_without_widths_say_so(tmp_path, source) -> None:
    config = config_of(())
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(0, fresh_state(config), config)
    checkpoints.close()
    with pytest.raises(UserError, match=r'0.995 or none, found .0.10.; a width needs a run that'):
        load_model(str(tmp_path), ema='0.10')
    with pytest.raises(UserError, match=r'ema.widths: .* -> '):
        train(config_of((0.05,), steps=4), tmp_path, source)
