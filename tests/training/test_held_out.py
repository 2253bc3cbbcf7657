"""The held-out loss: its values, its log, and the sentence when it turns."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.state import fresh_state
from jaxunet.data.holdout import hold_out
from jaxunet.data.source import ArraySource, Subset
from jaxunet.data.sources import open_data, open_images, open_source
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import make_diffusion, middle_time, network_input, q_sample
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.training.bands import BANDS, SEED
from jaxunet.training.consistency import Guidance, consistency_losses
from jaxunet.training.held_out import COLUMNS, HeldOutLoss, Losses, Turn
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train

pytestmark = pytest.mark.usefixtures('shared_steps')


def randomised(config):
    """Weights without zeros: a fresh network predicts zero for every image."""
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (x + 0.1 * draw.standard_normal(x.shape)).astype(np.float32),
        fresh_state(config).params,
    )


@pytest.fixture(scope='module')
def digits():
    source = open_source('digits:', image_shape=(8, 8, 1))
    some = ArraySource(
        'some', source.load(np.arange(30)), (8, 8, 1), source.labels[:30], source.class_names
    )
    return hold_out(some, 11)


@pytest.mark.parametrize(
    'objective', ['epsilon', 'edm', 'consistency', 'consistency of v', 'guided']
)
def test_values(objective, digits):
    """One image, noise level and noise after the other; on one device and on two."""
    stages = {'consistency_of': 'edm', 'consistency_q': 4, 'consistency_stages': 2}
    guided = objective == 'guided'
    if guided:
        objective, stages = 'consistency', stages | {'consistency_guidance': 2.0}
    if objective == 'consistency of v':
        objective, stages = 'consistency', stages | {'consistency_of': 'v', 'schedule': 'cosine'}
    more = stages if objective == 'consistency' else {}
    config = tiny_config(diffusion={'objective': objective} | more)
    params = jax.tree.map(jnp.asarray, randomised(config))
    teacher = jax.tree.map(lambda x: x * 0.9, params) if guided else ()
    found, again = (
        HeldOutLoss(config, digits, jax.local_devices()[:devices], teacher).measure(params)
        for devices in (1, 2)
    )
    np.testing.assert_allclose(found, again, rtol=1e-5)
    diffusion, model = make_diffusion(config.diffusion), build_unet(config, XLA)

    @jax.jit
    def loss(image, label, t, number):
        x0 = image[None].astype(jnp.float32) / 127.5 - 1
        key = jax.random.fold_in(jax.random.key(SEED), number)
        noise = jax.random.normal(key, x0.shape[1:], jnp.float32)[None]
        time = middle_time(diffusion, t[None])

        def network(seen, time):
            return model.predict(params, seen, time, label[None])

        if objective == 'consistency':  # in the last stage
            scale = Guidance(lambda *seen: model.predict(teacher, *seen), jnp.full(1, 2.0))
            return consistency_losses(
                diffusion,
                network,
                network,
                x0,
                noise,
                time,
                decay=4**-2,
                guidance=scale if guided else None,
            )[0]
        xt = q_sample(diffusion, x0, time, noise)
        output = network(network_input(diffusion, xt, time), time)
        return per_sample_loss(diffusion, output, x0, xt, time, noise)[0]

    for bands, source in zip(found, (digits.held_out, digits), strict=True):
        assert bands.shape == (BANDS,)
        rows = np.arange(11) * len(source) // 11
        images, labels = source.load(rows), source.labels[rows]
        for band in range(BANDS):
            t = [int((band + (i + 0.5) / 11) * 40 / BANDS) for i in range(11)]
            assert band * 10 <= min(t) <= max(t) < (band + 1) * 10
            losses = [
                loss(images[i], labels[i], np.int32(t[i]), np.int32(BANDS * i + band))
                for i in range(11)
            ]
            np.testing.assert_allclose(bands[band], np.mean(losses), rtol=1e-4)


def test_the_same_images_have_the_same_loss(digits):
    """The two losses differ in the images, not in the noise."""
    config = tiny_config()
    twice = ArraySource('twice', digits.load(np.arange(8)), (8, 8, 1), digits.labels[:8])
    twice.held_out = ArraySource('twice', digits.load(np.arange(8)), (8, 8, 1), digits.labels[:8])
    losses = HeldOutLoss(config, twice, jax.local_devices()[:1]).measure(randomised(config))
    np.testing.assert_array_equal(losses.held_out, losses.seen)


def test_nothing_held_out(digits):
    with pytest.raises(ValueError, match='holds no images out'):
        HeldOutLoss(tiny_config(), digits.held_out, jax.local_devices()[:1])


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """The folder of a run of 40 steps."""
    workdir = tmp_path_factory.mktemp('held_out') / 'whole'
    train_in(
        workdir,
        tiny_config(
            data={'holdout': 1777, 'batch_size': 8},
            optimizer={'learning_rate': 3e-3, 'warmup_steps': 1},
            ema={'rates': (0.9,)},
            parallel={'devices': 1},
            train={'steps': 40, 'log_every': 5, 'holdout_every': 10, 'checkpoint_every': 20},
        ),
    )
    return workdir


def train_in(workdir, config):
    train(config, workdir, open_images(config))


def test_a_run_logs_it(whole, tmp_path):
    """Beside the training loss, every `train.holdout_every` steps; a resumed run goes on alike."""
    logged = read_metrics(whole / 'metrics.csv')
    assert [int(row['step']) for row in logged] == list(range(5, 45, 5))
    for row in logged:
        measured = [bool(row[column]) for column in COLUMNS]
        assert measured == [int(row['step']) % 10 == 0] * len(COLUMNS)
    rows = [row for row in logged if row['held_out_loss']]
    values = np.array([[float(row[column]) for column in COLUMNS] for row in rows])
    np.testing.assert_allclose(values[:, 0], values[:, 1 : 1 + BANDS].mean(axis=1), rtol=1e-6)
    assert (np.diff(values[:, 0]) < 0).all()  # it learns
    assert values[-1, 0] > values[-1, 1 + BANDS]  # the 20 images that it knows
    assert list((whole / 'tensorboard').iterdir())
    parts = shutil.copytree(whole, tmp_path / 'parts')
    shutil.rmtree(parts / 'checkpoints' / '40')  # as if it had been killed before
    config = checkpoint.read(parts).config
    assert checkpoint.read(parts).state.step == 20
    train_in(parts, config)
    assert [
        [row[c] for c in ('step', *COLUMNS)] for row in read_metrics(parts / 'metrics.csv')
    ] == [[row[c] for c in ('step', *COLUMNS)] for row in logged]


@pytest.mark.parametrize('removed', [0, 1])
def test_a_resumed_run_tells_that_other_images_are_held_out(removed, whole, caplog):
    restored = checkpoint.read(whole)
    config = restored.config
    digits = open_data(config, config.image_shape)
    source = hold_out(Subset(digits, np.arange(len(digits) - removed)), config.data.holdout)
    train(config, whole, source)  # has no steps left
    warning = 'data.holdout: the run began with 1,797 images and now has 1,796, so other images'
    assert (warning in caplog.text) == bool(removed)
    assert restored.facts.images == 1797


@pytest.mark.long
def test_measuring_changes_no_step(whole, tmp_path):
    measured = checkpoint.read(whole)
    train_in(tmp_path, measured.config.replace(train={'holdout_every': 0}))
    assert checkpoint.checksum(checkpoint.read(tmp_path).state) == checkpoint.checksum(
        measured.state
    )
    assert not any(row['held_out_loss'] for row in read_metrics(tmp_path / 'metrics.csv'))


def losses(held_out, seen):
    return Losses(np.full(BANDS, held_out), np.full(BANDS, seen))


SENTENCE = (
    'held-out loss has risen 3 times in a row: the model begins to repeat its training images'
)


@pytest.mark.parametrize(
    ('held_out', 'seen', 'said'),
    [
        ([5, 4, 4.1, 4.2, 4.3], [5, 4, 3, 2, 1], ['', '', '', '', SENTENCE]),
        ([5, 4, 3, 2, 1], [5, 4, 3, 2, 1], [''] * 5),
        ([5, 4, 4.1, 4.05, 4.2, 4.3], [6, 5, 4, 3, 2, 1], [''] * 6),  # not in a row
        ([4, 4.1, 4.2, 4.3], [1, 1.1, 1.2, 1.3], [''] * 4),  # all get worse: no copying
        ([4, 4.001, 4.002, 4.003], [4, 3, 2, 1], [''] * 4),  # by too little
        (
            [1, 2, 3, 4, 5, 6, 7],
            [7, 6, 5, 4, 3, 2, 1],
            ['', '', '', SENTENCE, '', '', SENTENCE.replace('3', '6')],
        ),
    ],
)
def test_the_sentence(held_out, seen, said):
    turn = Turn()
    assert [turn.add(losses(h, s)) for h, s in zip(held_out, seen, strict=True)] == said


def test_every_noise_level_counts_alike():
    """The bands with little loss rise by a third; the one with most of it falls a little."""
    turn = Turn()
    found = ''
    for i in range(4):
        bands = np.array([1 - 0.01 * i, *(0.01 * 1.1**i for _ in range(3))])
        found = turn.add(Losses(bands, np.full(BANDS, 1.0 / (i + 1))))
    assert found == SENTENCE


def test_a_row_gives_its_losses_back():
    measured = Losses(np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.3, 0.25, 0.15, 0.05]))
    columns = measured.columns()
    assert tuple(columns) == COLUMNS
    assert columns['held_out_loss'] == pytest.approx(0.25)
    found = Losses.of_row({name: f'{value:.9g}' for name, value in columns.items()})
    np.testing.assert_allclose(found, measured)
    assert Losses.of_row(dict.fromkeys(COLUMNS, '')) is None
