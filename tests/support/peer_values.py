"""Inputs for the networks of other programs, made as in `tools/fixtures/peers_golden.py`."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from peers_golden import SIDE, formula_state, images

from jaxunet.config import Config
from jaxunet.config.schema import Fields
from jaxunet.weights import ddpm_torch
from jaxunet.weights.names import Entry
from support.weight_cases import NETWORK

# Options that files of ddpm-torch and of ADM networks do not state.
LINEAR: Fields = {
    'image_size': (SIDE,),
    'schedule': 'linear',
    'diffusion_steps': 1000,
    'objective': 'epsilon',
}
DDPM = Config().replace(
    model=NETWORK | ddpm_torch.FIXED | {'conv_resample': True, 'init': 'ddpm'},
    data={'image_size': (SIDE,)},
)
FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
QUICK = {'xla_backend_optimization_level': 0}


def state_of(table: list[Entry]) -> dict[str, np.ndarray]:
    """The weights that the formula gives, under the names of a program."""
    return formula_state({entry.name: entry.shape for entry in table})


def pictures(scale: float) -> jax.Array:
    """The input images, NHWC."""
    return jnp.asarray(images(scale).transpose(0, 2, 3, 1))


def close(found: ArrayLike, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    """Asserts that values differ by at most a share of the largest expected one."""
    np.testing.assert_allclose(
        np.asarray(found), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )
