"""The logs of a run outlive damaged and unwritable files."""

from __future__ import annotations

import errno
import os
import pathlib
import resource
import time

import pytest
from support.events import points, shown_steps

from jaxunet.checkpoint.refused import RefusedError
from jaxunet.config import Config
from jaxunet.training.loggers.interface import RunStart
from jaxunet.training.loggers.logs import Logs
from jaxunet.training.logs import COLUMNS, FILE, StepTable, read_metrics, read_rows


def row(step):
    return dict.fromkeys(COLUMNS, 0.5) | {'step': step}


def logs(workdir, start):
    return Logs(RunStart(Config(), workdir, start, COLUMNS[1:]), ())


def table(path, *steps):
    made = StepTable(path, COLUMNS, 0)
    made.add([row(step) for step in steps])
    return path


def steps(path):
    return [int(row['step']) for row in read_metrics(path)]


def damaged_byte(path):
    path.write_bytes(path.read_bytes().replace(b'2,0.5,', b'2,0\xff5,'))


def no_number(path):
    path.write_bytes(path.read_bytes().replace(b'2,0.5,', b'2,0:5,'))


def zeros(path):
    path.write_bytes(path.read_bytes().replace(b'2,0.5,', bytes(6)))


def no_step(path):
    path.write_bytes(path.read_bytes().replace(b'2,0.5,', '²,0.5,'.encode()))


@pytest.mark.parametrize('damage', [damaged_byte, no_number, zeros, no_step])
def test_a_damaged_row(damage, tmp_path, caplog):
    path = table(tmp_path / 'metrics.csv', 1, 2, 3)
    damage(path)
    before = path.read_bytes()
    assert steps(path) == [1, 3]
    assert '1 rows are damaged' in caplog.text
    StepTable(path, COLUMNS, 2).add([row(3)])
    assert steps(path) == [1, 3]
    assert (tmp_path / 'damaged' / 'metrics.csv').read_bytes() == before


def test_a_damaged_header(tmp_path, caplog):
    path = table(tmp_path / 'metrics.csv', 1, 2)
    before = path.read_bytes().replace(b'loss', b'lots', 1)
    path.write_bytes(before)
    StepTable(path, COLUMNS, 2).add([row(3)])
    assert "has the columns 'step, lots, " in caplog.text
    assert steps(path) == [3]
    assert (tmp_path / 'damaged' / 'metrics.csv').read_bytes() == before


def test_a_folder_in_place_of_the_table(tmp_path, caplog):
    path = tmp_path / 'metrics.csv'
    path.mkdir()
    StepTable(path, COLUMNS, 0).add([row(1)])
    assert steps(path) == [1]
    assert (tmp_path / 'damaged' / 'metrics.csv').is_dir()
    assert 'Is a directory' in caplog.text


@pytest.mark.parametrize('number', [errno.EACCES, errno.EMFILE, errno.EIO, errno.ESTALE])
def test_a_table_that_the_system_refuses_to_read_stays(number, tmp_path, monkeypatch):
    logs(tmp_path, 0).close()
    before = (tmp_path / FILE).read_bytes()

    def refuse(path):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, 'read_bytes', refuse)
        with pytest.raises(RefusedError, match=rf'{FILE}: cannot be read: {os.strerror(number)}'):
            logs(tmp_path, 0)
    assert (tmp_path / FILE).read_bytes() == before
    assert not (tmp_path / 'damaged').exists()


def test_what_is_set_aside_is_bounded(tmp_path):
    for _ in range(6):
        damaged_byte(table(tmp_path / 'metrics.csv', 1, 2))
        StepTable(tmp_path / 'metrics.csv', COLUMNS, 2)
    assert len(list((tmp_path / 'damaged').iterdir())) == 3


def test_a_row_that_was_cut_short_is_no_damage(tmp_path, caplog):
    path = table(tmp_path / 'metrics.csv', 1, 2)
    path.write_bytes(path.read_bytes()[:-20])
    StepTable(path, COLUMNS, 2)
    assert steps(path) == [1]
    assert not caplog.text
    assert not (tmp_path / 'damaged').exists()


def test_columns_that_only_some_runs_have(tmp_path):
    path = tmp_path / 'metrics.csv'
    StepTable(path, ('step', 'a', 'b'), 0).add([{'step': 1, 'a': 2, 'b': 3}])
    StepTable(path, ('step', 'a'), 1, optional=('b',)).add([{'step': 2, 'a': 4}])
    assert read_rows(path, ('step', 'a', 'b')) == [
        {'step': '1', 'a': '2', 'b': '3'},
        {'step': '2', 'a': '4', 'b': ''},
    ]
    assert not (tmp_path / 'damaged').exists()


def test_nothing_of_a_full_disk_stops_the_logs(tmp_path, caplog):
    """Not even the thread of TensorBoard, which the training loop would wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        written = logs(tmp_path, 0)
        for step in range(1, 30):
            written.row(row(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, warnings  # one of metrics.csv, one of TensorBoard
    assert all('the run goes on' in warning for warning in warnings)
    written.close()
    assert steps(tmp_path / 'metrics.csv') == list(range(1, 30))
    written.row(row(30))
    assert steps(tmp_path / 'metrics.csv') == list(range(1, 31))
    (events,) = (tmp_path / 'tensorboard').iterdir()
    assert [step for step, values in points(events) if values] == list(range(1, 31))


@pytest.mark.parametrize('start', [0, 2])
def test_tensorboard_drops_the_steps_that_are_run_again(start, tmp_path, monkeypatch):
    """A run that was killed before its first checkpoint starts from step 0 again."""
    for second, begin in ((1, 0), (2, start)):  # the name of a file has the second of its start
        monkeypatch.setattr(time, 'time', lambda second=second: float(second))
        written = logs(tmp_path, begin)
        for step in range(begin + 1, 6 - second):
            written.row(row(step))
        written.close()
    assert steps(tmp_path / 'metrics.csv') == [1, 2, 3]
    assert shown_steps(tmp_path / 'tensorboard') == [1, 2, 3]
