"""Images, noise and timesteps for tests of the diffusion."""

import jax.numpy as jnp
import numpy as np

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion.process import make_diffusion

SHAPE = (4, 3, 2, 1)
PREDICTIONS = ('epsilon', 'x0', 'v')


def batch(seed, count=4, channels=1):
    """Pixels on the grid of 256 values, and noise."""
    rng = np.random.default_rng(seed)
    shape = (count, 3, 2, channels)
    x0 = rng.integers(0, 256, shape).astype(np.float32) / np.float32(127.5) - 1
    return jnp.asarray(x0), jnp.asarray(rng.standard_normal(shape, dtype=np.float32))


def process(**fields):
    """The process of a diffusion config with these fields."""
    return make_diffusion(DiffusionConfig(**fields))


def alphas(steps=1000, schedule='linear'):
    """ᾱ of each timestep."""
    return process(steps=steps, schedule=schedule).alphas_cumprod


def steps_of(diffusion, count=4):
    return jnp.asarray(np.linspace(0, diffusion.steps - 1, count).astype(np.int32))


def toy(x, t):
    """A nonlinear function of state and time, different for each pixel's value."""
    return 0.5 * jnp.sin(3 * x) + 0.01 * jnp.cos(t.astype(jnp.float32))[:, None, None, None] * x
