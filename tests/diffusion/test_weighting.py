"""Loss weightings: their equations, the same problem for every prediction, and the learned one's
convergence.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.peer_values import FIXTURES

from jaxunet.config import Config, DiffusionConfig, LossConfig, resolve, to_dict
from jaxunet.diffusion.process import make_diffusion
from jaxunet.diffusion.weighting import fixed_table, make_weighting
from jaxunet.runtime.errors import UserError

LINEAR = make_diffusion(DiffusionConfig())
SNR = LINEAR.alphas_cumprod / (1 - LINEAR.alphas_cumprod)


def table(**fields):
    weighting = make_weighting(LossConfig(**fields), LINEAR)
    return np.asarray(weighting.table(weighting.init()))


def test_uniform_is_one_and_has_no_state():
    weighting = make_weighting(LossConfig(), LINEAR)
    assert weighting.init() == ()
    assert (table() == 1).all()


@pytest.mark.parametrize('gamma', [1.0, 5.0])
def test_min_snr(gamma):
    weights = table(weighting='min_snr', min_snr_gamma=gamma)
    noisy = gamma >= SNR
    assert 0 < noisy.sum() < 1000
    assert (weights[noisy] == 1).all()
    np.testing.assert_allclose(weights[~noisy], gamma / SNR[~noisy], rtol=1e-6)


def test_p2_and_soft_min_snr():
    np.testing.assert_allclose(
        table(weighting='p2', p2_gamma=0.5, p2_k=2.0), 1 / np.sqrt(2 + SNR), rtol=1e-6
    )
    # σ² = 1/SNR: on x_0 the weight is 1/(σ² + σ_d²), which is between min(SNR, γ)/2 and min(SNR,
    # γ), γ = 1/σ_d².
    soft = table(weighting='soft_min_snr', soft_min_snr_sigma=0.5)
    np.testing.assert_allclose(soft * SNR, 1 / (1 / SNR + 0.25), rtol=1e-5)
    hard = table(weighting='min_snr', min_snr_gamma=4.0)
    assert (soft <= hard * (1 + 1e-6)).all()
    assert (soft >= 0.5 * hard * (1 - 1e-6)).all()


def test_speed():
    weights = table(weighting='speed')
    assert (weights[700:] == 1).all()
    slope = np.gradient(1 - LINEAR.alphas_cumprod)
    assert weights[slope.argmax()] == pytest.approx(0.6)  # λ where the change is fastest
    np.testing.assert_allclose(
        weights[:700], 0.4 + 0.2 * (slope - slope.min())[:700] / np.ptp(slope), rtol=1e-5
    )


@pytest.mark.parametrize('schedule', ['linear', 'cosine'])
def test_p2_has_the_weights_of_speeds_code(schedule):
    diffusion = make_diffusion(DiffusionConfig(schedule=schedule))
    expected = np.load(FIXTURES / 'methods_golden.npz')[f'speed_weights_{schedule}']
    np.testing.assert_allclose(fixed_table(LossConfig(weighting='p2'), diffusion), expected)


@pytest.mark.parametrize('name', ['min_snr', 'soft_min_snr', 'p2'])
@pytest.mark.parametrize('prediction', ['x0', 'v'])
def test_the_problem_does_not_depend_on_the_prediction(name, prediction):
    """An error δ of x_0 is √SNR δ of ε and δ/√(1 − ᾱ) of v: the weighted squares agree."""
    other = make_diffusion(DiffusionConfig(objective=prediction))
    of_noise, of_other = (fixed_table(LossConfig(weighting=name), d) for d in (LINEAR, other))
    square = 1.0 if prediction == 'x0' else 1 / (1 - LINEAR.alphas_cumprod)
    np.testing.assert_allclose(of_other * square, of_noise * SNR, rtol=1e-9)
    if name == 'min_snr':
        published = np.minimum(SNR, 5) / (1 if prediction == 'x0' else SNR + 1)
        np.testing.assert_allclose(of_other, published, rtol=1e-9)


@pytest.mark.parametrize('sampling', ['uniform', 'skewed'])
def test_uncertainty_learns_the_logarithm_of_the_mean_loss(sampling):
    """Losses of known mean μ_t with noise: u(t) → ln μ_t, whichever way t is drawn."""
    steps = 50
    diffusion = make_diffusion(DiffusionConfig(steps=steps))
    weighting = make_weighting(LossConfig(weighting='uncertainty'), diffusion)
    mean = jnp.asarray(np.geomspace(1.0, 0.01, steps), jnp.float32)
    p = np.ones(steps) if sampling == 'uniform' else np.linspace(3, 1, steps)
    p = jnp.asarray(p / p.sum(), jnp.float32)

    def step(state, key):
        t_key, loss_key = jax.random.split(key)
        t = jax.random.choice(t_key, steps, (128,), p=p)
        loss = mean[t] * jax.random.uniform(loss_key, (128,), minval=0.5, maxval=1.5)
        return weighting.update(state, t, loss, 1 / (steps * p[t])), None

    start = weighting.init()
    assert (np.asarray(weighting.table(start)) == 1).all()
    state, _ = jax.lax.scan(step, start, jax.random.split(jax.random.key(0), 3000))
    np.testing.assert_allclose(np.log(weighting.table(state) * mean), 0, atol=0.25)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'weighting': 'minsnr'},
            r'loss.weighting: expected one of .* found .minsnr.; did you mean "min_snr"',
        ),
        ({'min_snr_gamma': 0.0}, r'loss.min_snr_gamma: expected more than 0, found 0.0'),
        ({'speed_lambda': 1.5}, r'loss.speed_lambda: expected 0 to 1, found 1.5'),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        resolve(to_dict(Config().replace(loss=fields)))
    if 'weighting' in fields:
        with pytest.raises(UserError, match=message):
            make_weighting(LossConfig(**fields), LINEAR)
