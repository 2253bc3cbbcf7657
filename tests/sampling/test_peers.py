"""Timesteps, levels and samples are those of the programs that the samplers come from.

`fixtures/process_golden.npz` holds what guided-diffusion and ddpm-torch computed, and
`fixtures/methods_golden.npz` what EDM, DPM-Solver and k-diffusion did, and
`fixtures/solvers_golden.npz` what diffusers did.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conditional_golden import prediction
from methods_golden import CHURN, START, STEPS, linear, two_gaussians
from process_golden import SAMPLERS, SECTIONS, SECTIONS_T, SUBSETS, T, checksum, noise
from solvers_golden import STEPS as DIFFUSERS_STEPS
from support.peer_values import FIXTURES, close, pictures

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion.levels import spaced_levels
from jaxunet.diffusion.process import make_diffusion
from jaxunet.sampling import sampler as sampler_module
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import State, make_sampler, run, sample_keys
from jaxunet.sampling.solvers import dpm_solver_2m, heun, unipc
from jaxunet.sampling.subsets import respaced_timesteps

GOLDEN = np.load(FIXTURES / 'process_golden.npz')
METHODS = np.load(FIXTURES / 'methods_golden.npz')
DIFFUSERS = np.load(FIXTURES / 'solvers_golden.npz')
EDM = DiffusionConfig(objective='edm')
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
        squares = 0.8 * T * (np.arange(count, dtype=np.int32) / (count - 1)) ** 2
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


def image(
    rows: Any,
    memory: str,
    alphas: np.ndarray,
    denoise: Any,
    x: np.ndarray,
    noises: np.ndarray | None = None,
) -> np.ndarray:
    """Applies a table of coefficients to x, in float64.

    Row k draws `noises[k]`. Without noises, x has the factor of each in a trailing axis: row k
    draws the k-th from 1.
    """
    remembered = older = np.zeros_like(x)
    for k, t in enumerate(rows.timesteps):
        signal, sigma = math.sqrt(alphas[t]), math.sqrt(1 / alphas[t] - 1)
        x0 = denoise(x / signal, sigma)
        noise = (x / signal - x0) / sigma
        x = rows.state[k] * x + rows.x0[k] * x0 + rows.noise[k] * noise
        x = x + rows.memory[k] * remembered + rows.older[k] * older
        if noises is not None:
            x = x + rows.draw[k] * noises[k]
        elif rows.draw[k]:
            x[(k + 1) // 2 + 1] += rows.draw[k]
        remembered, older = x0 if memory == 'x0' else noise, remembered
    return x


@pytest.mark.parametrize('count', STEPS)
def test_dpm_solver_is_that_of_its_authors(count: int) -> None:
    """Their code tests the steps to the lowest level, of which there is one fewer, for 10."""
    alphas = METHODS[f'dpm_alphas_{count}'][::-1]
    every = np.arange(count, dtype=np.int32)
    rows = dpm_solver_2m(alphas, every, lower_order_below=11)
    found = image(rows, 'x0', alphas, two_gaussians, START)
    np.testing.assert_allclose(found, METHODS[f'dpm_{count}'], atol=1e-12)
    default = image(dpm_solver_2m(alphas, every), 'x0', alphas, two_gaussians, START)
    same = np.allclose(default, METHODS[f'dpm_{count}'], atol=1e-12)
    assert same == (not 11 <= count < 15)


@pytest.mark.parametrize('count', STEPS)
def test_levels_and_solvers_are_those_of_k_diffusion(count: int) -> None:
    """Its DPM-Solver++ is second order at every step."""
    levels = spaced_levels(EDM, count, 'karras')
    np.testing.assert_allclose(levels[::-1], METHODS[f'k_sigmas_{count}'][:-1], rtol=1e-12)
    even = spaced_levels(EDM, count, 'log_snr')
    np.testing.assert_allclose(even[::-1], METHODS[f'k_log_{count}'][:-1], rtol=1e-12)
    alphas, every = 1 / (1 + levels**2), np.arange(count, dtype=np.int32)
    start = levels[-1] * math.sqrt(alphas[-1]) * START
    rows = dpm_solver_2m(alphas, every, lower_order_below=0)
    found = image(rows, 'x0', alphas, two_gaussians, start)
    np.testing.assert_allclose(found, METHODS[f'k_dpm_{count}'], atol=1e-11)
    rows = heun(alphas, every, churn_range=(0.0, math.inf))
    found = image(rows, 'noise', alphas, two_gaussians, start)
    np.testing.assert_allclose(found, METHODS[f'k_heun_{count}'], atol=1e-12)


@pytest.mark.parametrize('count', DIFFUSERS_STEPS)
@pytest.mark.parametrize('name', ['unipc', 'sde'])
def test_solvers_are_those_of_diffusers(name: str, count: int) -> None:
    """Its noise levels are float32."""
    sigmas = DIFFUSERS[f'{name}_sigmas_{count}'][:-1][::-1]
    alphas, every = 1 / (1 + sigmas**2), np.arange(count, dtype=np.int32)
    rows = unipc(alphas, every)
    if name == 'sde':
        rows = dpm_solver_2m(alphas, every, eta=1.0, lower_order_below=0)
    start = sigmas[-1] * math.sqrt(alphas[-1]) * START
    noises = DIFFUSERS['noises'] if name == 'sde' else None
    found = image(rows, 'x0', alphas, two_gaussians, start, noises)
    np.testing.assert_allclose(found, DIFFUSERS[f'{name}_images_{count}'], atol=1e-6)


@pytest.mark.parametrize('name', CHURN)
def test_churn_is_that_of_edm(name: str) -> None:
    """The factor of each noise in the image. Ours draws at once the two noises that EDM's code adds
    before the first step, so theirs are added as variances.
    """
    steps, amount, low, high, noise = CHURN[name]
    options = SamplerConfig(
        'heun',
        steps=steps,
        churn=amount,
        churn_range=(low, high) if amount and high < math.inf else None,
        churn_noise=noise if amount else None,
    )
    sampler = make_sampler(options, make_diffusion(EDM))
    alphas = 1 / (1 + np.exp(np.asarray(sampler.times) / 250) ** 2)
    rows = dataclasses.replace(
        sampler.coefficients, timesteps=np.arange(len(sampler.times), dtype=np.int32)
    )
    x = np.zeros(steps + 1)
    x[0] = sampler.initial
    found = image(rows, 'noise', alphas, linear, x)
    theirs = METHODS[f'churn_{name}']
    np.testing.assert_allclose(found[0], math.hypot(*theirs[:2]), rtol=1e-9)
    np.testing.assert_allclose(found[2:], theirs[2:], rtol=1e-9, atol=1e-15)
    assert bool(theirs[1]) == (name in ('all', 'noise'))
