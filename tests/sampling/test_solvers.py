"""The samplers' coefficients, against formulas written out, exact solutions of the probability
flow, and their orders of convergence.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.diffusion import alphas
from support.samples import sample
from support.turns import in_turn

from jaxunet.config import DiffusionConfig
from jaxunet.data.sources import DIGITS as DIGITS_FILE
from jaxunet.diffusion import objectives
from jaxunet.diffusion import process as d
from jaxunet.diffusion.levels import spaced_levels
from jaxunet.sampling import sampler as s
from jaxunet.sampling import solvers, subsets
from jaxunet.sampling.guidance import guided
from jaxunet.sampling.options import DEFAULT_SKIP_SCHEDULES

EVERY = (0.0, math.inf)
MEMORY = {'dpmpp_2m': 'x0', 'unipc': 'x0', 'heun': 'noise'}
DIGITS = np.load(DIGITS_FILE)['images'].reshape(-1, 64) / 127.5 - 1


def table(name, alphas_cumprod, timesteps):
    if name == 'heun':
        return solvers.heun(alphas_cumprod, timesteps, churn_range=EVERY)
    if name == 'ddim':
        return solvers.ddim(alphas_cumprod, timesteps, eta=0.0)
    return {'dpmpp_2m': solvers.dpm_solver_2m, 'unipc': solvers.unipc}[name](
        alphas_cumprod, timesteps
    )


def follow(name, rows, alphas_cumprod, mean_x0, x, evaluations):
    """The first evaluations of a deterministic sampler in float64."""
    memory = older = np.zeros_like(x)
    for k, t in enumerate(rows.timesteps[:evaluations]):
        alpha = alphas_cumprod[t]
        x0 = mean_x0(x, alpha)
        noise = (x - math.sqrt(alpha) * x0) / math.sqrt(1 - alpha)
        x = rows.state[k] * x + rows.x0[k] * x0 + rows.noise[k] * noise + rows.memory[k] * memory
        x = x + rows.older[k] * older
        memory, older = {'x0': x0, 'noise': noise}.get(MEMORY.get(name), memory), memory
    return x


def gaussian(variance):
    return lambda x, alpha: math.sqrt(alpha) * variance * x / (alpha * variance + 1 - alpha)


def two_gaussians(x, alpha):
    """E[x_0 | x_t] of an even mixture of N(0.6, 0.2²) and N(−0.6, 0.2²)."""
    variance = alpha * 0.04 + 1 - alpha
    weight = np.tanh(0.6 * math.sqrt(alpha) * x / variance)
    centre = 0.6 * weight
    return centre + math.sqrt(alpha) * 0.04 * (x - math.sqrt(alpha) * centre) / variance


@pytest.mark.parametrize(
    ('name', 'order', 'spacing'),
    [
        *itertools.product(['ddim'], [1], ['log_snr', 'karras']),
        *itertools.product(['dpmpp_2m', 'heun'], [2], ['log_snr', 'karras']),
        ('unipc', 3, 'log_snr'),  # with karras, the noise levels are not dense enough for it
    ],
)
def test_order_of_convergence_on_the_exact_flow_of_gaussian_data(name, order, spacing):
    """x_t / √(ᾱ_t v + 1 − ᾱ_t) is constant along the flow; the error at t = 0 falls with the order
    of the sampler.
    """
    a = alphas(200_000)  # noise levels so dense that rounding to them does not show
    variance = 0.25
    std = np.sqrt(a * variance + 1 - a)
    errors = []
    for steps in (20, 40, 80, 160):
        rows = table(name, a, subsets.timestep_subset(a, steps, spacing))
        x = follow(name, rows, a, gaussian(variance), np.array([1.0]), len(rows.timesteps) - 1)
        errors.append(abs(x[0] / (std[0] / std[-1]) - 1))
    rates = np.log2(np.array(errors[:-1]) / errors[1:])
    assert rates[-1] == pytest.approx(order, abs=0.25), (errors, rates)
    assert (np.diff(errors) < 0).all()


@pytest.mark.parametrize('name', ['dpmpp_2m', 'heun'])
def test_order_of_convergence_on_a_curved_flow(name):
    """A mixture of Gaussians, whose flow has no formula: against 3,000 steps."""
    a = alphas(200_000)
    x = np.linspace(-2, 2, 9)  # 0 among them, which stays
    ends = {}
    for steps in (3000, 160, 80, 40):
        rows = table(name, a, subsets.timestep_subset(a, steps, 'log_snr'))
        ends[steps] = follow(name, rows, a, two_gaussians, x, len(rows.timesteps) - 1)
    errors = [np.abs(ends[steps] - ends[3000]).max() for steps in (40, 80, 160)]
    np.testing.assert_allclose(np.log2(np.array(errors[:-1]) / errors[1:]), 2, atol=0.5)
    assert errors[-1] < 2e-3


@pytest.mark.parametrize(
    ('name', 'steps', 'evaluations'), [('dpmpp_2m', 20, 20), ('heun', 60, 119)]
)
def test_second_order_beats_ddim_at_the_same_cost_and_spacing(name, steps, evaluations):
    a = alphas()
    x = np.linspace(-2, 2, 10)
    spacing = DEFAULT_SKIP_SCHEDULES[name]

    def flow(name, steps):
        rows = table(name, a, subsets.timestep_subset(a, steps, spacing))
        return follow(name, rows, a, two_gaussians, x, len(rows.timesteps)), len(rows.timesteps)

    exact, _ = flow('heun', 500)
    second, cost = flow(name, steps)
    first, _ = flow('ddim', evaluations)
    assert cost == evaluations
    errors = [np.abs(x - exact).max() for x in (second, first)]
    assert errors[0] < errors[1] / 2


def exact_digits(x, alpha):
    """E[x_0 | x_t] of the embedded digits with pixels of N(0, 0.05²) added."""
    variance = 0.05**2 + 1 / alpha - 1
    y = x / math.sqrt(alpha)
    distance = np.sum(DIGITS**2, axis=1) - 2 * y @ DIGITS.T
    weights = np.exp((np.min(distance, axis=1, keepdims=True) - distance) / (2 * variance))
    centre = weights @ DIGITS / weights.sum(axis=1, keepdims=True)
    return centre + 0.05**2 / variance * (y - centre)


@pytest.mark.parametrize('count', [6, 11, 14])
def test_few_steps_end_nearer_with_a_first_order_step(count):
    """The reason for `FEW_STEPS`, which differs from the cited code for 11 to 14 steps."""
    noise = np.random.default_rng(0).standard_normal((16, 64))

    def ends(count, below):
        levels = spaced_levels(DiffusionConfig(objective='edm'), count, 'karras')
        a = 1 / (1 + levels**2)
        steps = np.arange(count, dtype=np.int32)
        rows = solvers.dpm_solver_2m(a, steps, lower_order_below=below)
        start = math.sqrt(1 - a[-1]) * noise
        return follow('dpmpp_2m', rows, a, exact_digits, start, count)

    exact = ends(300, 0)
    second, first, default = (
        np.median(np.sqrt(np.mean((ends(count, below) - exact) ** 2, axis=1)))
        for below in (0, count + 1, solvers.FEW_STEPS)
    )
    assert first < 0.96 * second
    assert default == first


def written_dpm(a, timesteps, predict, x):
    """Lu et al., algorithm 2, in the paper's letters; timesteps descending.

    The last step is to the image.
    """
    alpha, sigma = np.sqrt(a[timesteps]), np.sqrt(1 - a[timesteps])
    lam = np.log(alpha / sigma)
    few = len(timesteps) < 15
    before = None
    for i in range(1, len(timesteps)):
        now = predict(x, timesteps[i - 1])
        h = lam[i] - lam[i - 1]
        direction = now
        if i > 1 and not (few and i == len(timesteps) - 1):
            r = (lam[i - 1] - lam[i - 2]) / h
            direction = (1 + 1 / (2 * r)) * now - 1 / (2 * r) * before
        x = sigma[i] / sigma[i - 1] * x - alpha[i] * (math.exp(-h) - 1) * direction
        before = now
    return predict(x, timesteps[-1])


def written_heun(a, timesteps, predict, x):
    """EDM algorithm 1 on x/√ᾱ and σ; timesteps descending."""
    sigma = np.append(np.sqrt((1 - a[timesteps]) / a[timesteps]), 0)
    y = x / math.sqrt(a[timesteps[0]])

    def slope(y, i):
        return (y - predict(y * math.sqrt(a[timesteps[i]]), timesteps[i])) / sigma[i]

    for i in range(len(timesteps)):
        first = slope(y, i)
        after = y + (sigma[i + 1] - sigma[i]) * first
        if sigma[i + 1] > 0:
            after = y + (sigma[i + 1] - sigma[i]) * (first + slope(after, i + 1)) / 2
        y = after
    return y


SOLVERS = [('dpmpp_2m', 9), ('dpmpp_2m', 16), ('heun', 6), ('heun', 1), ('dpmpp_2m', 1)]


@pytest.mark.parametrize(
    ('solver', 'learn_sigma', 'clip'),
    in_turn(
        {
            f'{name}-{steps}-{prediction}': (name, steps, prediction)
            for name, steps in SOLVERS
            for prediction in ('epsilon', 'x0', 'v')
        },
        *itertools.product((False, True), (True, False)),
    ),
)
def test_images_are_those_of_the_written_out_algorithms(solver, learn_sigma, clip):
    name, steps, prediction = solver
    """Through the network interface: every prediction, with variance channels to be ignored,
    clipped and not.
    """
    process = d.make_diffusion(DiffusionConfig(objective=prediction, learn_sigma=learn_sigma))
    a = process.alphas_cumprod
    sampler = s.make_sampler(s.SamplerConfig(name, steps=steps, clip=clip), process)
    seen = []

    def denoise(x, t):
        jax.debug.callback(lambda t: seen.append(int(t)), t[0])
        alpha = jnp.asarray(a.astype(np.float32))[t][:, None, None, None]
        x0 = 1.5 * jnp.tanh(x * jnp.sqrt(alpha))
        output = objectives.prediction_target(process, x0, t, d.noise_from_x0(process, x0, x, t))
        return jnp.concatenate([output, 100 * output], axis=-1) if learn_sigma else output

    def predict(x, t):
        x0 = 1.5 * np.tanh(x * math.sqrt(a[t]))
        return np.clip(x0, -1, 1) if clip else x0

    keys = s.sample_keys(0, range(2))
    images = sample(denoise, keys, (4, 4, 3), sampler)
    jax.effects_barrier()
    # The number of evaluations of the network is what the sampler promises.
    assert len(seen) == sampler.evaluations == (2 * steps - 1 if name == 'heun' else steps)
    assert sorted(seen, reverse=True) == list(sampler.timesteps)
    timesteps = subsets.timestep_subset(a, steps, DEFAULT_SKIP_SCHEDULES[name])[::-1]
    written = written_heun if name == 'heun' else written_dpm
    expected = written(
        a, timesteps, predict, np.asarray(s.initial_noise(keys, (4, 4, 3)), np.float64)
    )
    # ε from x_0 at the lowest noise level, σ = 0.01, multiplies float32 rounding by 100; at the
    # highest, x_0 from ε by 157.
    np.testing.assert_allclose(images, expected, atol=2e-3 if prediction == 'epsilon' else 3e-4)


def test_heun_evaluates_where_it_should():
    a = alphas()
    timesteps = subsets.timestep_subset(a, 5, 'karras')
    rows = solvers.heun(a, timesteps, churn_range=EVERY)
    down = timesteps[::-1]
    assert list(rows.timesteps) == [
        down[0],
        *itertools.chain.from_iterable((t, t) for t in down[1:]),
    ]
    assert not rows.draw.any()


def test_churn_raises_the_noise_by_what_it_draws():
    """EDM algorithm 2, lines 4–6: on the corrected x, whose noise is σ, the raised one is σ̂ and
    the signal as before.
    """
    a = alphas()
    sigmas = solvers.noise_to_signal(a)
    timesteps = subsets.timestep_subset(a, 20, 'karras')
    rows = solvers.heun(a, timesteps, churn=6.0, churn_range=(0.05, 50.0))
    plain = solvers.heun(a, timesteps, churn_range=EVERY)
    raised = 0
    for k in range(1, 39, 2):
        lower, higher = a[rows.timesteps[k]], a[rows.timesteps[k + 1]]
        assert rows.timesteps[k] == plain.timesteps[k]
        assert rows.state[k] * math.sqrt(lower) == pytest.approx(math.sqrt(higher))
        assert (rows.state[k] ** 2 * (1 - lower)) + rows.draw[k] ** 2 == pytest.approx(1 - higher)
        sigma, ratio = (
            sigmas[rows.timesteps[k]],
            sigmas[rows.timesteps[k + 1]] / sigmas[rows.timesteps[k]],
        )
        if 0.05 <= sigma <= 50:
            assert ratio == pytest.approx(1.3, rel=0.06)  # 1 + 6/20, at the nearest level
            raised += 1
        else:
            assert ratio == 1
            assert rows.draw[k] == 0
    assert 8 < raised < 19
    assert not rows.draw[::2].any()
    most = solvers.heun(a, timesteps, churn=1e9, churn_range=EVERY)
    ratios = sigmas[most.timesteps[2::2]] / sigmas[most.timesteps[1::2]]
    assert ratios.max() == pytest.approx(math.sqrt(2), rel=0.05)


@pytest.mark.parametrize('name', ['dpmpp_2m', 'heun'])
def test_guidance(name):
    """A guided run is the run of the guided denoiser, label by label."""
    process = d.make_diffusion(DiffusionConfig(objective='x0'))
    sampler = s.make_sampler(
        s.SamplerConfig(name, steps=5, guidance_scale=3.0, clip=False), process, num_classes=10
    )
    keys = s.sample_keys(0, range(3))
    labels = jnp.asarray([4, 0, 9], jnp.int32)

    def denoise(x, t, labels):
        return 0.1 * jnp.sin(x) + 0.05 * labels.astype(jnp.float32)[:, None, None, None]

    images = sample(guided(denoise, labels, 3.0), keys, (4, 4, 1), sampler)

    def by_hand(x, t):
        dropped = denoise(x, t, jnp.full_like(labels, -1))
        return dropped + 3 * (denoise(x, t, labels) - dropped)

    np.testing.assert_allclose(images, sample(by_hand, keys, (4, 4, 1), sampler), atol=2e-5)
    # −0.05 + 3 · 0.05 · (label + 1), beside a sine of at most 0.1.
    np.testing.assert_allclose(
        np.mean(images, axis=(1, 2, 3)), 0.1 + 0.15 * np.array([4, 0, 9]), atol=0.1
    )


def spread(rows, memory, a, leak, variance):
    """Standard deviation of what a sampler makes of N(0, variance), exactly, if ε is predicted too
    small by the share `leak`.
    """
    covariance = np.diag([1.0, 0.0])  # covariance of x and the memory
    for k, t in enumerate(rows.timesteps):
        signal, noise = math.sqrt(a[t]), math.sqrt(1 - a[t])
        x0 = signal * variance / (a[t] * variance + 1 - a[t])
        x0 += leak * (1 / signal - x0)
        eps = (1 - signal * x0) / noise
        step = np.array(
            [
                [rows.state[k] + rows.x0[k] * x0 + rows.noise[k] * eps, rows.memory[k]],
                [{'x0': x0, 'noise': eps}.get(memory, 0), 0],
            ]
        )
        covariance = step @ covariance @ step.T
        covariance[0, 0] += rows.draw[k] ** 2
    return math.sqrt(covariance[0, 0])


def test_ddim_keeps_what_a_leaky_network_leaves_and_ddpm_forgets_it():
    """With the exact denoiser no sampler adds noise: neither has left any at the end. If the
    network removes a share δ too little of the noise at every level, the deterministic flow
    multiplies its share by (σ_T/σ)^δ, however many steps it takes, while fresh noise keeps
    ddpm's at 1 + O(δ): why images of a network early in its training are grainier with ddim."""
    a = alphas()
    every = subsets.timestep_subset(a, 1000, 'linear')
    ddpm = solvers.ancestral(a, every, large=True)
    for std in (0.03, 0.1, 0.5):
        exact, leaky = spread(ddpm, '', a, 0.0, std**2), spread(ddpm, '', a, 0.05, std**2)
        assert exact == pytest.approx(std, rel=0.02)
        assert leaky / exact < 1.07
        for steps, schedule in itertools.product((50, 100, 1000), ('linear', 'quadratic')):
            rows = solvers.ddim(a, subsets.timestep_subset(a, steps, schedule), eta=0.0)
            exact, leaky = spread(rows, '', a, 0.0, std**2), spread(rows, '', a, 0.05, std**2)
            assert exact < 1.01 * std  # few steps blur rather than add grain
            assert leaky / exact > 1.25
    # Fine noise where there is none in the data: what stays is at most the lowest noise level.
    for rows, memory in (
        (ddpm, ''),
        (solvers.ddim(a, subsets.timestep_subset(a, 50, 'linear'), eta=0.0), ''),
        (solvers.dpm_solver_2m(a, subsets.timestep_subset(a, 20, 'log_snr')), 'x0'),
        (solvers.heun(a, subsets.timestep_subset(a, 18, 'karras'), churn_range=EVERY), 'noise'),
    ):
        assert spread(rows, memory, a, 0.0, 1e-12) < 1e-5


def test_a_step_to_the_same_timestep_changes_nothing():
    """ddpm-torch takes a timestep twice where its squares round to one; here it comes once."""
    a = alphas()
    twice = solvers.ddim(a, np.array([0, 5, 5, 20], np.int32), eta=1.0)
    once = solvers.ddim(a, np.array([0, 5, 20], np.int32), eta=1.0)
    rows = [0, 2, 3]
    for name in ('timesteps', 'x0', 'noise', 'draw'):
        np.testing.assert_array_equal(getattr(twice, name)[rows], getattr(once, name))
    signal, noise = math.sqrt(a[5]), math.sqrt(1 - a[5])
    np.testing.assert_allclose([twice.x0[1], twice.noise[1], twice.draw[1]], [signal, noise, 0])
