"""The loss of consistency tuning: a closed form, the authors' code, devices and a resumed run."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from consistency_golden import CASES, DATA, LEVELS, inputs, network
from support.bench import Bench
from support.peer_values import FIXTURES
from support.tiny import tiny_config
from support.turns import in_turn

from jaxunet.config import DiffusionConfig
from jaxunet.config.consistency import q_of
from jaxunet.config.samplers import CONSISTENCY_LEVELS, FIRST_LEVEL
from jaxunet.diffusion.levels import signal_and_noise, time_of_sigma
from jaxunet.diffusion.process import make_diffusion, network_input, target_factors
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import make_sampler
from jaxunet.training import consistency
from jaxunet.training.batch import split_keys

pytestmark = pytest.mark.usefixtures('shared_steps')

EDM, FLOW = (DiffusionConfig(objective='consistency', consistency_of=of) for of in ('edm', 'flow'))
# So many timesteps that the lowest is below the levels of the tests.
V = DiffusionConfig(objective='consistency', consistency_of='v', schedule='cosine', steps=10**5)
ALL = pytest.mark.parametrize('config', [EDM, FLOW, V], ids=lambda config: config.consistency_of)
SPREAD = 0.5  # standard deviation of the Gaussian data


def predicting(diffusion, image):
    """Returns a network whose prediction of x_0 is `image(x, σ)` of x = x_0 + σ ε."""

    def predict(seen, time):
        signal, noise = (a[:, None, None, None] for a in signal_and_noise(diffusion.config, time))
        xt = seen / network_input(diffusion, jnp.ones_like(seen), time)
        x0 = image(xt / signal, noise / signal)
        a, b = target_factors(diffusion, time)
        return a * x0 + b * (xt - signal * x0) / noise

    return predict


@pytest.mark.parametrize('name', CASES)
@ALL
def test_losses_and_gradients_are_those_of_the_authors_code(name, config):
    """Networks of v and flow predict the same image, so that they have the same loss."""
    golden = np.load(FIXTURES / 'consistency_golden.npz')
    q, stage, c = CASES[name]
    process = make_diffusion(dataclasses.replace(config, consistency_c=c))
    with jax.enable_x64(True):
        values = {key: jnp.asarray(value) for key, value in inputs().items()}
        images, noise = (jnp.moveaxis(values.pop(key), 1, -1) for key in ('images', 'noise'))
        time = time_of_sigma(process.config, jnp.asarray(LEVELS))

        def losses(weights):
            def image(x, sigma):
                total = sigma**2 + DATA**2
                found = network(jnp, weights, x / jnp.sqrt(total), jnp.log(sigma) / 4)
                return DATA**2 / total * x + sigma * DATA / jnp.sqrt(total) * found

            call = predicting(process, image)
            decay = 1 / q ** (stage + 1)
            return consistency.consistency_losses(
                process, call, call, images, noise, time, decay=decay
            )

        with jax.numpy_rank_promotion('allow'):
            found = losses(values)
            gradients = jax.grad(lambda weights: jnp.mean(losses(weights)))(values)
    np.testing.assert_allclose(found, golden[f'{name}_losses'], rtol=1e-9)
    for key, gradient in gradients.items():
        np.testing.assert_allclose(gradient, golden[f'{name}_{key}'], rtol=1e-7, atol=1e-10)


def best_factors(process, sigmas, decay):
    """Returns ρ that minimises our loss of D(x_t) = ρ x_t against D(x_r) = x_r, in float64.

    The data are N(0, s²), and the loss is a mean over them and the noise by quadrature. With c > 0
    it has the same minimum as with 0 and is smooth, so that Newton's method finds it.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(24)
    x0, noise = (np.array(a).ravel() for a in np.meshgrid(SPREAD * points, points))
    mass = np.outer(weights, weights).ravel() / weights.sum() ** 2

    def mean_loss(factor, sigma):
        time = jnp.full(len(x0), time_of_sigma(process.config, sigma[None])[0])
        image, e = (jnp.asarray(a).reshape(-1, 1, 1, 1) for a in (x0, noise))
        linear, target = (
            predicting(process, lambda x, _, k=k: k * x) for k in (factor, jnp.ones(()))
        )
        losses = consistency.consistency_losses(
            process, linear, target, image, e, time, decay=decay
        )
        return jnp.sum(losses * jnp.asarray(mass))

    slope = jax.grad(mean_loss)

    def newton(sigma):
        def step(_, factor):
            return factor - slope(factor, sigma) / jax.grad(slope)(factor, sigma)

        return jax.lax.fori_loop(0, 8, step, jnp.asarray(0.9))

    return np.asarray(jax.jit(lambda s: jax.lax.map(newton, s, batch_size=64))(jnp.asarray(sigmas)))


# q -> variances over that of the data, of one evaluation at 80 and two through 0.821.
FIXED_POINTS = {2: (0.356, 0.223), 16: (0.877, 0.867), 256: (0.993, 0.992)}


@pytest.mark.parametrize(
    ('q', 'of'), in_turn({str(q): q for q in FIXED_POINTS}, ('edm',), ('flow',))
)
def test_a_linear_model_of_gaussian_data_reaches_the_fixed_point(q, of):
    config, decay = {'edm': EDM, 'flow': FLOW}[of], 1 / q
    process = make_diffusion(dataclasses.replace(config, consistency_c=1000.0))
    sampler = make_sampler(SamplerConfig(steps=2), make_diffusion(config))
    lower_level = jax.jit(lambda sigma: consistency.earlier_level(sigma, decay))

    def factor(start):
        chain = [start]
        while chain[-1] > 1e-3:
            lower, _ = lower_level(jnp.asarray(chain[-1:]))
            chain.append(lower.item())
        # Below the last level D(x) = x but for 1e-5.
        return np.prod(best_factors(process, np.array([s for s in chain if s > 1e-3]), decay))

    with jax.enable_x64(True):
        jumps = [factor(level) for level in (FIRST_LEVEL, *CONSISTENCY_LEVELS[2])]
    variance, table = sampler.initial**2, sampler.coefficients
    found = []
    for k, jump in enumerate(jumps):
        signal, _ = signal_and_noise(config, sampler.times[k])
        image = (jump / signal) ** 2 * variance
        found.append(image / SPREAD**2)
        variance = table.x0[k] ** 2 * image + table.draw[k] ** 2
    np.testing.assert_allclose(found, FIXED_POINTS[q], rtol=0.01)


def tuning(of='edm', **changes):
    """The config of a run that tunes."""
    diffusion = {'objective': 'consistency', 'consistency_of': of} | changes.pop('diffusion', {})
    return tiny_config(diffusion=diffusion, model={'dropout': 0.25}, **changes)


def test_both_passes_drop_the_same(source):
    """Otherwise the loss would grow as fast as q, by which their levels come together."""
    rows = jnp.arange(8)
    batch = {'image': jnp.asarray(source.load(np.arange(8))), 'label': rows, 'row': rows}
    stages = {'consistency_q': 16, 'consistency_stages': 3}
    config = tuning(diffusion=stages, train={'steps': 3}).replace(model={'zero_init': False})
    bench = Bench(config, source)
    keys = split_keys(jax.random.key(0), batch['row'], in_pairs=False)
    loss_fn = jax.jit(functools.partial(consistency.loss_fn, bench.make(None).parts))
    found = []
    for step, q in ((1, 256), (2, 4096)):
        assert 1 / consistency.decay_at(config, jnp.asarray(step)) == q
        state = dataclasses.replace(bench.state, step=jnp.asarray(step))
        _, (loss, _) = loss_fn(state.params, state, keys, batch, jnp.ones(()))
        found.append(float(loss))
    assert found[1] < 2 * found[0]


def test_the_target_has_no_gradient():
    process = make_diffusion(EDM)

    def call(weight):
        return lambda x, time: weight * x

    def mean(weight, frozen):
        x0, noise = jnp.ones((3, 2, 2, 1)), jnp.linspace(-1, 1, 12).reshape(3, 2, 2, 1)
        time = time_of_sigma(EDM, jnp.asarray([0.5, 2.0, 9.0]))
        return jnp.mean(
            consistency.consistency_losses(
                process, call(weight), call(frozen), x0, noise, time, decay=1 / 16
            )
        )

    half = jnp.asarray(0.5)
    both = jax.grad(lambda weight: mean(weight, weight))(half)
    assert both == jax.grad(lambda weight: mean(weight, half))(half) != 0


def test_equal_images_have_no_loss_and_no_gradient():
    """The root of 0 has no derivative; 16 bits may round two images to the same one."""
    process = make_diffusion(EDM)

    def loss(weight):
        call = predicting(process, lambda x, _: weight * jnp.zeros_like(x))
        zeros, time = jnp.zeros((2, 2, 2, 1)), time_of_sigma(EDM, jnp.asarray([1.0, 3.0]))
        return jnp.mean(
            consistency.consistency_losses(process, call, call, zeros, zeros, time, decay=1 / 16)
        )

    assert jax.value_and_grad(loss)(jnp.asarray(1.0)) == (0, 0)


def test_stages_divide_the_run():
    config = tuning(train={'steps': 8}, diffusion={'consistency_q': 3, 'consistency_stages': 4})
    found = [1 / float(consistency.decay_at(config, jnp.asarray(step))) for step in range(10)]
    np.testing.assert_allclose(found, [3, 3, 9, 9, 27, 27, 81, 81, 81, 81], rtol=1e-6)


def test_q_is_chosen_by_the_number_of_stages():
    for stages, q in ((1, 16), (2, 4), (4, 2), (6, 2)):
        config = tuning(diffusion={'consistency_stages': stages})
        assert q_of(config) == q
    assert q_of(tuning(diffusion={'consistency_q': 7})) == 7
