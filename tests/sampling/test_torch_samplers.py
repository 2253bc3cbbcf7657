"""Samplers of EDM and rectified flow against the papers' algorithms in plain PyTorch, in float64.

One small network of images is written for both: `predict` takes their library.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion import process as d
from jaxunet.sampling import sampler as s
from jaxunet.sampling.options import SamplerConfig

torch = pytest.importorskip('torch')

DATA = 0.5  # σ_d
COUNT, SHAPE = 3, (4, 4, 2)
RNG = np.random.default_rng(0)
NOISE = RNG.standard_normal((COUNT, 32))
FIRST, LAST = RNG.standard_normal((2, 32, 32)) / 32**0.5


def predict(xp, first, last, seen, time):
    """The network: images as rows, and the number that its time embedding reads."""
    return xp.tanh(seen @ first + xp.sin(time / 100)) @ last


def torch_network(seen, time):
    return predict(torch, torch.from_numpy(FIRST), torch.from_numpy(LAST), seen, torch.tensor(time))


def edm_denoise(x, sigma):
    """EDM eq. 7 and table 1."""
    total = sigma**2 + DATA**2
    output = torch_network(x / total**0.5, 1000 * np.log(sigma) / 4)
    return DATA**2 / total * x + sigma * DATA / total**0.5 * output


def edm_heun(x, sigmas):
    """EDM algorithm 1."""
    for now, then in itertools.pairwise(sigmas):
        slope = (x - edm_denoise(x, now)) / now
        following = x + (then - now) * slope
        if then > 0:
            slope = (slope + (following - edm_denoise(following, then)) / then) / 2
        x = x + (then - now) * slope
    return x


def edm_euler(x, sigmas):
    """EDM eq. 4 in Euler's steps, which are those of DDIM."""
    for now, then in itertools.pairwise(sigmas):
        x = x + (then - now) * (x - edm_denoise(x, now)) / now
    return x


def edm_dpmpp_2m(x, sigmas):
    """Lu et al. (arXiv 2211.01095) algorithm 2, with α = 1; both ends are of first order."""
    earlier = None
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        denoised = edm_denoise(x, now)
        if then == 0:
            return denoised
        h, mixed = np.log(now / then), denoised
        if earlier is not None:
            ratio = np.log(sigmas[i - 1] / now) / h
            mixed = denoised + (denoised - earlier) / (2 * ratio)
        x, earlier = then / now * x - np.expm1(-h) * mixed, denoised
    return x


def flow_steps(x, times, *, heun):
    """Liu et al. eq. 1 backwards in time, by Euler's or Heun's method."""
    for now, then in itertools.pairwise(times):
        slope = torch_network(x, 1000 * now)
        if heun and then > 0:
            slope = (slope + torch_network(x + (then - now) * slope, 1000 * then)) / 2
        x = x + (then - now) * slope
    return x


def karras(steps, rho=7):
    """EDM eq. 5."""
    return np.append(np.linspace(80 ** (1 / rho), 0.002 ** (1 / rho), steps) ** rho, 0.0)


def log_snr(steps):
    return np.append(np.geomspace(80, 0.002, steps), 0.0)


def sampled(objective, name, steps):
    """The samples of jaxunet in float64, as rows."""
    process = d.make_diffusion(DiffusionConfig(objective=objective))
    sampler = s.make_sampler(SamplerConfig(name=name, steps=steps, clip=False), process)
    with jax.enable_x64(True):

        def network(seen, time):
            rows = seen.reshape(COUNT, -1)
            return predict(jnp, FIRST, LAST, rows, time[:, None]).reshape(seen.shape)

        x = sampler.initial * jnp.asarray(NOISE).reshape(COUNT, *SHAPE)
        state = s.State(x, jnp.zeros_like(x) if sampler.memory else None)
        keys = s.sample_keys(0, range(COUNT))
        found = jax.jit(lambda state: s.run(network, state, keys, sampler))(state)
    return np.asarray(found.x).reshape(COUNT, -1)


@pytest.mark.parametrize(
    ('name', 'steps', 'algorithm', 'levels'),
    [
        ('heun', 18, edm_heun, karras),
        ('ddim', 18, edm_euler, karras),
        ('dpmpp_2m', 20, edm_dpmpp_2m, log_snr),
    ],
)
def test_edm(name, steps, algorithm, levels):
    expected = algorithm(80 * torch.from_numpy(NOISE), levels(steps)).numpy()
    assert expected.std() > 0.3
    np.testing.assert_allclose(sampled('edm', name, steps), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize('name', ['heun', 'ddim'])
def test_flow(name):
    times = np.linspace(1, 0, 21)
    expected = flow_steps(torch.from_numpy(NOISE), times, heun=name == 'heun').numpy()
    assert expected.std() > 0.3
    np.testing.assert_allclose(sampled('flow', name, 20), expected, rtol=0, atol=1e-10)
