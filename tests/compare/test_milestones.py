"""Runs that end at training times: they save, stop, and go on as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time

import jax
import numpy as np
import pytest
from support.no_network import no_network
from support.tiny import tiny_config

from jaxunet.checkpoint.store import checksum, read
from jaxunet.compare.milestones import Milestones, PassedError
from jaxunet.runtime.progress import progress_bar
from jaxunet.training import loop
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.preemption import Preemption


@pytest.fixture(scope='module', autouse=True)
def _no_network():
    with no_network():
        yield


CONFIG = tiny_config(
    train={'steps': 10**6, 'log_every': 2, 'sample_every': 0, 'checkpoint_every': 10**6},
    ema={'rates': (0.995, 0.5)},
    parallel={'devices': 2},
)
STEP = 0.1  # seconds that a step counts
TIMES = (0.3, 0.5, 0.8)


class Died(Exception):
    """A process that ends while it measures."""


class Seen:
    """Keeps what a run reports, and stops it.

    Args:
      calls: calls of the step after which the run is stopped.
      dies_at: the training time at which `reached` raises `Died`.
    """

    def __init__(self, calls: int = 10**9, dies_at: float = 0.0) -> None:
        self.calls, self.dies_at = calls, dies_at
        self.reports: list[tuple[int, float, dict]] = []
        self.saved, self.compiled = 0, 0

    def milestones(self, seconds=TIMES, **options):
        return Milestones(
            seconds,
            self.reached,
            **{'step_seconds': STEP, 'saves': True, **options},
            keep_on=self.keep_on,
            compiled=self.count_compiled,
            saving=self.count_saved,
        )

    def keep_on(self):
        self.calls -= 1
        return self.calls >= 0

    def reached(self, step, seconds, averages, asked):
        self.reports.append((step, seconds, jax.device_get(averages)))
        if seconds == pytest.approx(self.dies_at):
            raise Died

    def count_saved(self):
        self.saved += 1

    def count_compiled(self):
        self.compiled += 1


@pytest.fixture(scope='module')
def whole(source, tmp_path_factory):
    """A run without interruption."""
    workdir, seen = tmp_path_factory.mktemp('whole'), Seen()
    assert train(CONFIG, workdir, source, hook=seen.milestones()) == 8
    return workdir, seen


def assert_same(reports, expected):
    assert [(step, seconds) for step, seconds, _ in reports] == [
        (step, seconds) for step, seconds, _ in expected
    ]
    for (*_, mine), (*_, other) in zip(reports, expected, strict=True):
        assert mine.keys() == other.keys() == {'0.995', '0.5'}
        jax.tree.map(np.testing.assert_array_equal, mine, other)


def ending_at(steps):
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, steps=steps))


def logged(workdir):
    measured = ('images_per_second', 'step_ms')
    return [
        {name: value for name, value in row.items() if name not in measured}
        for row in read_metrics(workdir / 'metrics.csv')
    ]


def test_a_run_saves_at_its_milestones(whole):
    workdir, seen = whole
    assert [(step, seconds) for step, seconds, _ in seen.reports] == [
        (3, pytest.approx(0.3)),
        (5, pytest.approx(0.5)),
        (8, pytest.approx(0.8)),
    ]
    assert (seen.saved, seen.compiled) == (3, 1)
    assert read(workdir).facts.milestone == 0.8


def test_the_speed_of_the_bar_leaves_out_compiling(source, tmp_path, monkeypatch):
    bars, compiled = [], []

    def noted(**options):
        bars.append(progress_bar(**options))
        return bars[-1]

    monkeypatch.setattr(loop, 'progress_bar', noted)
    milestones = Seen().milestones()
    milestones = dataclasses.replace(milestones, compiled=lambda: compiled.append(time.time()))
    train(CONFIG, tmp_path, source, hook=milestones)
    assert bars[0].start_t >= compiled[0]


def test_an_interrupted_run_ends_as_an_undisturbed_one(whole, source, tmp_path, capsys):
    """Bit for bit: it is stopped on the way, dies while it reports a milestone, and once more."""
    first = Seen(calls=1)
    assert train(CONFIG, tmp_path, source, hook=first.milestones()) == 1
    assert (first.reports, first.saved) == ([], 1)
    bar = capsys.readouterr().err
    assert '1step' in bar
    assert str(CONFIG.train.steps) not in bar  # times end the run
    assert read(tmp_path).facts.milestone is None
    second = Seen(dies_at=0.5)
    with pytest.raises(Died):
        train(CONFIG, tmp_path, source, hook=second.milestones())
    third = Seen(calls=1)
    assert train(CONFIG, tmp_path, source, hook=third.milestones(TIMES[1:])) == 6
    last = Seen()
    train(CONFIG, tmp_path, source, hook=last.milestones(TIMES[2:]))
    workdir, seen = whole
    assert_same([second.reports[0], *third.reports, *last.reports], seen.reports)
    assert_same(second.reports[1:], seen.reports[1:2])
    assert checksum(read(tmp_path).state) == checksum(read(workdir).state)
    assert logged(tmp_path) == logged(workdir)


def test_a_milestone_at_the_last_step_is_reported_again(source, tmp_path):
    """Not trained for again."""
    config = ending_at(8)
    for seen in (Seen(dies_at=0.8), Seen()):
        with contextlib.suppress(Died):
            train(config, tmp_path, source, hook=seen.milestones((0.8,)))
        assert [step for step, _, _ in seen.reports] == [8]
        assert read(tmp_path).facts.milestone == 0.8


@pytest.mark.parametrize('steps', [2, 10**6])
def test_nothing_is_saved_without_saves(steps, source, tmp_path):
    config = ending_at(steps)
    train(config, tmp_path, source, hook=Seen().milestones((2 * STEP,), saves=False))
    assert not list((tmp_path / 'checkpoints').iterdir())


def test_a_run_that_has_passed_a_milestone_says_so(source, tmp_path):
    train(CONFIG, tmp_path, source, hook=Seen(calls=4).milestones((0.8,)))
    with pytest.raises(PassedError, match=r'is of 0\.4 s of training, .* the weights of 0\.3 s'):
        train(CONFIG, tmp_path, source, hook=Seen().milestones())


def test_a_run_that_stops_just_after_a_milestone_keeps_it(source, tmp_path):
    """The clock runs on until the queued steps are done, and may pass a milestone meanwhile."""

    seen = Seen(calls=1)

    def keep_on():
        if not (more := seen.keep_on()):
            time.sleep(3.5)
        return more

    milestones = seen.milestones((3.0, 60.0), step_seconds=0.0)
    milestones = dataclasses.replace(milestones, keep_on=keep_on)
    step = train(CONFIG, tmp_path, source, hook=milestones)
    assert step == 1
    assert (seen.reports, read(tmp_path).facts.milestone) == ([], 3.0)
    again = dataclasses.replace(milestones, keep_on=lambda: False)
    assert train(CONFIG, tmp_path, source, hook=again) == step
    assert [(reported, seconds >= 3.0) for reported, seconds, _ in seen.reports] == [(step, True)]


def test_milestones_end_a_run(source, tmp_path):
    """They come at their times by the clock, in order."""
    seen = []

    def reached(step, seconds, averages, asked):
        seen.append((step, seconds, averages['0.995']))
        time.sleep(0.3)

    step = train(CONFIG, tmp_path, source, hook=Milestones((0.1, 0.2, 0.3), reached))
    assert [s for s, _, _ in seen] == sorted({s for s, _, _ in seen})
    assert step == seen[-1][0]
    assert all(
        0 <= seconds - wanted < 3
        for (_, seconds, _), wanted in zip(seen, (0.1, 0.2, 0.3), strict=True)
    )
    kernels = [params['conv_in']['kernel'] for _, _, params in seen]
    assert not np.array_equal(kernels[0], kernels[2])


@pytest.mark.parametrize('saves', [False, True])
def test_a_signal_ends_a_run_with_milestones(saves, source, tmp_path, capfd):
    seen = []

    def reached(step, seconds, averages, asked):
        seen.append(step)
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()

    milestones = Milestones((STEP, 100.0), reached, step_seconds=STEP, saves=saves)
    step = train(CONFIG, tmp_path, source, hook=milestones, caller=Preemption())
    assert seen == [step]
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == [str(step)] * saves
    assert ('resumes from there' in ''.join(capfd.readouterr())) == saves
