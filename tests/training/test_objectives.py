"""Training with the objectives of continuous noise levels: devices, adaptive methods, files."""

import re

import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError
from jaxunet.weights.files import read_weights, write_weights


@pytest.fixture(scope='module')
def source():
    return open_source('digits:', image_shape=(8, 8, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ('objective', 'methods'),
    [
        ('edm', {'loss': {'weighting': 'uncertainty'}, 'timesteps': {'sampler': 'adaptive'}}),
        ('flow', {'loss': {'weighting': 'min_snr'}}),
    ],
)
def test_losses_do_not_depend_on_the_number_of_devices(objective, methods, source):
    config = tiny_config(diffusion={'objective': objective}, parallel={'devices': 1}, **methods)
    one, four = (
        Bench(c, source).losses() for c in (config, config.replace(parallel={'devices': 4}))
    )
    assert np.isfinite(one).all()
    np.testing.assert_allclose(four, one, rtol=1e-4)


@pytest.mark.parametrize('objective', ['v', 'edm', 'flow'])
def test_files_of_guided_diffusion_refuse_other_objectives(objective, tmp_path):
    channels = {'base_channels': 32, 'norm_groups': 32}  # the objective alone does not fit
    config = tiny_config(diffusion={'objective': objective}, model=channels)
    params = fresh_state(config).params
    message = (
        'guided-diffusion has no such model, so it would misread this .pt; write .safetensors '
        f"instead: diffusion.objective: expected 'epsilon' or 'x0', found '{objective}'"
    )
    with pytest.raises(UserError, match=f'^{re.escape(message)}$'):
        write_weights(tmp_path / 'a.pt', params, config)
    assert not list(tmp_path.iterdir())
    write_weights(tmp_path / 'a.safetensors', params, config)
    assert read_weights(tmp_path / 'a.safetensors').config.diffusion.objective == objective
