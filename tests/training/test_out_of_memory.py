"""A run whose device has no memory left says what to lower, and loses nothing that it still has."""

from __future__ import annotations

import pytest
from support.full_memory import exhaust, exhausting
from support.tiny import tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.data import pipeline
from jaxunet.data.sources import open_images
from jaxunet.runtime import beside_steps
from jaxunet.runtime.out_of_memory import OutOfMemoryError
from jaxunet.sampling.generator import Generator
from jaxunet.training.held_out import HeldOutLoss
from jaxunet.training.loop import train
from jaxunet.training.session import Session

pytestmark = pytest.mark.usefixtures('counted_steps')

FULL = r': the device has no memory left \(RESOURCE_EXHAUSTED: .*\); '


def run(workdir, mode='jit', **changed):
    """Trains six steps, and saves none of them by itself but the last."""
    config = tiny_config(
        parallel={'mode': mode, 'devices': 2},
        data={'holdout': 8},
        train={'checkpoint_every': 100} | changed,
    )
    return train(config, workdir, open_images(config))


@pytest.mark.parametrize('mode', ['jit', pytest.param('pmap', marks=pytest.mark.long)])
def test_samples_that_do_not_fit(mode, tmp_path, monkeypatch):
    """The run goes on from the step at which it ended, and draws them then."""
    with monkeypatch.context() as patch:
        patch.setattr(Generator, '__call__', exhaust)
        with pytest.raises(OutOfMemoryError, match=f'^drawing samples{FULL}lower train.sample_c'):
            run(tmp_path, mode, sample_every=3)
    assert int(checkpoint.read(tmp_path).state.step) == 3
    assert run(tmp_path, mode, sample_every=3) == 6
    assert len(list((tmp_path / 'samples').iterdir())) == 2


def test_a_held_out_loss_that_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(HeldOutLoss, 'measure', exhaust)
    with pytest.raises(OutOfMemoryError, match=f'^the held-out loss{FULL}raise optimizer.accumu'):
        run(tmp_path, holdout_every=3)
    assert int(checkpoint.read(tmp_path).state.step) == 3


@pytest.mark.parametrize(
    ('every', 'saved'), [(100, 'there is no checkpoint yet'), (2, 'step 2 is saved')]
)
def test_a_step_that_does_not_fit(every, saved, tmp_path, monkeypatch):
    """It has overwritten the state before it, so that only checkpoints are left."""
    call = Session.call

    def at_step_4(self, data, **options):
        at_step_4.calls += 1
        if at_step_4.calls == 4:
            self.step = exhausting(self.step)
        return call(self, data, **options)

    at_step_4.calls = 0
    with monkeypatch.context() as patch:
        patch.setattr(Session, 'call', at_step_4)
        with pytest.raises(OutOfMemoryError, match=f'^a training step{FULL}lower data.*; {saved}$'):
            run(tmp_path, checkpoint_every=every)
    assert run(tmp_path, checkpoint_every=every) == 6


def test_images_that_do_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, 'load_all', exhaust)
    with pytest.raises(OutOfMemoryError, match=f'^the images in digits:{FULL}set data.cache=strea'):
        run(tmp_path)


@pytest.mark.parametrize(
    ('program', 'every', 'what'),
    [
        (Generator, 'sample_every', 'drawing samples'),
        (HeldOutLoss, 'holdout_every', 'the held-out loss'),
    ],
)
def test_programs_that_do_not_fit_beside_the_step(program, every, what, tmp_path, monkeypatch):
    """On several GPUs they are compiled before the first step."""
    monkeypatch.setattr(beside_steps, '_several_gpus', lambda devices: len(devices) > 1)
    monkeypatch.setattr(program, 'compile', exhaust)
    with pytest.raises(OutOfMemoryError, match=f'^{what}{FULL}'):
        run(tmp_path, **{every: 3})
