"""`jaxunet.train` from Python: on arrays, by rows, from threads, and stopped at any stage."""

from __future__ import annotations

import os
import signal
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import TINY

import jaxunet
from jaxunet.api import _Thread, train, train_rows
from jaxunet.checkpoint.newest import newest_config, saved_steps
from jaxunet.data.sources import open_source
from jaxunet.runtime.background import Background
from jaxunet.training.page import FILE as PAGE
from jaxunet.training.parallel import Parallel
from jaxunet.training.saving import Saver
from jaxunet.training.session import Session

pytestmark = pytest.mark.usefixtures('shared_steps')
# The tiny network on one device, in float32, as all tests share its compiled step.
FIELDS = {k: v for k, v in TINY.items() if k != 'train'} | {
    'parallel': {'devices': 1},
    'train': TINY['train'] | {'holdout_every': 0, 'checkpoint_every': 50},
    'precision': 'float32',
    'progress': False,
}


def digits(count: int = 64) -> np.ndarray:
    return open_source('digits:', image_shape=(8, 8, 1)).load(np.arange(count))


def tiny(workdir, images=None, **changes):
    return train(digits() if images is None else images, workdir=workdir, **FIELDS | changes)


def test_arrays_of_any_form_train_the_same_model(tmp_path):
    images = digits()
    run = tiny(tmp_path / 'uint8', images, steps=2)
    again = tiny(tmp_path / 'floats', (images / 255).astype(np.float32)[..., 0], steps=2)
    np.testing.assert_array_equal(run.metrics['loss'], again.metrics['loss'])
    assert run.step == again.step == 2
    config = run.model.config
    assert (config.image_shape, config.model.num_classes) == ((8, 8, 1), 0)
    assert config.diffusion.objective == 'v'  # the recipe's choice for few images
    assert config.data.holdout == 0.05


def test_a_run_goes_on_and_tells_its_metrics(tmp_path):
    assert tiny(tmp_path, steps=2).step == 2
    run = tiny(tmp_path, steps=4)
    assert run.step == 4
    np.testing.assert_array_equal(run.metrics['step'], [1, 2, 3, 4])
    assert np.isfinite(run.metrics['loss']).all()
    assert repr(run) == f'<jaxunet run in {tmp_path}, step 4>'


@pytest.mark.usefixtures('counted_steps')
def test_fields_may_be_path_objects_and_numbers_of_numpy_and_jax(tmp_path):
    run = tiny(tmp_path / 'a', steps=np.int64(1))
    widths = {'ema': {'rates': np.array([0.9, 0.5])}}
    start = {'init_from': tmp_path / 'a', 'optimizer.learning_rate': jnp.float32(0.25)}
    fields = {k: v for k, v in FIELDS.items() if k != 'ema'} | widths | start
    train(digits(), workdir=tmp_path / 'b', steps=jnp.int32(1), **fields)
    config = newest_config(tmp_path / 'b')
    assert (run.step, config.ema.rates, config.init_from) == (1, (0.9, 0.5), str(tmp_path / 'a'))
    assert (config.train.steps, config.optimizer.learning_rate) == (1, 0.25)


def test_labels_make_a_conditional_model(tmp_path):
    names = np.array(['cat', 'dog'])[np.arange(64) % 2]
    rows = train_rows(digits(), labels=names, workdir=tmp_path, **_without_progress(steps=1))
    assert [row['step'] for row in rows] == [1]
    config = newest_config(tmp_path)
    assert (config.model.num_classes, config.model.label_dropout) == (2, 0.1)
    assert jaxunet.load(tmp_path).class_names == ('cat', 'dog')


def _without_progress(**changes):
    return {k: v for k, v in FIELDS.items() if k != 'progress'} | changes


def test_a_loop_over_rows_may_end_early(tmp_path):
    for row in train_rows(digits(), workdir=tmp_path, **_without_progress(steps=10_000)):
        assert row['loss'] > 0
        if row['step'] >= 2:
            break
    saved = saved_steps(tmp_path)
    assert 2 <= saved[0] < 10_000


def test_a_callback_may_end_a_run(tmp_path):
    thread = []

    def progress(row):
        thread.append(threading.current_thread())
        return row['step'] < 2

    (tmp_path / PAGE).write_text('as of the last grid of samples')
    run = tiny(tmp_path, steps=10_000, progress=progress)
    assert 2 <= run.step < 10_000
    assert f'"step": {run.metrics["step"][-1]:.0f}' in (tmp_path / PAGE).read_text()
    assert saved_steps(tmp_path)[0] == run.step
    assert set(thread) == {threading.current_thread()}


def test_an_error_of_a_callback_saves_and_arrives(tmp_path):
    def progress(row):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiny(tmp_path, steps=10_000, progress=progress)
    assert saved_steps(tmp_path)


def full(*_):
    raise jaxunet.UserError('no space left')


def test_a_run_that_stops_and_cannot_be_saved_says_so(tmp_path, monkeypatch):
    """Left early, that is the error; otherwise it is a note of the error that stopped the run."""
    monkeypatch.setattr(Saver, 'save', full)
    with pytest.raises(jaxunet.UserError, match='no space left'):
        tiny(tmp_path / 'a', steps=10_000, progress=lambda row: False)
    with pytest.raises(ZeroDivisionError) as raised:
        tiny(tmp_path / 'b', steps=10_000, progress=lambda row: 1 // 0)
    assert 'could not be saved: no space left' in raised.value.__notes__[0]


STAGES = {
    'loading': (Session, 'expect'),
    'compiling': (Parallel, 'compile'),
    'the first step': (Session, 'call'),
    'saving': (Saver, 'save'),
}


@pytest.mark.parametrize('stage', STAGES)
def test_ctrl_c_saves_and_arrives(stage, tmp_path, monkeypatch, capfd):
    """The signal of a terminal, at each stage; the same call goes on.

    Before the step is compiled there is nothing to save, and the run ends without compiling it.
    """
    place, name = STAGES[stage]
    function, arrived = getattr(place, name), []
    stop, stopped = _Thread.stop, threading.Event()

    def interrupted(*arguments, **named):
        if not arrived:
            # Linux may hand a signal to this process to any of its threads.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            arrived.append(stopped.wait(60))
        return function(*arguments, **named)

    def stopping(self, error):
        self.requested = True
        stopped.set()
        stop(self, error)

    monkeypatch.setattr(place, name, interrupted)
    monkeypatch.setattr(_Thread, 'stop', stopping)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        tiny(tmp_path, steps=4)
    assert arrived == [True]
    assert signal.getsignal(signal.SIGINT) is handler
    assert bool(saved_steps(tmp_path)) is (stage != 'loading')
    assert 'interrupted: finishing the steps' in capfd.readouterr().err
    assert tiny(tmp_path, steps=4).step == 4


def test_ctrl_c_between_steps_saves_what_was_trained(tmp_path):
    def progress(row):
        if row['step'] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tiny(tmp_path, steps=10_000, progress=progress)
    assert saved_steps(tmp_path)[0] >= 3


def test_several_threads_train_and_sample_at_once(tmp_path):
    """None of them may set a signal handler, nor restore settings that another one needs."""
    runs, images, before = {}, {}, signal.getsignal(signal.SIGINT)

    def work(name):
        runs[name] = tiny(tmp_path / name, steps=3)
        images[name] = runs[name].model.sample(2, steps=2, progress=False)

    threads = [threading.Thread(target=work, args=(name,)) for name in 'ab']
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(runs['a'].metrics['loss'], runs['b'].metrics['loss'])
    np.testing.assert_array_equal(images['a'], images['b'])
    assert signal.getsignal(signal.SIGINT) is before


def test_devices_that_stall_are_an_error(tmp_path, monkeypatch):
    """It comes to the caller, while the thread still waits for the devices."""
    ends = threading.Event()
    monkeypatch.setattr(Session, 'call', lambda *_, **__: ends.wait() and None)
    abandoned = []
    abandon = Background.abandon
    monkeypatch.setattr(Background, 'abandon', lambda self: (abandoned.append(self), abandon(self)))
    try:
        with pytest.raises(jaxunet.UserError, match='devices finished no step'):
            tiny(tmp_path, train=FIELDS['train'] | {'steps': 2, 'stall_seconds': 0.2})
    finally:
        ends.set()
    (thread,) = abandoned
    with pytest.raises(AttributeError):  # the metrics of the step that never ended
        thread.wait()


@pytest.mark.parametrize(
    ('images', 'changes', 'error'),
    [
        (np.zeros((4, 8, 8), np.int64), {}, 'int64 has no usual range of pixels; set data.range'),
        (
            np.full((4, 8, 8), -1.0),
            {},
            r'expected values from 0 to 1, .*, found -1 to -1; set data.range',
        ),
        (np.full((4, 8, 8), np.nan), {}, 'expected values from 0 to 1, .* found nan'),
        (np.zeros((8, 8), np.uint8), {}, r'images: expected shape \(n, height, width\)'),
        (np.zeros((0, 8, 8), np.uint8), {}, 'images: expected one or more'),
        (np.zeros((4, 3, 8, 8), np.uint8), {}, r'channels first, store images.transpose'),
        ([np.zeros((8, 8)), np.zeros((9, 9))], {}, 'images: expected images of one size'),
        (digits(4), {'labels': [0, 1]}, r'labels: expected shape \(4,\)'),
        (digits(4), {'labels': 'kind'}, r'labels: expected shape \(4,\)'),
        (digits(4), {'labels': ['a'] * 4, 'class_names': ['b']}, "class_names lacks 'a'"),
        (digits(4), {'class_names': ['a']}, '^class_names: needs labels, which are not given$'),
        (digits(2), {'labels': [0, 1], 'class_names': 'ab'}, 'class_names: expected a list of str'),
        (digits(2), {'labels': [0, 1], 'class_names': 3}, 'a list of strings, found int64'),
        ('digits:', {'labels': [0]}, 'belong to arrays'),
        ('digits:', {'labels': 'kind'}, r'data\.labels: kind chooses the labels of image files'),
        (digits(4), {'batch_sise': 4}, 'batch_sise: unknown field; did you mean "batch_size"'),
        (digits(4), {'stepz': 4}, 'stepz: unknown field; did you mean "steps"[?]$'),
        (digits(4), {'batch_size': 4}, r"several sections have it; write \*\*{'data.batch_size'"),
        (digits(4), {'config': 'imges'}, 'no file or recipe imges'),
        (
            digits(4),
            {'config': None},
            'config: expected a recipe, a config file or a config, found N',
        ),
        (
            digits(4),
            {'workdir': None},
            'workdir: expected a path, as text or a path object, found N',
        ),
        (digits(4), {'workdir': 3}, 'workdir: expected a path, .*, found an object of type int'),
        (digits(4), {'data': 3}, 'data: is a section'),
        (digits(4), {'progress': 'a'}, "progress: expected True or False or a function, found 'a'"),
        (
            digits(4),
            {'workdir': 'a\0b'},
            "workdir: expected a path, .*, found 'a.x00b', with a NUL",
        ),
        ('a\0b.zip', {}, 'no such file or folder'),
    ],
)
def test_mistakes_are_errors_of_one_line(images, changes, error, tmp_path):
    fields = {k: v for k, v in FIELDS.items() if k != 'data'} | {'workdir': tmp_path / 'run'}
    with pytest.raises(jaxunet.UserError, match=error) as raised:
        train(images, **fields | changes)
    assert '\n' not in str(raised.value)
    assert not (tmp_path / 'run').exists()
