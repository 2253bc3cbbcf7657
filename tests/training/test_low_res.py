"""Super-resolution networks: what they see in training, and runs of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from support.bench import Bench
from support.commands import call
from support.tiny import tiny_config
from support.untrained_features import write_untrained

from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.optimizer import make_optimizer
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import checksum, read, state_template
from jaxunet.data.sources import open_images
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.low_res import enlarged, low_res_of
from jaxunet.model.unet import UNet, build_unet
from jaxunet.ops.backends import choose
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError
from jaxunet.training.batch import noise_batch, normalise, split_keys
from jaxunet.training.conditions import SampleConditions
from jaxunet.training.evaluation import read_evaluations
from jaxunet.training.gradients import loss_fn
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.step import make_train_step
from jaxunet.weights import write_weights

pytestmark = pytest.mark.usefixtures('shared_steps')

LOW_RES = (3, 4)  # images are 8x8: one side divides
MODEL = {'low_res_size': LOW_RES}


def mean_of_blocks(image: np.ndarray) -> np.ndarray:
    """A pixel's mean begins at the floor of its first edge and ends at the ceiling of its last."""
    (height, width), (rows, columns) = image.shape[:2], LOW_RES
    small = np.empty((rows, columns, image.shape[2]))
    for i, j in np.ndindex(rows, columns):
        top, left = i * height // rows, j * width // columns
        bottom, right = -(-(i + 1) * height // rows), -(-(j + 1) * width // columns)
        small[i, j] = image[top:bottom, left:right].mean(axis=(0, 1))
    return small


def bilinear(small: np.ndarray, side: int) -> np.ndarray:
    for axis in (0, 1):
        size = small.shape[axis]
        place = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
        low = np.minimum(place.astype(int), size - 2)
        share = (place - low).reshape([-1, 1, 1] if axis == 0 else [1, -1, 1])
        small = small.take(low, axis) * (1 - share) + small.take(low + 1, axis) * share
    return small


def test_the_loss_sees_the_small_version_of_the_flipped_image(monkeypatch):
    """A network of two numbers, a x_t + b enlarged, in numpy: its loss and the gradient of b."""

    def predict(self, params, x, t, labels, dropout_keys, augmentation, low_res):
        return params['a'] * x + params['b'] * enlarged(low_res, x.shape)

    monkeypatch.setattr(UNet, 'predict', predict)
    config = tiny_config(model=MODEL, data={'augment': 'flip'}, diffusion={'objective': 'flow'})
    model, diffusion = build_unet(config, XLA), make_diffusion(config.diffusion)
    parts = make_train_step(config, model, diffusion, make_optimizer(config), choose('xla')).parts
    state, row = fresh_state(config), jnp.arange(8, dtype=jnp.int32)
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1), dtype=np.uint8)
    batch = {'image': jnp.asarray(image), 'label': 0 * row, 'row': row}
    keys = split_keys(jax.random.key(1), row, False)
    params, one = {'a': jnp.float32(0.3), 'b': jnp.float32(-0.6)}, jnp.float32(1)
    slopes, (loss, _) = jax.jit(
        lambda params: jax.grad(loss_fn, 1, has_aux=True)(parts, params, state, keys, batch, one)
    )(params)

    noisy = noise_batch(config, diffusion, parts.sampler, state.timesteps, keys, batch)
    x0, x, noise = (np.asarray(x, np.float64) for x in (noisy.x0, noisy.model_input, noisy.noise))
    flipped = (np.abs(x0 - (image / 127.5 - 1)) > 1e-6).any(axis=(1, 2, 3))
    assert 0 < flipped.sum() < 8
    seen = np.stack([bilinear(mean_of_blocks(x), 8) for x in x0])
    error = 0.3 * x - 0.6 * seen - (noise - x0)
    np.testing.assert_allclose(loss, np.square(error).mean(), rtol=1e-5)
    np.testing.assert_allclose(slopes['b'], (2 * error * seen).mean(), rtol=1e-5)


def test_a_network_that_colours_sees_grey_images_as_pillow_makes_them():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    config = tiny_config(
        model={'image_channels': 3, 'low_res_size': (8, 4)}, data={'condition': 'grey'}
    )
    found = low_res_of(config, normalise(jnp.asarray(pixels)))
    expected = np.stack([Image.fromarray(image).convert('L') for image in pixels])
    expected = np.stack([expected[:, :, ::2], expected[:, :, 1::2]]).mean(axis=0)
    close = np.abs(127.5 * (np.asarray(found) + 1) - expected[..., None]).max()
    assert close < 0.51  # a byte of Pillow's is rounded


@pytest.mark.parametrize(
    ('model', 'message'),
    [
        ({'image_channels': 3}, 'grey needs a network that sees pictures'),
        (MODEL, r'and draws colours \(model.image_channels=3, found 1\)'),
    ],
)
def test_grey_pictures_belong_to_networks_that_colour(model, message):
    with pytest.raises(UserError, match=f'data.condition: .*{message}'):
        tiny_config(model=model, data={'condition': 'grey'})


def test_a_run_that_would_learn_nothing_is_refused(source, tmp_path):
    config = CONFIG.replace(model={'low_res_size': (8,)})
    with pytest.raises(UserError, match='would see the image that it should draw; expected a sma'):
        train(config, tmp_path / 'run', source)


@pytest.mark.long
def test_losses_do_not_depend_on_how_a_batch_is_spread(source):
    spread = {'parallel': {'mode': 'pmap', 'devices': 2}, 'optimizer': {'accumulate_steps': 2}}
    one, several = (
        Bench(tiny_config(model=MODEL).replace(**changes), source).losses()
        for changes in ({'parallel': {'devices': 1}}, spread)
    )
    np.testing.assert_allclose(several, one, rtol=1e-4)


def test_the_policy_of_timesteps_measures_such_a_network():
    config = tiny_config(model=MODEL, timesteps={'sampler': 'policy', 'policy_probes': 1})
    diffusion, model = make_diffusion(config.diffusion), build_unet(config, XLA)
    step = make_train_step(config, model, diffusion, make_optimizer(config), choose('xla'))
    numbers = jax.ShapeDtypeStruct((8,), np.int32)
    image = jax.ShapeDtypeStruct((8, 8, 8, 1), np.uint8)
    state = state_template(config)
    found, _ = jax.eval_shape(step, state, {'image': image, 'label': numbers, 'row': numbers})
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, state)


@pytest.fixture(scope='module')
def source():
    return open_images(CONFIG)


CONFIG = tiny_config(
    model=MODEL,
    data={'holdout': 9},
    train={'steps': 4, 'sample_every': 2, 'holdout_every': 2, 'evaluate_every': 4},
    evaluation={'samples': 6, 'batch_size': 4, 'steps': 2, 'metrics': ('precision',)},
    parallel={'devices': 1},
)


@pytest.fixture(scope='module')
def run(source, tmp_path_factory):
    """A run that was interrupted after two steps."""
    folder = tmp_path_factory.mktemp('run')
    features = {'features': str(write_untrained(folder))}
    config = CONFIG.replace(evaluation=features)
    train(config.replace(train={'steps': 2}), folder, source)
    train(config, folder, source)
    return folder


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one(run, source, tmp_path):
    config = read(run).config
    assert train(config, tmp_path, source) == 4
    found, expected = read(run), read(tmp_path)
    assert checksum(found.state) == checksum(expected.state)
    held_out = [
        [(row['loss'], row['held_out_loss'], row['seen_loss']) for row in rows]
        for rows in (read_metrics(folder / 'metrics.csv') for folder in (run, tmp_path))
    ]
    assert held_out[0] == held_out[1]
    measured = [read_evaluations(folder)[-1] for folder in (run, tmp_path)]
    assert [row['step'] for row in measured] == ['4', '4']
    assert measured[0]['value'] == measured[1]['value']
    for step in (2, 4):
        name = f'samples/step_{step:07d}.png'
        assert (run / name).read_bytes() == (tmp_path / name).read_bytes()


def test_grids_show_held_out_images_beside_their_samples(run, source, tmp_path):
    """`jaxunet.sample` draws the same samples from a file of the run's weights.

    A grid has two samples a row, each as the enlarged picture, the sample and the image.
    """
    labels, small, images = SampleConditions(CONFIG, source, 4).load(np.arange(4))
    rows = [0, 2, 4, 6]  # four of nine
    np.testing.assert_array_equal(images, source.held_out.load(np.array(rows)))
    np.testing.assert_array_equal(labels, source.held_out.labels[rows])
    exact = np.stack([mean_of_blocks(image) for image in images.astype(float)])
    assert np.abs(small - exact).max() < 0.501
    pixels = np.asarray(Image.open(run / 'samples' / 'step_0000004.png'))
    assert pixels.shape == (2 + 2 * 50, 2 + 6 * 50)  # a pixel of an image is 6 of the grid
    tiles = np.stack(
        [pixels[2 + 50 * i :, 2 + 50 * j :][:48:6, :48:6] for i in (0, 1) for j in range(6)]
    ).reshape(4, 3, 8, 8, 1)
    seen = np.stack([bilinear(picture.astype(float), 8) for picture in small])
    assert np.abs(tiles[:, 0] - seen).max() < 0.501
    np.testing.assert_array_equal(tiles[:, 2], images)

    np.savez(tmp_path / 'small.npz', images=small, labels=labels)
    model = load_model(str(run))
    file = tmp_path / 'up.safetensors'
    write_weights(file, model.params, model.config)
    jax.tree.map(np.testing.assert_array_equal, load_model(str(file)).params, model.params)
    output = tmp_path / 'samples.npz'
    flags = (f'--low_res={tmp_path}/small.npz', '--steps=2', f'--output={output}')
    call('jaxunet.sample', f'--checkpoint={file}', *flags)
    with np.load(output) as found:
        np.testing.assert_array_equal(found['images'], tiles[:, 1])
        assert found['labels'].tolist() == labels.tolist()
