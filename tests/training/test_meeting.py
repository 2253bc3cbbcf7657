"""Processes that were started by hand meet after a death, and agree who goes on."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxunet.runtime import whole_files
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import read_json
from jaxunet.training import meeting
from jaxunet.training.meeting import CALL, FOLDER, Meeting, Place, chosen


class Crowd:
    """The processes of a run, and what they said."""

    def __init__(self, workdir, processes, wait_seconds=60.0, patience=60.0):
        self.said, self.stopped = [], threading.Event()
        self.meetings = [
            Meeting(
                workdir,
                process,
                processes,
                wait_seconds=wait_seconds,
                patience=patience,
                pause=lambda seconds: self.stopped.wait(seconds / 20),
                say=self.said.append,
            )
            for process in range(processes)
        ]

    def meet(self, *processes):
        """The places of these processes, in order; the message of the one that fails."""
        with ThreadPoolExecutor(len(processes)) as threads:
            found = [threads.submit(self.meetings[process].meet) for process in processes]
        return [str(f.exception()) if f.exception() else f.result() for f in found]


def test_all_come_again_and_again(tmp_path):
    crowd = Crowd(tmp_path, 3)
    for order in ((0, 1, 2), (2, 1, 0)):
        assert crowd.meet(*order) == [Place(process, 3) for process in order]
    assert not any('no answer' in text for text in crowd.said)


def test_those_that_are_left_go_on(tmp_path):
    """With the first of a pair alone, which no longer waits for the other."""
    crowd = Crowd(tmp_path, 2, wait_seconds=0.3)
    assert crowd.meet(0) == [Place(0, 1)]
    told = [
        'no answer from process 1 in 0.3 s (--wait_seconds)',
        'the run goes on with 1 of 2 processes: 0',
    ]
    assert crowd.said == told
    assert crowd.meet(0) == [Place(0, 1)]
    assert crowd.said == [*told, told[1]]


def test_a_number_that_does_not_divide_leaves_one_out(tmp_path):
    crowd = Crowd(tmp_path, 4, wait_seconds=2.0)
    first, second, third = crowd.meet(0, 2, 3)
    assert (first, second) == (Place(0, 2), Place(1, 2))
    assert third.startswith('process 3: the run goes on without it, with the processes 0, 2 of 4;')
    assert crowd.meet(2, 0) == [Place(1, 2), Place(0, 2)]


def test_the_most_that_divide():
    assert chosen([0], 8) == [0]
    assert chosen([6, 0, 1, 2, 3, 4, 5], 8) == [0, 1, 2, 3]
    assert chosen([0, 2, 3, 4, 5], 6) == [0, 2, 3]
    assert chosen([0, 1, 2], 3) == [0, 1, 2]


def test_process_0_tells_the_others_that_it_ends(tmp_path):
    crowd = Crowd(tmp_path, 2)
    crowd.meetings[0].end()
    assert crowd.meet(1) == [None]
    assert crowd.said[-1] == 'process 0 does not go on'


def test_a_call_is_seen_while_the_own_part_still_runs(tmp_path):
    crowd = Crowd(tmp_path, 2, wait_seconds=0.1)
    assert [meeting.is_called() for meeting in crowd.meetings] == [False, False]
    crowd.meet(0)
    assert [meeting.is_called() for meeting in crowd.meetings] == [False, True]
    crowd.meetings[0].end()
    assert not crowd.meetings[1].is_called()  # its part ends by itself


def test_the_calls_of_an_earlier_run_are_ignored(tmp_path):
    Crowd(tmp_path, 2).meetings[0].end()
    (message,) = Crowd(tmp_path, 2, patience=0.1).meet(1)
    assert message.startswith('process 1: process 0 has not called for 0.1 s')


def test_a_run_that_is_asked_to_stop(tmp_path):
    crowd = Crowd(tmp_path, 2)
    crowd.stopped.set()
    assert crowd.meet(0, 1) == [None, None]


def test_a_call_that_process_0_removes_as_it_is_read(tmp_path, monkeypatch):
    crowd = Crowd(tmp_path, 2, patience=0.1)
    crowd.meetings[0].end()

    def read(path, **options):
        path.unlink()
        return read_json(path, **options)

    monkeypatch.setattr(meeting, 'read_json', read)
    (message,) = crowd.meet(1)
    assert message.startswith('process 1: process 0 has not called')


def test_a_call_replaces_the_one_before(tmp_path, monkeypatch):
    """The others may look between any two of the steps, and the answers of before are gone."""
    crowd = Crowd(tmp_path, 2, wait_seconds=0.1)
    there = []

    def written(path):
        there.append(sorted(found.name for found in path.parent.glob('*')))
        return whole_files.written(path)

    crowd.meet(0, 1)
    monkeypatch.setattr(meeting, 'written', written)
    crowd.meet(0)
    assert there[0] == [CALL]


@pytest.mark.parametrize('content', ['{', '[]', json.dumps({'round': 7})])
def test_a_damaged_call(content, tmp_path):
    crowd = Crowd(tmp_path, 2, patience=0.1)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / CALL).write_text(content)
    with pytest.raises(UserError, match=f'{CALL}: .*remove the folder {FOLDER}'):
        crowd.meetings[1].meet()


def test_a_folder_that_cannot_be_written(tmp_path):
    crowd = Crowd(tmp_path, 2)
    (tmp_path / FOLDER).touch()
    with pytest.raises(UserError, match='cannot be written'):
        crowd.meetings[0].meet()
