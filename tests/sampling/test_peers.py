"""Timesteps and samples are those of guided-diffusion's and ddpm-torch's own code.

`fixtures/process_golden.npz` holds what that code computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conditional_golden import prediction
from process_golden import SAMPLERS, SECTIONS, SECTIONS_T, SUBSETS, T, checksum, noise
from support.peer_values import FIXTURES, close, pictures

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion.process import make_diffusion
from jaxunet.sampling import sampler as sampler_module
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import State, make_sampler, run, sample_keys
from jaxunet.sampling.solvers import respaced_timesteps

GOLDEN = np.load(FIXTURES / 'process_golden.npz')
PROCESS = make_diffusion(DiffusionConfig(steps=T, schedule='linear'))
TIES = 1e-4  # distance from a half at which a square's rounding depends on the machine


def checksums(prefix: str) -> list[int]:
    """Returns the checksum of our timesteps for every count."""
    alphas = PROCESS.alphas_cumprod
    return [checksum(respaced_timesteps(alphas, f'{prefix}{count}')) for count in range(1, T + 1)]


@pytest.mark.parametrize(
    ('prefix', 'name'), [('', 'space_timesteps'), ('linear', 'subsets_linear')]
)
def test_timesteps_of_every_count(prefix: str, name: str) -> None:
    np.testing.assert_array_equal(checksums(prefix), GOLDEN[name])


def test_quadratic_timesteps_of_every_count() -> None:
    """All agree but squares at a half, which PyTorch rounds up or down by the machine's vectors."""
    different = np.flatnonzero(np.array(checksums('quadratic')) != GOLDEN['subsets_quadratic']) + 1
    assert len(different) <= 23
    for count in different:
        squares = 0.8 * T * (np.arange(count) / (count - 1)) ** 2
        assert np.abs(squares % 1 - 0.5).min() < TIES, count


@pytest.mark.parametrize('text', SECTIONS)
def test_timesteps_of_sections(text: str) -> None:
    alphas = np.linspace(0.999, 1e-3, SECTIONS_T)
    np.testing.assert_array_equal(
        respaced_timesteps(alphas, text), GOLDEN[f'space_timesteps_{text}']
    )


@pytest.mark.parametrize(('kind', 'count'), SUBSETS)
def test_timesteps_of_ddpm_torch(kind: str, count: int) -> None:
    text = f'{kind}{count}'
    found = respaced_timesteps(PROCESS.alphas_cumprod, text)
    np.testing.assert_array_equal(found, GOLDEN[f'subset_{text}'])


@pytest.mark.parametrize('name', SAMPLERS)
def test_samples_of_ddpm_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step agrees, with the same noise and a formula in place of the network."""

    def same_noise(keys: Any, draw: Any, shape: Any) -> jax.Array:
        return noise(jnp, draw - 1).transpose(0, 2, 3, 1)  # draw 0 is the start

    monkeypatch.setattr(sampler_module, '_noise', same_noise)
    kind = SAMPLERS[name]
    if isinstance(kind, str):
        options = SamplerConfig(name='ddpm', variance=kind.replace('-', '_'))
    else:
        options = SamplerConfig(name='ddim', respacing=f'{kind[0]}{kind[1]}', eta=kind[2])
    sampler = make_sampler(options, PROCESS)

    def denoise(x: jax.Array, t: jax.Array) -> jax.Array:
        return prediction(jnp, x, t[:, None, None, None])[0]

    draw = jax.jit(lambda x: run(denoise, State(x), sample_keys(0, [0, 1]), sampler).x)
    close(draw(pictures(0.53)), GOLDEN[name].transpose(0, 2, 3, 1), 1e-5)
