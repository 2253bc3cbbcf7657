"""The state before step 0, and its shapes."""

import dataclasses
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.meta import RunFacts
from jaxunet.checkpoint.optimizer import endless_warmup, rate_jump
from jaxunet.checkpoint.state import draw_state, fresh_state, state_config
from jaxunet.checkpoint.store import Restored, state_template
from jaxunet.config import Config
from jaxunet.training.resume import starting_point


def test_the_draw_is_traced_once():
    """Its shapes and its values need one trace."""
    config, traced = tiny_config(), []

    def draw(config):
        traced.append(config)
        return draw_state(config)

    state_template(config, draw)
    fresh_state(config, draw)
    state_template(config, draw)
    assert traced == [state_config(config)]


TRACE = """
import jax
from jaxunet.checkpoint.store import state_template
from jaxunet.config import default_config, resolve
state_template(resolve(default_config()))
try:
    jax.devices()
except RuntimeError as error:
    print(error)
"""


def test_shapes_start_no_device():
    """Tracing works where JAX has a device that cannot start, so it can be done meanwhile."""
    environment = os.environ | {'JAX_PLATFORMS': 'cpu,tpu'}
    done = subprocess.run(
        [sys.executable, '-c', TRACE], env=environment, capture_output=True, text=True, check=True
    )
    assert "Unable to initialize backend 'tpu'" in done.stdout


@pytest.mark.parametrize(
    ('steps', 'warning'),
    [
        (
            40,
            'optimizer.warmup_steps=100 is more than train.steps=40: the learning rate ends at '
            '8e-05 and never reaches optimizer.learning_rate=0.0002; lower warmup_steps',
        ),
        (100, ''),
    ],
)
def test_a_run_shorter_than_its_warmup_is_announced(steps, warning):
    optimizer = {'learning_rate': 2e-4, 'warmup_steps': 100}
    assert endless_warmup(tiny_config(optimizer=optimizer, train={'steps': steps})) == warning


COSINE = Config().replace(optimizer={'warmup_steps': 0}, train={'steps': 1200})


@pytest.mark.parametrize(
    ('changes', 'step', 'words'),
    [
        (
            {'train': {'steps': 2400}},
            1200,
            'the learning rate jumps from 0 to 0.0005 at step 1200 (train.steps: 1200 -> 2400): '
            'optimizer.schedule=cosine has at step 1200 the rate of a run of 2400 steps; the loss '
            'may rise for a while; to go on with a lower rate, set '
            '--config.optimizer.learning_rate, of which 0.0001 begins at 5e-05, or hold a rate '
            'with --config.optimizer.schedule=constant',
        ),
        ({'train': {'steps': 2400}}, 600, 'jumps from 0.0005 to 0.000854 at step 600 (train.st'),
        (
            {'optimizer': {'schedule': 'constant', 'learning_rate': 1e-5}},
            600,
            'jumps from 0.0005 to 1e-05 at step 600 (optimizer.learning_rate: 0.001 -> 1e-05, '
            "optimizer.schedule: 'cosine' -> 'constant'); to go on with a higher rate, raise "
            '--config.optimizer.learning_rate (now 1e-05)',
        ),
        ({'train': {'steps': 2400}, 'optimizer': {'learning_rate': 1e-9}}, 1200, 'from 0 to 5e-10'),
        ({}, 600, ''),
        ({}, 1200, ''),
        ({'train': {'steps': 1210}}, 100, ''),
        ({'train': {'keep': 1}}, 600, ''),
    ],
)
def test_a_jump_of_the_learning_rate_is_told_with_numbers(changes, step, words):
    found = rate_jump(COSINE, COSINE.replace(**changes), step)
    assert words in found
    assert bool(words) == bool(found)


def test_a_run_that_resumes_tells_of_the_jump(tmp_path, caplog):
    saved = tiny_config(optimizer={'schedule': 'cosine'})
    state = dataclasses.replace(fresh_state(saved), step=np.asarray(6, np.int32))
    restored = Restored(tmp_path, state, saved, RunFacts())
    checkpoints = types.SimpleNamespace(restore=lambda: restored)
    for steps, told in ((6, 0), (12, 1)):
        now = saved.replace(train={'steps': steps})
        assert starting_point(now, tmp_path, checkpoints, (), None).step == 6
        assert caplog.text.count('the learning rate jumps from 0 to ') == told
