"""Training with the objectives of continuous noise levels: devices, adaptive methods, files."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import CHOICES
from jaxunet.config.checks import INVALID
from jaxunet.data.holdout import hold_out
from jaxunet.data.reading import Reading
from jaxunet.data.source import ArraySource
from jaxunet.diffusion.process import make_diffusion
from jaxunet.diffusion.timesteps import make_sampler
from jaxunet.runtime.errors import UserError
from jaxunet.training.batch import split_keys
from jaxunet.training.gradients import loss_fn
from jaxunet.training.held_out import HeldOutLoss
from jaxunet.weights.files import read_weights, write_weights

pytestmark = pytest.mark.usefixtures('shared_steps')


SAMPLERS, WEIGHTINGS = CHOICES['timesteps.sampler'], CHOICES['loss.weighting']
# Methods that are refused, and how the message ends.
REFUSED = {
    'speed': 'with {0} use uniform, loss_second_moment, adaptive or infonoise',
    'speed_code': 'with {0} use uniform, loss_second_moment, adaptive or infonoise',
    'policy': 'with {0} use uniform, loss_second_moment, adaptive or infonoise',
    'speed weights': 'with {0} use uniform, min_snr, soft_min_snr, p2 or uncertainty',
    'infonoise uncertainty': 'use another weighting or sampler',
}


@pytest.mark.parametrize('objective', ['edm', 'flow'])
def test_every_method_is_taken_or_refused_with_a_reason(objective):
    taken = set()
    for sampler, weighting in itertools.product(SAMPLERS, WEIGHTINGS):
        fields = {
            'diffusion': {'objective': objective},
            'timesteps': {'sampler': sampler},
            'loss': {'weighting': weighting},
        }
        found = [
            text.format(objective)
            for name, text in REFUSED.items()
            if name in (sampler, f'{weighting} weights', f'{sampler} {weighting}')
        ]
        if not found:
            assert tiny_config(**fields).timesteps.sampler == sampler
            taken.add((sampler, weighting))
            continue
        with pytest.raises(UserError) as error:
            tiny_config(**fields)
        lines = str(error.value).removeprefix(INVALID).strip().splitlines()
        assert all(line.endswith(text) for line, text in zip(lines, found, strict=True)), lines
    assert {sampler for sampler, _ in taken} == set(SAMPLERS) - {'speed', 'speed_code', 'policy'}
    assert {weighting for _, weighting in taken} == set(WEIGHTINGS) - {'speed'}


@pytest.mark.parametrize(
    ('objective', 'sampler', 'weighting'),
    [
        ('edm', 'loss_second_moment', 'soft_min_snr'),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ('flow', 'infonoise', 'min_snr'),
                ('edm', 'adaptive', 'uncertainty'),
                ('edm', 'infonoise', 'p2'),
                ('edm', 'uniform', 'min_snr'),
                ('flow', 'loss_second_moment', 'uncertainty'),
                ('flow', 'adaptive', 'p2'),
                ('flow', 'uniform', 'soft_min_snr'),
            )
        ),
    ],
)
def test_methods_learn_from_the_losses_while_the_loss_falls(objective, sampler, weighting, source):
    config = tiny_config(
        diffusion={'objective': objective},
        timesteps={
            'sampler': sampler,
            'history': 1,
            'adaptive_bins': 4,
            'infonoise_bins': 4,
            'infonoise_warmup': 8,
        },
        loss={'weighting': weighting},
        parallel={'devices': 1},
        data={'batch_size': 16},
    )
    bench = Bench(config, source)
    start = bench.parallel.fetch(bench.state)
    losses = bench.losses(60)[::2]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-15:]) < 0.95 * np.mean(losses[:15])
    end = bench.parallel.fetch(bench.state)
    assert end.skipped == 0
    for name, method in (('timesteps', sampler), ('weighting', weighting)):
        before, after = (jax.tree.leaves(getattr(state, name)) for state in (start, end))
        assert bool(before) == (
            method in ('loss_second_moment', 'adaptive', 'infonoise', 'uncertainty')
        )
        assert not any(map(np.array_equal, before, after))
    made = make_sampler(config, make_diffusion(config.diffusion))
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = made.draw(end.timesteps, keys, jnp.arange(500), jnp.zeros((500, 8, 8, 1)))
    assert (np.ptp(np.asarray(drawn.importance)) > 0.1) == (sampler != 'uniform')


@pytest.mark.long
@pytest.mark.parametrize(
    ('objective', 'methods'),
    [
        ('edm', {'loss': {'weighting': 'uncertainty'}, 'timesteps': {'sampler': 'adaptive'}}),
        ('flow', {'loss': {'weighting': 'min_snr'}}),
    ],
)
def test_losses_do_not_depend_on_the_number_of_devices(objective, methods, source):
    config = tiny_config(diffusion={'objective': objective}, parallel={'devices': 1}, **methods)
    one, four = (
        Bench(c, source).losses() for c in (config, config.replace(parallel={'devices': 4}))
    )
    assert np.isfinite(one).all()
    np.testing.assert_allclose(four, one, rtol=1e-4)


@pytest.mark.parametrize('objective', ['v', 'edm', 'flow'])
def test_files_of_guided_diffusion_refuse_other_objectives(objective, tmp_path):
    channels = {'base_channels': 32, 'norm_groups': 32}  # the objective alone does not fit
    config = tiny_config(diffusion={'objective': objective}, model=channels)
    params = fresh_state(config).params
    message = (
        'guided-diffusion has no such model, so it would misread this .pt; write .safetensors '
        f"instead: diffusion.objective: expected 'epsilon' or 'x0', found '{objective}'"
    )
    with pytest.raises(UserError, match=f'^{re.escape(message)}$'):
        write_weights(tmp_path / 'a.pt', params, config)
    assert not list(tmp_path.iterdir())
    write_weights(tmp_path / 'a.safetensors', params, config)
    assert read_weights(tmp_path / 'a.safetensors').config.diffusion.objective == objective


def test_images_of_16_bits_have_the_likelihood_of_their_bins():
    """In both losses of a run, here of the last step alone: the same floats in narrower bins."""
    pixels = np.random.default_rng(0).integers(64, 192, (16, 8, 8, 1), np.uint8)
    losses = []
    for bits, images in ((8, pixels), (16, 257 * pixels.astype(np.uint16))):
        config = tiny_config(
            model={'num_classes': 0, 'label_dropout': 0.0},
            diffusion={'objective': 'x0', 'kl_loss': True, 'steps': 1, 'schedule': 'cosine'},
            data={'bits': bits},
            parallel={'devices': 1},
        )
        source = ArraySource('random', images, images.shape[1:], reading=Reading.of(config))
        bench, rows = Bench(config, source), jnp.arange(8, dtype=jnp.int32)
        batch = {'image': jnp.asarray(images[:8]), 'label': 0 * rows, 'row': rows}
        keys = split_keys(jax.random.key(0), rows, in_pairs=False)
        loss = functools.partial(loss_fn, bench.make(None).parts)
        _, (step_loss, _) = jax.jit(loss)(
            bench.state.params, bench.state, keys, batch, jnp.ones(())
        )
        held_out = HeldOutLoss(config, hold_out(source, 8), jax.local_devices()[:1])
        losses.append([float(step_loss), *held_out.measure(fresh_state(config).params).held_out])
    np.testing.assert_allclose(np.subtract(*losses[::-1]), math.log2(257), atol=0.01)
