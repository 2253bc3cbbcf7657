"""jaxunet's side of a benchmark computes what training computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from support.tiny import tiny_config

from jaxunet.benchmark.jax_side import model_loss, random_inputs, synthetic_source
from jaxunet.checkpoint.state import fresh_state
from jaxunet.data.reading import Reading
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import make_diffusion, middle_time, network_input, q_sample
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.references import XLA


@pytest.mark.parametrize(
    'changes',
    [
        {'data': {'bits': 16}, 'diffusion': {'learn_sigma': True}},
        {'diffusion': {'objective': 'edm'}},
        {'diffusion': {'objective': 'flow'}},
    ],
)
def test_the_loss_is_that_of_training(changes: dict[str, dict[str, object]]) -> None:
    """With pixels of the config's bits, and at its noise levels."""
    config = tiny_config(**{'model': {'zero_init': False}, **changes})
    state, inputs = fresh_state(config), random_inputs(config)
    inputs['t'] = inputs['t'].at[0].set(0)  # the decoder's term, which the bits are in
    model, diffusion = build_unet(config, XLA), make_diffusion(config.diffusion)
    x0, noise, time = inputs['x0'], inputs['noise'], middle_time(diffusion, inputs['t'])
    xt = q_sample(diffusion, x0, time, noise)

    @jax.jit
    def expected(params: Params) -> Array:
        seen = network_input(diffusion, xt, time)
        output = model.predict(params, seen, time, inputs.get('labels'))
        bits = config.data.bits
        return jnp.mean(per_sample_loss(diffusion, output, x0, xt, time, noise, bits=bits))

    found = jax.jit(lambda p: model_loss(config, model, p, inputs))(state.params)
    np.testing.assert_allclose(found, expected(state.params), rtol=1e-5)


def test_synthetic_images_have_the_bits_of_the_config() -> None:
    """A step of 16-bit images reads and moves twice the bytes of 8-bit ones."""
    config = tiny_config(data={'bits': 16, 'range': (0, 4095)})
    source = synthetic_source(config)
    images = source.load(np.arange(8))
    assert (images.dtype, source.reading) == (np.uint16, Reading.of(config))
    assert images.max() > 4095, 'random over all 65,536 levels'
