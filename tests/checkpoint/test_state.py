"""The state before step 0, and its shapes."""

import os
import subprocess
import sys

import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.state import draw_state, endless_warmup, fresh_state, state_config
from jaxunet.checkpoint.store import state_template


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
