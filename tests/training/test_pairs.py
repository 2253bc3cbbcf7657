"""Runs of a network that draws an image for a picture of another set, such as edges -> photo."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from PIL import Image
from support.bench import Bench
from support.commands import call
from support.tiny import tiny_config
from support.untrained_features import write_untrained

from jaxunet import api
from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.resumable import check_resumable
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import checksum, read
from jaxunet.data.images import grid
from jaxunet.data.pairs import with_pictures
from jaxunet.data.source import ArraySource
from jaxunet.data.sources import open_images
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.model import load
from jaxunet.training.conditions import SampleConditions, side_by_side
from jaxunet.training.evaluation import read_evaluations
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.page import sample_command
from jaxunet.training.step_fields import relevant
from jaxunet.weights import write_folder, write_weights

pytestmark = pytest.mark.usefixtures('shared_steps')

GREY = {'num_classes': 0, 'label_dropout': 0.0, 'low_res_size': (8,), 'condition_channels': 1}
RGB = GREY | {'image_channels': 3}


def of_arrays(folder, name, pictures, **changes):
    """A config of digits, paired by their order with pictures."""
    np.save(folder / f'{name}.npy', pictures)
    data = {'path': 'digits:', 'condition': f'folder:{folder}/{name}.npy', 'batch_size': 32}
    return tiny_config(model=GREY, data=data, parallel={'devices': 1}, **changes)


def test_the_loss_falls_where_the_picture_says_what_the_image_is(tmp_path):
    """A picture that is the image itself tells more than that of another image."""
    digits = open_images(tiny_config(model={'num_classes': 0, 'label_dropout': 0.0}))
    pictures = digits.load(np.arange(len(digits)))
    changes = {'diffusion': {'objective': 'flow'}, 'optimizer': {'learning_rate': 0.01}}
    losses = {}
    for name, shown in (('same', pictures), ('others', np.roll(pictures, 500, axis=0))):
        config = of_arrays(tmp_path, name, shown, **changes)
        losses[name] = np.mean(Bench(config, with_pictures(open_images(config))).losses(60)[-20:])
    assert losses['same'] < 0.6 * losses['others']


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """Photos of 8x8 pixels, whose edges are grey pictures of their red channel."""
    folder = tmp_path_factory.mktemp('pairs')
    photos = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), np.uint8)
    for name, pixels in (('photos', photos), ('edges', photos[..., 0])):
        (folder / name).mkdir()
        for i, image in enumerate(pixels):
            Image.fromarray(image).save(folder / name / f'{i:03}.png')
    return tiny_config(
        model=RGB,
        data={
            'path': f'{folder}/photos',
            'condition': f'folder:{folder}/edges',
            'holdout': 9,
            'augment': 'flip',
        },
        train={'steps': 4, 'sample_every': 4, 'holdout_every': 2, 'evaluate_every': 4},
        evaluation={
            'samples': 6,
            'batch_size': 4,
            'steps': 2,
            'metrics': ('precision',),
            'features': str(write_untrained(folder)),
        },
        parallel={'devices': 1},
    )


@pytest.fixture(scope='module')
def run(config, tmp_path_factory):
    """A run of resident pairs that was interrupted after two steps."""
    folder = tmp_path_factory.mktemp('run')
    train(config.replace(train={'steps': 2}), folder, open_images(config))
    train(config, folder, open_images(config))
    return folder


def test_a_resumed_run_is_an_uninterrupted_one_that_streams(run, config, tmp_path):
    streamed = config.replace(data={'cache': 'stream'}, train={'sample_every': 0})
    assert train(streamed, tmp_path, open_images(streamed)) == 4
    assert checksum(read(run).state) == checksum(read(tmp_path).state)
    rows = [read_metrics(folder / 'metrics.csv') for folder in (run, tmp_path)]
    found = [[(row['loss'], row['held_out_loss'], row['seen_loss']) for row in r] for r in rows]
    assert found[0] == found[1]
    measured = [read_evaluations(folder)[-1]['value'] for folder in (run, tmp_path)]
    assert measured[0] == measured[1]


def test_samples_are_drawn_from_the_pictures_of_held_out_images(run, config, tmp_path):
    """By the run's grids and by `Model.sample` of a path or arrays, also of other sizes."""
    source = open_images(config)
    _, pictures, images = SampleConditions(config, source, 4).load(np.arange(4))
    rows = np.array([0, 2, 4, 6])  # four of nine
    np.testing.assert_array_equal(images, source.held_out.load(rows))
    np.testing.assert_array_equal(pictures, images[..., :1])
    model, how = load(run), {'steps': 2, 'progress': False}
    samples = model.sample(condition=pictures, **how)
    expected = np.stack([pictures.repeat(3, axis=3), samples, images], axis=1)
    found = np.asarray(Image.open(run / 'samples' / 'step_0000004.png'))
    np.testing.assert_array_equal(found, grid(expected.reshape(-1, 8, 8, 3), 6))
    np.testing.assert_array_equal(side_by_side(pictures, samples, images)[1::3], samples)
    large = np.kron(pictures, np.ones((1, 2, 2, 1), np.uint8))
    for i, pixels in enumerate(large):
        Image.fromarray(pixels[..., 0]).convert('RGB').save(tmp_path / f'{i}.png')
    np.testing.assert_array_equal(
        model.sample(condition=tmp_path, **how), model.sample(low_res=large, **how)
    )
    one = model.sample(condition=tmp_path / '0.png', **how)
    np.testing.assert_array_equal(one, model.sample(condition=large[:1], **how))


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ({}, r'^condition: missing; the model draws from pictures like those in \S*edges, of 1 ch'),
        ({'condition': np.zeros((2, 8, 8, 3))}, r'expected shape \(n, height, width, 1\), found'),
        ({'condition': 'x', 'low_res': 'x'}, r'^low_res, condition: are one argument'),
        ({'condition': 'nowhere'}, r'^--condition: nowhere: no such file'),
    ],
)
def test_wrong_pictures(given, message, run):
    with pytest.raises(UserError, match=message):
        load(run).sample(**given)


def test_what_a_file_of_weights_keeps(config, tmp_path):
    params = jax.tree.map(np.asarray, fresh_state(config).params)
    write_weights(tmp_path / 'x.safetensors', params, config)
    found = load_model(str(tmp_path / 'x.safetensors')).config
    assert (found.model, found.data.condition) == (config.model, config.data.condition)
    for name in ('x.pt', 'x.bin'):
        with pytest.raises(UserError, match=r'model\.condition_channels: .*'):
            write_weights(tmp_path / name, params, config)
    with pytest.raises(UserError, match=r'model\.condition_channels: expected 0, found 1'):
        write_folder(tmp_path / 'folder', params, config)


def test_the_path_of_the_pictures_may_change(config, tmp_path):
    moved = config.replace(data={'condition': 'folder:elsewhere'})
    assert relevant(moved) == relevant(config)
    assert check_resumable(config, moved, tmp_path)
    other = config.replace(data={'condition': 'grey'}, model={'condition_channels': 0})
    with pytest.raises(UserError, match=r'data.condition: '):
        check_resumable(config, other, tmp_path)


def test_the_command_that_draws_samples(config, tmp_path):
    assert sample_command(config, tmp_path).endswith(
        f'--checkpoint {tmp_path} --condition PICTURES'
    )


def test_images_without_their_pictures_do_not_train(config, tmp_path):
    source = ArraySource('photos', np.zeros((9, 8, 8, 3), np.uint8), (8, 8, 3))
    with pytest.raises(UserError, match=r'data.condition: expected images with pictures of 1 chan'):
        train(config.replace(train={'evaluate_every': 0}), tmp_path, source)
    with pytest.raises(UserError, match='and photos has none'):
        SampleConditions(config, source, 4)


@pytest.mark.long
def test_losses_do_not_depend_on_how_a_batch_is_spread(config):
    spread = {'parallel': {'mode': 'pmap', 'devices': 2}, 'optimizer': {'accumulate_steps': 2}}
    source = with_pictures(open_images(config))
    one, several = (Bench(config.replace(**c), source).losses() for c in ({}, spread))
    np.testing.assert_allclose(several, one, rtol=1e-4)


@pytest.mark.long
def test_commands(run, config, tmp_path):
    edges = config.picture_path
    flags = ('--steps=2', '--num_samples=2')
    for option in ('condition', 'low_res'):
        output = f'--output={tmp_path}/{option}.npy'
        call('jaxunet.sample', f'--checkpoint={run}', f'--{option}={edges}', output, *flags)
    found = np.load(tmp_path / 'condition.npy')
    np.testing.assert_array_equal(found, np.load(tmp_path / 'low_res.npy'))
    np.testing.assert_array_equal(
        found, load(run).sample(2, condition=edges, steps=2, progress=False)
    )
    assert api.evaluate(load(run), metrics='precision', features=config.evaluation.features)
