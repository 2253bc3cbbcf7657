"""Weights of elsewhere as the start of a run: values, averages, Adam moments."""

import pathlib

import jax
import numpy as np
import pytest
from support.weight_cases import random_params

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.load import load_initial, load_model
from jaxunet.checkpoint.optimizer import CONVERGED_COUNT, get_moments
from jaxunet.runtime.errors import UserError
from jaxunet.weights import write_weights
from jaxunet.weights.unetcu import MAGIC, Header, config_of

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'


@pytest.fixture(scope='module')
def config():
    """unet.cu's network at its smallest."""
    return config_of(Header(MAGIC, 2, 3, 32, 3, 16, 16, 1000, 0, 0))


@pytest.fixture(scope='module')
def params(config):
    return random_params(config)


def test_a_bin_with_moments_continues(config, params, tmp_path):
    mu, nu = jax.tree.map(lambda p: p * 0.5, params), jax.tree.map(np.square, params)
    path = tmp_path / 'model.bin'
    write_weights(path, params, config, (mu, nu))
    state = load_initial(config.replace(init_from=str(path)))
    assert checkpoint.checksum(state.params) == checkpoint.checksum(params)
    assert checkpoint.checksum(get_moments(state.opt_state)) == checkpoint.checksum((mu, nu))
    assert all(
        checkpoint.checksum(average) == checkpoint.checksum(params)
        for average in state.ema.values()
    )
    counts = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state.opt_state)
        if 'count' in jax.tree_util.keystr(path)
    ]
    assert sorted(int(c) for c in counts) == [
        0,
        CONVERGED_COUNT,
    ]  # the schedule starts anew, bias correction does not
    assert state.step == 0


def test_weights_of_another_model_are_refused(config, params, tmp_path):
    path = tmp_path / 'model.safetensors'
    write_weights(path, params, config)
    other = config.replace(model={'base_channels': 64}, init_from=str(path))
    with pytest.raises(UserError, match='base_channels'):
        load_initial(other)
    with pytest.raises(UserError, match='holds one set of weights'):
        load_model(str(path), ema='0.9')
    assert load_initial(config) is None


def test_a_run_continues_another_one_with_its_moments():
    """`init_from_ema=none` takes the weights that the moments belong to; '' takes their average."""
    folder = FIXTURES / 'e54d28d' / 'conditional'
    there = checkpoint.read(folder)
    here = there.config.replace(init_from=str(folder))
    state = load_initial(here.replace(init_from_ema='none'))
    assert checkpoint.checksum(state.params) == checkpoint.checksum(there.state.params)
    moments = get_moments(there.state.opt_state)
    assert checkpoint.checksum(get_moments(state.opt_state)) == checkpoint.checksum(moments)
    averaged = load_initial(here)
    average = there.state.ema[str(there.config.ema.rates[0])]
    assert checkpoint.checksum(averaged.params) == checkpoint.checksum(average)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(get_moments(averaged.opt_state)))
    with pytest.raises(UserError, match=r'^init_from_ema: expected .* or none, found'):
        load_initial(here.replace(init_from_ema='0.5'))
