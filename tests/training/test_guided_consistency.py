"""Guidance folded into consistency tuning: Euler's step in closed form, and a run's teacher."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.load import load_initial
from jaxunet.checkpoint.resumable import check_resumable
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import DiffusionConfig
from jaxunet.data.holdout import hold_out
from jaxunet.diffusion.levels import signal_and_noise, time_of_sigma
from jaxunet.diffusion.process import make_diffusion, network_input, target_factors
from jaxunet.model.cost import forward_flops, products
from jaxunet.runtime.errors import UserError
from jaxunet.training import consistency
from jaxunet.training.batch import split_keys
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.weights import write_weights

pytestmark = pytest.mark.usefixtures('shared_steps')

MEAN, SPREAD = 0.7, 0.3  # classes N(±MEAN, SPREAD²), equally likely
SCALE = 1.75
OF = pytest.mark.parametrize('of', ['edm', 'flow', 'v'])


def with_class(x, sigma, sign=1):
    """The mean of a class under noise, D(x, σ | class)."""
    return (SPREAD**2 * x + sigma**2 * sign * MEAN) / (SPREAD**2 + sigma**2)


def without_class(x, sigma):
    """The mean of both classes under noise, D(x, σ | no class)."""
    first = 1 / (1 + jnp.exp(-2 * MEAN * x / (SPREAD**2 + sigma**2)))
    return first * with_class(x, sigma) + (1 - first) * with_class(x, sigma, -1)


def levels(process, time):
    return (a[:, None, None, None] for a in signal_and_noise(process.config, time))


def predicting(process, image):
    """A network whose prediction of x_0 is `image(x, σ)` of x = x_0 + σ ε."""

    def predict(seen, time):
        signal, noise = levels(process, time)
        x = seen / network_input(process, jnp.ones_like(seen), time) / signal
        x0 = image(x, noise / signal)
        a, b = target_factors(process, time)
        return a * x0 + b * (x - x0) * signal / noise

    return predict


def images_under(x, sigma):
    """The y of the class + under x = y + σ e, (24, 1, 1, 1), with their e and their share."""
    points, weights = np.polynomial.hermite_e.hermegauss(24)
    deviation = SPREAD * sigma / np.sqrt(SPREAD**2 + sigma**2)
    images = jnp.asarray(with_class(x, sigma) + deviation * points).reshape(-1, 1, 1, 1)
    return images, (x - images) / sigma, weights / weights.sum()


@OF
@pytest.mark.parametrize('sigma', [0.2, 1.5, 60.0])
def test_the_mean_of_the_next_image_is_a_step_of_guided_sampling(of, sigma):
    """Euler's step of dx/dσ = (x − D_w)/σ, D_w = D(no class) + w (D(class) − D(no class))."""
    process = make_diffusion(DiffusionConfig(objective='consistency', consistency_of=of))
    seen_at = {}

    def frozen(seen, time):
        signal, noise = levels(process, time)
        seen_at['x'] = seen / network_input(process, jnp.ones_like(seen), time) / signal
        seen_at['sigma'] = noise / signal
        return seen

    with jax.enable_x64(True):
        for x in (-0.9, 0.1, 0.6):
            images, noise, share = images_under(x, sigma)
            time = jnp.full(len(images), time_of_sigma(process.config, jnp.asarray([sigma]))[0])
            teacher = predicting(process, without_class)
            guidance = consistency.Guidance(teacher, jnp.full(len(images), SCALE))
            consistency.consistency_losses(
                process, teacher, frozen, images, noise, time, decay=1 / 16, guidance=guidance
            )
            lower = float(seen_at['sigma'][0, 0, 0, 0])
            assert 0 < lower < sigma
            free = without_class(x, sigma)
            guided = free + SCALE * (with_class(x, sigma) - free)
            euler = x + (lower - sigma) * (x - guided) / sigma
            found = np.sum(share * np.asarray(seen_at['x']).ravel())
            np.testing.assert_allclose(found, euler, rtol=1e-12, atol=1e-12)


@OF
def test_the_target_at_level_0_is_the_guided_image(of):
    process = make_diffusion(DiffusionConfig(objective='consistency', consistency_of=of))
    x, sigma, above = 0.3, 0.4, 100.0
    with jax.enable_x64(True):
        images, noise, share = images_under(x, sigma)
        time = jnp.full(len(images), time_of_sigma(process.config, jnp.asarray([sigma]))[0])
        guidance = consistency.Guidance(
            predicting(process, without_class), jnp.full(len(images), SCALE)
        )
        call = predicting(process, lambda x, _: jnp.full_like(x, above))
        losses = consistency.consistency_losses(
            process, call, call, images, noise, time, decay=1 / 2, guidance=guidance
        )
        _, gap = consistency.earlier_level(jnp.asarray([sigma]), 1 / 2)
        assert gap[0] == sigma
        free = without_class(x, sigma)
        guided = free + SCALE * (with_class(x, sigma) - free)
        found = above - np.sum(share * np.asarray(losses)) * sigma
        np.testing.assert_allclose(found, guided, rtol=1e-11)


@OF
def test_samples_without_a_class_are_not_guided(of):
    """Their losses are bit for bit those of a run without guidance."""
    config = tiny_config(
        diffusion={'objective': 'consistency', 'consistency_of': of, 'consistency_guidance': 2.0}
    )
    process = make_diffusion(config.diffusion)
    x0, noise = jax.random.normal(jax.random.key(0), (2, 6, 4, 4, 1))
    time = time_of_sigma(config.diffusion, jnp.asarray([0.01, 0.1, 0.5, 2, 9, 80], jnp.float32))
    call, teacher = (predicting(process, lambda x, _, k=k: jnp.tanh(k * x)) for k in (0.9, 0.4))
    labels = jnp.asarray([3, -1, 2, -1, -1, 0])
    guidance = consistency.guidance_of(config, teacher, labels)
    plain, guided = (
        consistency.consistency_losses(
            process, call, call, x0, noise, time, decay=1 / 8, guidance=given
        )
        for given in (None, guidance)
    )
    np.testing.assert_array_equal(guided == plain, labels < 0)


def tuning(of='edm', **changes):
    """The config of a run that tunes."""
    of_teacher = {'objective': 'consistency', 'consistency_of': of, 'consistency_guidance': 2.0}
    diffusion = of_teacher | {'consistency_q': 64} | changes.pop('diffusion', {})
    return tiny_config(**({'model': {'dropout': 0.25}, 'diffusion': diffusion} | changes))


def forward_work(config, source):
    """Floating-point operations of the passes of a loss, for each image, and the state."""
    bench = Bench(config, source)
    step, state = bench.make(None), bench.state
    rows = jnp.arange(8)
    batch = {'image': jnp.asarray(source.load(np.arange(8))), 'label': rows, 'row': rows}
    keys = split_keys(jax.random.key(0), rows, in_pairs=False)
    passes = jax.make_jaxpr(
        lambda state: consistency.loss_fn(
            step.parts, state.params, state, keys, batch, jnp.ones(())
        )[0]
    )(state)
    return sum(product.flops for product in products(passes.jaxpr)) / 8, state


def test_guidance_is_one_more_pass_and_none_without_it(source):
    for scale, passes in ((1.0, 2), (2.0, 3)):
        config = tuning(diffusion={'consistency_guidance': scale})
        work, state = forward_work(config, source)
        assert work == passes * forward_flops(config)
        assert bool(state.teacher) == (scale != 1)


TWO = {'parallel': {'devices': 2}}
PMAP_SHARD = {'devices': 2, 'mode': 'pmap', 'shard_optimizer': True}
PARTS = {'optimizer': {'accumulate_steps': 2}}


@pytest.mark.parametrize(
    ('of', 'changes', 'tolerance'),
    [
        ('flow', {'parallel': PMAP_SHARD} | PARTS, 1e-4),
        ('edm', {'parallel': PMAP_SHARD}, 1e-5),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ('edm', {'parallel': {'devices': 1}} | PARTS, 1e-4),
                ('flow', {'parallel': {'devices': 2, 'shard_optimizer': True}}, 1e-5),
                ('edm', TWO | {'precision': 'bfloat16'}, 0.01),
                (
                    'edm',
                    {
                        'parallel': {'devices': 2, 'shard_optimizer': True},
                        'precision': 'bfloat16',
                        'optimizer': {'accumulate_steps': 2},
                    },
                    0.01,
                ),
            )
        ),
    ],
)
def test_losses_do_not_depend_on_devices_or_micro_batches(of, changes, tolerance, source):
    source = hold_out(source, 8)  # as in the run below, which takes its step from here
    wanted = Bench(tuning(of, **TWO), source).losses()
    bench = Bench(tuning(of, **changes), source)
    np.testing.assert_allclose(bench.losses(), wanted, rtol=tolerance)
    teacher = bench.parallel.fetch(bench.state).teacher
    jax.tree.map(np.testing.assert_array_equal, teacher, fresh_state(bench.config).params)


@pytest.mark.long
def test_float16_finds_its_loss_scale(source):
    bench = Bench(tuning(precision='float16', **TWO), source)
    losses = bench.losses(16)
    assert np.isfinite(losses[::2]).all()
    assert np.isfinite(losses[-1])
    assert bench.parallel.fetch(bench.state).skipped < bench.config.train.max_bad_steps - 4


def saved(path, config, **changes):
    """Writes random weights of the model that `config` tunes, or of a changed one."""
    fields = {
        'objective': config.diffusion.consistency_of,
        'consistency_of': '',
        'consistency_guidance': 1.0,
    }
    diffusion = fields | changes.pop('diffusion', {})
    teacher = config.replace(init_from='', diffusion=diffusion, **changes)
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: (x + 0.1 * draw.standard_normal(x.shape)).astype(np.float32),
        fresh_state(teacher).params,
    )
    write_weights(path, params, teacher)
    return params


def test_a_run_resumes_bit_for_bit_without_its_teacher(tmp_path, source):
    path = tmp_path / 'teacher' / 'teacher.safetensors'
    path.parent.mkdir()
    config = tuning(
        'flow',
        init_from=str(path),
        **TWO,
        data={'holdout': 8},
        train={'steps': 4, 'checkpoint_every': 2, 'keep': 4, 'holdout_every': 2},
    )
    params = saved(path, config)
    source, initial = hold_out(source, 8), load_initial(config)
    train(config, tmp_path / 'whole', source, initial)
    train(config.replace(train={'steps': 2}), tmp_path / 'parts', source, initial)
    shutil.rmtree(path.parent)
    train(config, tmp_path / 'parts', source, None)
    whole, parts = (checkpoint.read(tmp_path / name) for name in ('whole', 'parts'))
    jax.tree.map(np.testing.assert_array_equal, parts.state, whole.state)
    jax.tree.map(np.testing.assert_array_equal, parts.state.teacher, params)
    assert (whole.state.params['conv_out']['kernel'] != params['conv_out']['kernel']).any()
    rows = [read_metrics(tmp_path / name / 'metrics.csv') for name in ('whole', 'parts')]
    measured = [[row['held_out_loss'] for row in each] for each in rows]
    assert measured[0] == measured[1]
    assert np.isfinite([float(value) for value in measured[0] if value]).all()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'model': {'label_dropout': 0.0}},
            r'=2 needs a model of classes .*\(model.label_dropout > 0\)',
        ),
        (
            {'model': {'num_classes': 0, 'label_dropout': 0.0}},
            r'=2 needs a model of classes that was also trained without them',
        ),
        (
            {'model': {'num_classes': 4}},
            r'guidance needs all weights .*fresh: the label table: 4 cl',
        ),
        (
            {'diffusion': {'objective': 'consistency', 'consistency_of': 'edm'}},
            'folded in with the predictions .* found a consistency model; start from',
        ),
    ],
)
def test_other_teachers_are_refused(tmp_path, changes, message):
    path = tmp_path / 'teacher.safetensors'
    config = tuning(init_from=str(path))
    saved(path, config, **changes)
    with pytest.raises(UserError, match=f'init_from: .*{message}') as error:
        load_initial(config)
    assert '\n' not in str(error.value)


def test_tuning_further_does_not_lose_the_guidance(tmp_path):
    path = tmp_path / 'tuned.safetensors'
    config = tuning(init_from=str(path))
    saved(path, config, diffusion=dataclasses.asdict(config.diffusion))
    with pytest.raises(UserError, match=r'found a consistency model with guidance 2; start from'):
        load_initial(config.replace(diffusion={'consistency_guidance': 1.0}))


def test_another_scale_is_not_advised_to_start_from_the_run():
    other = tuning(diffusion={'consistency_guidance': 3.0})
    with pytest.raises(UserError, match=r'_guidance: 2\.0 -> 3\.0\n.*cannot be tuned further$'):
        check_resumable(tuning(), other, pathlib.Path('runs/guided'))


def test_guidance_needs_classes():
    with pytest.raises(UserError, match=r'consistency_guidance: 2 needs classes \(model.num'):
        tuning(model={'num_classes': 0, 'label_dropout': 0.0})
