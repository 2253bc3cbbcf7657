"""The variational bound of whole models against guided-diffusion's formulas in float64 NumPy.

The oracle below is `calc_bpd_loop` of guided-diffusion's `gaussian_diffusion.py` (`_vb_terms_bpd`,
`_prior_bpd`, `normal_kl`, `discretized_gaussian_log_likelihood`) on the process that its
`SpacedDiffusion` makes; only the network's output comes from this project. With a formula in place
of the network, the terms are also those of its own code (`fixtures/process_golden.npz`).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conditional_golden import prediction
from process_golden import PROCESSES, SEED, pixels
from scipy.special import erf
from support.commands import call
from support.tiny import tiny_config
from support.weight_cases import SMALL, STATED, random_params, torch_bytes

from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config
from jaxunet.data.sources import open_source
from jaxunet.diffusion.process import make_diffusion, model_log_variance
from jaxunet.evaluate.bound import Bound, LikelihoodOptions, measure_likelihood, save_terms
from jaxunet.evaluate.variational_bound import Likelihood, Terms, check_has_bound
from jaxunet.metrics.evaluation import Result
from jaxunet.model.unet import UNet, build_unet
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.subsets import respaced_timesteps
from jaxunet.weights import guided_diffusion
from jaxunet.weights.files import write_weights

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures' / 'e54d28d'
CONDITIONAL = str(FIXTURES / 'conditional')
GOLDEN = np.load(FIXTURES.parent / 'process_golden.npz')


def schedule(config) -> np.ndarray:
    """β as guided-diffusion's get_named_beta_schedule."""
    steps = config.diffusion.steps
    if config.diffusion.schedule == 'linear':
        return np.linspace(1e-4 * 1000 / steps, 0.02 * 1000 / steps, steps)

    def bar(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    return np.array([min(1 - bar((i + 1) / steps) / bar(i / steps), 0.999) for i in range(steps)])


def exact_cdf(x):
    return 0.5 * (1 + erf(x / math.sqrt(2)))


def tanh_cdf(x):
    """approx_standard_normal_cdf of guided-diffusion."""
    return 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def normal_kl(mean1, logvar1, mean2, logvar2):
    return 0.5 * (
        -1 + logvar2 - logvar1 + np.exp(logvar1 - logvar2) + (mean1 - mean2) ** 2 * np.exp(-logvar2)
    )


def log_likelihood(x, mean, log_scale, cdf):
    centred, inverse = x - mean, np.exp(-log_scale)
    upper, lower = cdf(inverse * (centred + 1 / 255)), cdf(inverse * (centred - 1 / 255))
    return np.log(
        np.maximum(
            np.where(x < -0.999, upper, np.where(x > 0.999, 1 - lower, upper - lower)), 1e-12
        )
    )


class Oracle:
    """Terms (images, timesteps) of a model for some digits."""

    def __init__(self, model, rows, timesteps, *, variance, clip, seed):
        config = model.config
        source = open_source('digits:', image_shape=config.image_shape)
        x0 = source.load(rows).astype(np.float64) / 127.5 - 1
        kept = np.cumprod(1 - schedule(config))[timesteps]
        previous = np.append(1.0, kept[:-1])
        betas = 1 - kept / previous
        small = betas * (1 - previous) / (1 - kept)
        clipped = np.log(np.append(small[1], small[1:]))
        self.small = clipped
        large = np.log(np.append(small[1], betas[1:]))
        network = build_unet(config, XLA)
        params, labels = jax.device_put((model.params, source.labels[rows]))
        labels = labels if config.model.num_classes else None
        predict = jax.jit(lambda x, t: network.predict(params, x, t, labels))
        columns = []
        for i, t in enumerate(timesteps):
            noise = np.stack([draw(seed, row, t, config.image_shape) for row in rows])
            xt = math.sqrt(kept[i]) * x0 + math.sqrt(1 - kept[i]) * noise
            output = np.asarray(
                predict(xt.astype(np.float32), np.full(len(rows), t, np.int32)), np.float64
            )
            if config.diffusion.learn_sigma:
                output, values = np.split(output, 2, axis=-1)
            if variance == 'learned':
                fraction = (values + 1) / 2
                log_variance = fraction * np.log(betas[i]) + (1 - fraction) * clipped[i]
            else:
                log_variance = {'fixed_small': clipped, 'fixed_large': large}[variance][i]
            assert config.diffusion.objective == 'epsilon'
            predicted = xt / math.sqrt(kept[i]) - math.sqrt(1 / kept[i] - 1) * output
            predicted = np.clip(predicted, -1, 1) if clip else predicted
            from_x0 = betas[i] * math.sqrt(previous[i]) / (1 - kept[i])
            from_xt = (1 - previous[i]) * math.sqrt(1 - betas[i]) / (1 - kept[i])
            mean, true_mean = (from_x0 * x + from_xt * xt for x in (predicted, x0))
            if i > 0:
                term = normal_kl(true_mean, clipped[i], mean, log_variance)
            else:
                term, approximate = (
                    -log_likelihood(x0, mean, 0.5 * log_variance, cdf)
                    for cdf in (exact_cdf, tanh_cdf)
                )
                self.approximate_decoder = flat(approximate) / math.log(2)
            noise_again = (xt / math.sqrt(kept[i]) - predicted) / math.sqrt(1 / kept[i] - 1)
            errors = (flat((a - b) ** 2) for a, b in ((predicted, x0), (noise_again, noise)))
            columns.append([flat(term) / math.log(2), *errors])
        self.bound, self.x0_error, self.noise_error = np.moveaxis(np.array(columns), 0, 2)
        prior = normal_kl(math.sqrt(kept[-1]) * x0, np.log(1 - kept[-1]), 0.0, 0.0)
        self.prior = flat(prior) / math.log(2)


def flat(values: np.ndarray) -> np.ndarray:
    return values.mean(axis=(1, 2, 3))


def draw(seed: int, row: int, t: int, shape: tuple[int, ...]) -> np.ndarray:
    """The noise of an image at a timestep."""
    key = jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), row)
    return np.asarray(jax.random.normal(jax.random.fold_in(key, t), shape), np.float64)


def bound(path=CONDITIONAL, *, given=None, **options):
    """The bound of a model with its first average."""
    (found,) = measure_likelihood(path, [''], LikelihoodOptions(**options), **(given or {}))
    return found


def test_a_fixed_variance_on_every_timestep():
    """Three images in batches of two, so that the last batch is padded."""
    options = {'variance': 'fixed_large', 'clip': False, 'seed': 5}
    measured = bound(reference='digits:', num_samples=3, batch_size=2, **options)
    rows = np.sort(np.random.default_rng(5).choice(1797, 3, replace=False))
    model = load_model(CONDITIONAL)
    want = Oracle(model, rows, np.arange(40), **options)
    for name in ('prior', 'bound', 'x0_error', 'noise_error'):
        np.testing.assert_allclose(
            getattr(measured.terms, name), getattr(want, name), rtol=2e-3, atol=2e-4
        )
    total = want.prior + want.bound.sum(axis=1)
    assert measured.result.value == pytest.approx(total.mean(), rel=1e-4)
    found = model_log_variance(
        make_diffusion(model.config.diffusion), None, jnp.arange(40), 'fixed_small'
    )
    np.testing.assert_allclose(found[:, 0, 0, 0], want.small, rtol=1e-5)


def process_of(options: dict[str, object]) -> Config:
    """The config of a process of `PROCESSES`."""
    return Config().replace(
        diffusion={
            'learn_sigma': options.get('learn_sigma', False),
            'steps': options.get('steps', 1000),
            'schedule': options.get('noise_schedule', 'linear'),
            'objective': 'x0' if options.get('predict_xstart') else 'epsilon',
        }
    )


@pytest.mark.parametrize('name', PROCESSES)
def test_every_term_is_that_of_guided_diffusions_code(name, tmp_path, monkeypatch):
    options, clip = PROCESSES[name]
    config = process_of(options)

    def predict(self, params, x, t, labels):
        parts = prediction(jnp, x, t[:, None, None, None])
        return jnp.concatenate(parts[: 1 + config.diffusion.learn_sigma], axis=-1)

    monkeypatch.setattr(UNet, 'predict', predict)
    diffusion = make_diffusion(config.diffusion)
    respacing = options.get('timestep_respacing', str(diffusion.steps))
    images = pixels()
    np.savez(tmp_path / 'images.npz', images=images)
    likelihood = Likelihood(
        config,
        respaced_timesteps(diffusion.alphas_cumprod, respacing),
        variance=name,
        clip=clip,
        batch_size=len(images),
        devices=jax.devices()[:1],
    )
    source = open_source(str(tmp_path / 'images.npz'), image_shape=images.shape[1:])
    terms = likelihood({}, source, np.arange(len(images)), seed=SEED)
    close = np.testing.assert_allclose
    close(terms.prior, GOLDEN[f'{name}_prior_bpd'], rtol=1e-3, atol=1e-7)
    close(terms.x0_error, GOLDEN[f'{name}_xstart_mse'], rtol=1e-5, atol=1e-6)
    close(terms.noise_error, GOLDEN[f'{name}_mse'], rtol=1e-5, atol=1e-6)
    # Late variances are nearly equal, and their difference is divided by a small β.
    close(terms.bound[:, 1:], GOLDEN[f'{name}_vb'][:, 1:], rtol=1e-4, atol=1e-6)
    exact, approximate = decoder_terms(config, name, images, clip=clip)
    close(terms.bound[:, 0], exact, rtol=1e-4)
    close(approximate, GOLDEN[f'{name}_vb'][:, 0], rtol=1e-4)
    close(terms.total - exact + approximate, GOLDEN[f'{name}_total_bpd'], rtol=1e-4)


def decoder_terms(config, variance, images, *, clip):
    """Bits per dimension of the decoder, with the normal distribution and its approximation.

    The network is the formula of `PROCESSES`; the first timestep visited is 0, the second 1 or 200.
    """
    kept = np.cumprod(1 - schedule(config))
    second = 200 if variance == 'learned' else 1  # of the timesteps visited
    beta = 1 - kept[second] / kept[0]
    log_variance = np.log(beta * (1 - kept[0]) / (1 - kept[second]))  # clipped at 0
    x0 = images / 127.5 - 1
    noise = np.stack([draw(SEED, row, 0, images.shape[1:]) for row in range(len(images))])
    xt = math.sqrt(kept[0]) * x0 + math.sqrt(1 - kept[0]) * noise
    output, values = prediction(np, xt, 0)
    if variance == 'learned':
        fraction = (values + 1) / 2
        log_variance = fraction * np.log(1 - kept[0]) + (1 - fraction) * log_variance
    predicted = output
    if config.diffusion.objective == 'epsilon':
        predicted = (xt - math.sqrt(1 - kept[0]) * output) / math.sqrt(kept[0])
    predicted = np.clip(predicted, -1, 1) if clip else predicted
    return [
        flat(-log_likelihood(x0, predicted, 0.5 * log_variance, cdf)) / math.log(2)
        for cdf in (exact_cdf, tanh_cdf)
    ]


def test_a_learned_variance_on_some_timesteps_by_the_command(tmp_path):
    terms, rows = tmp_path / 'terms.npz', tmp_path / 'rows.jsonl'
    path = str(FIXTURES / 'adaptive')
    out = call(
        'jaxunet.evaluate', f'--checkpoint={path}', '--metrics=nll', '--reference=digits:',
        '--num_samples=2', '--respacing=10', '--seed=7', '--ema=0.9', f'--terms={terms}',
        f'--output={rows}',
    )  # fmt: skip
    model = load_model(path, ema='0.9')
    chosen = np.sort(np.random.default_rng(7).choice(1797, 2, replace=False))
    # The timesteps that guided-diffusion's space_timesteps(40, [10]) gives.
    timesteps = np.array([0, 4, 9, 13, 17, 22, 26, 30, 35, 39])
    want = Oracle(model, chosen, timesteps, variance='learned', clip=True, seed=7)
    found = np.load(terms)
    np.testing.assert_array_equal(found['timesteps'], timesteps)
    for name, field in (('vb', 'bound'), ('xstart_mse', 'x0_error'), ('mse', 'noise_error')):
        np.testing.assert_allclose(
            found[name], getattr(want, field).mean(axis=0), rtol=2e-3, atol=2e-4, err_msg=name
        )
    np.testing.assert_allclose(found['prior'], want.prior, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found['bpd'], want.prior + want.bound.sum(axis=1), rtol=1e-4)
    # guided-diffusion approximates the normal distribution in the decoder's term.
    assert found['vb'][0] == pytest.approx(want.approximate_decoder.mean(), abs=2e-3)
    row = json.loads(rows.read_text())
    assert f'nll: {row["value"]:.6g}  [unit=bits per dimension; prior={row["prior"]:.6g}; ' in out
    assert (row['num_images'], row['timesteps'], row['variance']) == (2, 10, 'learned')
    parts = row['prior'] + row['transitions'] + row['decoder']
    assert row['value'] == pytest.approx(parts) == pytest.approx(found['bpd'].mean())


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'variance': 'learned'}, 'variance: learned needs a model with diffusion.learn_sigma'),
        ({'num_samples': 2000}, '--num_samples: 2000 asked for, but digits: has 1797 images'),
        ({'respacing': '50'}, '40'),
    ],
)
def test_options_that_do_not_suit_the_model(options, message):
    with pytest.raises(UserError, match=message):
        bound(**({'reference': 'digits:'} | options))


def test_too_few_held_out_images(monkeypatch):
    model = load_model(CONDITIONAL)
    held = dataclasses.replace(model, config=model.config.replace(data={'holdout': 3}))
    monkeypatch.setattr(f'{measure_likelihood.__module__}.load_model', lambda *_, **__: held)
    message = '--num_samples: 4 asked for, but digits: has 3 images, held out of training'
    with pytest.raises(UserError, match=f'^{message}$'):
        bound(num_samples=4)


def test_images_that_the_model_cannot_take(tmp_path):
    np.savez(tmp_path / 'plain.npz', images=np.zeros((3, 8, 8, 1), np.uint8))
    message = r'plain\.npz: expected images in the 10 classes .* found 0 classes; give them labels'
    with pytest.raises(UserError, match=message):
        bound(reference=str(tmp_path / 'plain.npz'))
    config = tiny_config(data={'path': ''})
    write_weights(tmp_path / 'a.safetensors', fresh_state(config).params, config)
    with pytest.raises(UserError, match=r'--reference: missing; .*a\.safetensors does not name'):
        bound(str(tmp_path / 'a.safetensors'))


def test_a_file_of_another_program(tmp_path):
    """Its flags say what it leaves open, and it names no images."""
    state = guided_diffusion.from_tree(random_params(SMALL), SMALL, new_attention_order=False)
    (tmp_path / 'a.pt').write_bytes(torch_bytes(state))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / 'images.npz', images=pixels)
    with pytest.raises(UserError, match=r'--reference: missing; .*a\.pt does not name'):
        bound(str(tmp_path / 'a.pt'), given=STATED | {'new_attention_order': False})
    stated = ('--num_head_channels=32', '--image_size=16', '--schedule=linear')
    stated += ('--diffusion_steps=1000', '--objective=epsilon', '--nonew_attention_order')
    call(
        *('jaxunet.evaluate', '--metrics=nll', '--respacing=2', '--batch_size=2', *stated),
        f'--checkpoint={tmp_path / "a.pt"}',
        f'--reference={tmp_path / "images.npz"}',
        f'--output={tmp_path / "rows.jsonl"}',
    )
    row = json.loads((tmp_path / 'rows.jsonl').read_text())
    assert (row['num_images'], row['timesteps']) == (2, 2)
    assert row['value'] > 0
    assert 'a.pt: guided-diffusion names' in row['weights']


@pytest.mark.parametrize('objective', ['edm', 'flow'])
def test_objectives_without_a_bound(objective):
    with pytest.raises(UserError, match=rf'^nll: .*objective={objective} has continuous'):
        check_has_bound(tiny_config(diffusion={'objective': objective}))


def test_terms_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A full disk leaves the file of an earlier command as it was."""

    def full(file, **arrays):
        file.write(b'PK')
        raise OSError(errno.ENOSPC, 'No space left on device')

    path = tmp_path / 'terms.npz'
    path.write_bytes(b'earlier')
    terms = Terms(np.zeros(1), *(np.zeros((1, 2)) for _ in range(3)))
    monkeypatch.setattr(np, 'savez', full)
    with pytest.raises(UserError, match=r'^--terms: .*terms\.npz: cannot be written: No space'):
        save_terms(path, Bound(Result('nll', 0.0, None, {}), terms, np.arange(2)))
    assert [p.name for p in tmp_path.iterdir()] == ['terms.npz']
    assert path.read_bytes() == b'earlier'
