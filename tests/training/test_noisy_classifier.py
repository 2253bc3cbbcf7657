"""Training a classifier of noisy images: its loss, a run, and samples that it guides."""

from __future__ import annotations

import functools
import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import call
from support.counting_step import move_weights
from support.events import points
from support.full_memory import exhaust
from support.tiny import TINY, tiny_config

from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.optimizer import make_optimizer
from jaxunet.checkpoint.state import Draw, TrainState, fresh_state
from jaxunet.checkpoint.store import Checkpoints, CheckpointWriteError, checksum, state_template
from jaxunet.config import Config
from jaxunet.data.holdout import hold_out
from jaxunet.data.source import Subset
from jaxunet.data.sources import open_data, open_images
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.noisy_classifier import NoisyClassifier, build_classifier
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import choose
from jaxunet.ops.references import XLA
from jaxunet.runtime.background import Background
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import OutOfMemoryError
from jaxunet.sampling.classifier_guidance import class_gradient
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import initial_state, make_sampler, sample_keys
from jaxunet.sampling.sampler import run as run_sampler
from jaxunet.training import classifier, resume
from jaxunet.training.batch import noise_batch, split_keys
from jaxunet.training.classifier import COLUMNS, LOGGED, train_classifier
from jaxunet.training.classifier import NETWORK as CLASSIFIER
from jaxunet.training.classifier_accuracy import Accuracy
from jaxunet.training.logs import read_rows
from jaxunet.training.loop import train
from jaxunet.training.noisy_classifier import (
    ClassifierSession,
    check_trainable,
    draw_state,
    make_loss,
    make_network,
    network_config,
    starting_state,
)
from jaxunet.training.step import make_train_step
from jaxunet.weights import read_classifier, write_classifier
from jaxunet.weights.names import flatten

pytestmark = pytest.mark.usefixtures('shared_steps')

STEPS, LAST = 90, 87  # steps of the run; the checkpoint from which it is resumed
NETWORK = {
    'base_channels': 32,
    'channel_mult': (1, 2),
    'num_head_channels': 64,
    'norm_groups': 32,
    'label_dropout': 0.0,
}
CHANGES = {
    'model': NETWORK,
    'data': {'holdout': 96, 'batch_size': 32},
    'optimizer': {'learning_rate': 3e-3, 'weight_decay': 0.05},
    'train': {'steps': STEPS, 'log_every': 45, 'holdout_every': 90, 'checkpoint_every': LAST},
    'parallel': {'devices': 1},
}
CONFIG = tiny_config(**CHANGES)


def test_the_loss_is_the_cross_entropy_at_its_timesteps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear network of pixels and time, in numpy: its loss and its gradient."""

    def predict(self, params, x, t):
        flat = x.reshape(len(x), -1)
        return flat @ params['w'] + t[:, None].astype(jnp.float32) * params['b'][None]

    monkeypatch.setattr(NoisyClassifier, 'predict', predict)
    config = network_config(CONFIG.replace(data={'augment': 'flip', 'batch_size': 8}))
    network, diffusion = make_network(CONFIG, XLA), make_diffusion(config.diffusion)
    parts = make_train_step(
        config,
        build_unet(config, XLA),
        diffusion,
        make_optimizer(config),
        choose('xla'),
        loss=make_loss(network),
    ).parts
    rng, row = np.random.default_rng(0), jnp.arange(8, dtype=jnp.int32)
    image = jnp.asarray(rng.integers(0, 256, (8, 8, 8, 1), dtype=np.uint8))
    batch = {'image': image, 'label': row % 10, 'row': row}
    params = {
        'w': jnp.asarray(rng.normal(size=(64, 10)), jnp.float32),
        'b': jnp.asarray(0.1 * rng.normal(size=10), jnp.float32),
    }
    keys, state = split_keys(jax.random.key(1), row, False), state_template(CONFIG, draw_state)
    slopes, (loss, samples) = jax.jit(
        lambda params, scale: jax.grad(parts.loss, 1, has_aux=True)(
            parts, params, state, keys, batch, scale
        )
    )(params, jnp.float32(2))

    noisy = noise_batch(config, diffusion, parts.sampler, state.timesteps, keys, batch)
    assert len(set(noisy.draw.t.tolist())) > 4
    x, t = np.asarray(noisy.xt, np.float64).reshape(8, 64), np.asarray(noisy.draw.t)
    logits = x @ np.asarray(params['w'], np.float64) + t[:, None] * np.asarray(params['b'])
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(loss, -np.log(shares[range(8), range(8)]).mean(), rtol=1e-5)
    error = (shares - np.eye(8, 10)) / 8
    np.testing.assert_allclose(slopes['w'], 2 * x.T @ error, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slopes['b'], 2 * t @ error, rtol=1e-4, atol=1e-4)
    assert samples is None


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('run')
    assert train_classifier(CONFIG, folder, open_images(CONFIG)) == STEPS
    return folder


def test_it_learns_and_says_so(run: pathlib.Path) -> None:
    rows = read_rows(run / 'metrics.csv', (*LOGGED, *COLUMNS))
    assert [row['step'] for row in rows] == ['45', '90']
    last = {name: float(value) for name, value in rows[-1].items()}
    assert last['loss'] < float(rows[0]['loss'])
    by_quarter = [last[f'held_out_accuracy_{band}'] for band in (1, 2, 3, 4)]
    assert by_quarter[0] > 0.35  # chance is 0.1
    assert by_quarter[0] > by_quarter[3]
    assert last['held_out_accuracy_of_5_1'] > by_quarter[0]
    assert last['held_out_loss_1'] < last['held_out_loss_4']
    (events,) = (run / 'tensorboard').iterdir()
    curves = {name for _, drawn in points(events) for name in drawn}
    assert {'train/loss', 'held_out/held_out_accuracy_1', 'held_out/seen_loss_4'} <= curves
    # The file is that network: the same accuracies from its weights.
    file = read_classifier(run / 'classifier.pt', CONFIG)
    assert file.classes == 10
    network = build_classifier(file.config, file.classes, XLA)
    source = open_images(CONFIG)
    scores = Accuracy(CONFIG, network, source, jax.devices()[0]).measure(file.params)
    np.testing.assert_allclose(scores['held_out'].accuracy, by_quarter)


def test_a_resumed_run_is_the_uninterrupted_one(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / 'again'
    shutil.copytree(run, folder)
    shutil.rmtree(folder / 'checkpoints' / str(STEPS))
    (folder / 'classifier.pt').write_bytes(b'')
    assert train_classifier(CONFIG, folder, open_images(CONFIG)) == STEPS
    sums = []
    for path in (run, folder):
        checkpoints = Checkpoints(path, keep=0, read_only=True, draw=draw_state, network=CLASSIFIER)
        sums.append(checksum(checkpoints.restore(STEPS).state))
        checkpoints.close()
    assert sums[0] == sums[1]
    assert (run / 'classifier.pt').read_bytes() == (folder / 'classifier.pt').read_bytes()


@pytest.mark.parametrize('removed', [0, 1])
def test_a_resumed_run_tells_that_other_images_are_held_out(
    removed: int, run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    digits = open_data(CONFIG, CONFIG.image_shape)
    images = Subset(digits, np.arange(len(digits) - removed))
    train_classifier(CONFIG, run, hold_out(images, CONFIG.data.holdout))  # has no steps left
    warning = 'the run began with 1,797 images and now has 1,796'
    assert (warning in caplog.text) == bool(removed)


def test_a_run_starts_from_another_ones_file(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its file or its workdir is read; with other classes, the last layer is initialized."""
    file = run / 'classifier.pt'
    expected = read_classifier(file, CONFIG).params
    for path in (run, file):
        state = starting_state(CONFIG.replace(init_from=str(path)))
        jax.tree.map(np.testing.assert_array_equal, state.params, expected)
        assert (int(state.step), state.ema) == (0, {})
    five = CONFIG.replace(init_from=str(file), model={'num_classes': 5})
    found, fresh = (flatten(state.params) for state in (starting_state(five), drawn(five)))
    for place, leaf in found.items():
        kept = flatten(expected)[place] if place[:2] != ('pool', 'proj') else fresh[place]
        np.testing.assert_array_equal(leaf, kept)
    with pytest.raises(
        UserError, match=r'classifier\.pt: cannot start .* set model\.base_channels=32'
    ):
        starting_state(CONFIG.replace(init_from=str(file), model={'base_channels': 64}))
    more = CONFIG.replace(init_from=str(file), train={'steps': 45})
    assert train_classifier(more, tmp_path, open_images(more)) == 45
    (row,) = read_rows(tmp_path / 'metrics.csv', (*LOGGED, *COLUMNS))
    first = read_rows(run / 'metrics.csv', (*LOGGED, *COLUMNS))[0]
    assert float(row['loss']) < float(first['loss'])


def drawn(config: Config) -> TrainState:
    """The fresh state of a run."""
    return fresh_state(config, draw_state)


def test_other_commands_refuse_its_checkpoints(run: pathlib.Path) -> None:
    before = sorted(run.rglob('*'))
    for use in (
        lambda: train(CONFIG, run, open_images(CONFIG)),
        lambda: load_model(str(run)),
    ):
        with pytest.raises(UserError, match='UNet, found that of a classifier of noisy images'):
            use()
    assert sorted(run.rglob('*')) == before
    with pytest.raises(UserError, match=r'writes it to WORKDIR/classifier\.pt'):
        read_classifier(run, CONFIG)


@pytest.mark.long
def test_losses_do_not_depend_on_how_a_batch_is_spread(tmp_path: pathlib.Path) -> None:
    train = {'steps': 4, 'log_every': 1, 'holdout_every': 0}
    spread = {'parallel': {'mode': 'pmap', 'devices': 2}, 'optimizer': {'accumulate_steps': 2}}
    losses = []
    for number, changes in enumerate(({}, spread)):
        config, folder = CONFIG.replace(train=train, **changes), tmp_path / str(number)
        train_classifier(config, folder, open_images(config))
        losses.append([float(row['loss']) for row in read_rows(folder / 'metrics.csv', LOGGED)])
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.long
def test_its_file_guides_samples(run: pathlib.Path) -> None:
    """It finds the class that was asked for in guided samples, and not in others.

    The guided model is one that finds no noise in any image.
    """
    classifier = read_classifier(run / 'classifier.pt', CONFIG)
    network = build_classifier(classifier.config, classifier.classes, XLA)
    sampler = make_sampler(SamplerConfig(name='ddim', steps=5), make_diffusion(CONFIG.diffusion))
    labels, keys = jnp.arange(20, dtype=jnp.int32) % 10, sample_keys(0, np.arange(20))

    @functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
    def agreement(params: Params, scale: jax.Array) -> jax.Array:
        slope = class_gradient(network, params, labels, 1.0)
        start = initial_state(keys, CONFIG.image_shape, sampler)
        drawn = run_sampler(
            lambda x, _: jnp.zeros_like(x),
            start,
            keys,
            sampler,
            class_gradient=lambda x, t: scale * slope(x, t),
        )
        logits = network.predict(params, drawn.x, jnp.zeros(20, jnp.int32))
        return jnp.mean(jnp.argmax(logits, axis=1) == labels)

    plain, guided = (agreement(classifier.params, jnp.float32(scale)) for scale in (0, 80))
    assert guided > plain + 0.2


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'diffusion': {'objective': 'flow'}}, 'diffusion.objective: expected epsilon, x0 or v, '),
        ({'model': {'num_classes': 0}}, 'model.num_classes: expected the number of classes'),
        ({'model': {'num_head_channels': 32}}, 'model.num_head_channels: expected 64, found 32'),
        ({'model': {'norm_groups': 16}}, 'model.norm_groups: expected 32, found 16'),
        ({'model': {'skip_scale': 0.5}}, 'model.skip_scale: expected 1.0, found 0.5'),
        ({'data': {'image_size': (8, 16)}}, 'data.image_size: .* square images, found 8x16'),
        ({'data': {'augment': 'edm'}}, 'data.augment: expected none or flip, found edm'),
        ({'loss': {'weighting': 'p2'}}, "loss.weighting: expected 'uniform', found 'p2'"),
        (
            {'init_from': 'a.pt', 'init_from_ema': 'none'},
            "init_from_ema: expected '', found 'none'",
        ),
    ],
)
def test_other_networks_are_refused(changes: dict[str, object], message: str) -> None:
    check_trainable(CONFIG)
    with pytest.raises(UserError, match=message):
        check_trainable(CONFIG.replace(**changes))


def test_other_workdirs_are_refused(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    source = open_images(CONFIG)

    def refused(config: Config, folder: pathlib.Path) -> str:
        with pytest.raises(UserError) as error:
            train_classifier(config, folder, source)
        return str(error.value)

    assert 'no readable checkpoint' in refused(CONFIG, tmp_path)
    other = CONFIG.replace(diffusion={'steps': 50})
    assert 'diffusion.steps' in refused(other, run)


SHORT = CONFIG.replace(
    train={'steps': 6, 'log_every': 2, 'checkpoint_every': 2, 'holdout_every': 0}
)


def logged(folder: pathlib.Path) -> list[tuple[str, str]]:
    return [(row['step'], row['loss']) for row in read_rows(folder / 'metrics.csv', LOGGED)]


def saved(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (folder / 'checkpoints').iterdir())


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassifierSession, 'compile', move_weights)


@pytest.mark.usefixtures('counting')
def test_a_full_disk_is_a_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It ends the run only if what the last step needs cannot be written either."""
    source = open_images(SHORT)

    def full(*_: object) -> None:
        raise UserError('classifier.pt: cannot be written: No space left on device')

    def write_first_and_last(path: pathlib.Path, *rest: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            full()
        write_classifier(path, *rest)

    def save_first_and_last(self: Checkpoints, step: int, *rest: object) -> str:
        if step == 4:
            raise CheckpointWriteError('a checkpoint could not be written')
        return save(self, step, *rest)

    calls: list[pathlib.Path] = []
    save = Checkpoints.save
    with monkeypatch.context() as patch:
        patch.setattr(classifier, 'write_classifier', write_first_and_last)
        patch.setattr(Checkpoints, 'save', save_first_and_last)
        assert train_classifier(SHORT, tmp_path / 'a', source) == 6
    assert saved(tmp_path / 'a') == ['2', '6']
    assert len(calls) == 3
    printed = capsys.readouterr()
    told = printed.out + printed.err
    assert 'warning: classifier.pt: cannot be written: No space left' in told
    assert 'warning: a checkpoint could not be written' in told

    with monkeypatch.context() as patch:
        patch.setattr(classifier, 'write_classifier', full)
        with pytest.raises(UserError, match='No space left'):
            train_classifier(SHORT, tmp_path / 'b', source)
    assert saved(tmp_path / 'b') == ['2', '4', '6']
    assert logged(tmp_path / 'b') == logged(tmp_path / 'a')
    assert train_classifier(SHORT, tmp_path / 'b', source) == 6
    files = [(tmp_path / name / 'classifier.pt').read_bytes() for name in 'ab']
    assert files[0] == files[1]


def test_the_step_is_compiled_while_the_weights_are_drawn(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If compiling fails, the run does not wait for the thread that draws."""
    failed = threading.Event()
    threads = []

    def late(config: Config, draw: Draw) -> TrainState:
        threads.append(threading.current_thread())
        assert failed.wait(60), 'the run waits for the weights'
        return fresh_state(config, draw)

    def fail(self: ClassifierSession, **options: bool) -> None:
        raise UserError('no step')

    monkeypatch.setattr(resume, 'fresh_state', late)
    monkeypatch.setattr(ClassifierSession, 'compile', fail)
    with pytest.raises(UserError, match='no step'):
        train_classifier(SHORT, tmp_path, open_images(SHORT))
    assert threads[0] is not threading.main_thread()
    assert Background.running()
    failed.set()
    threads[0].join()


@pytest.mark.usefixtures('counting')
def test_a_loss_of_skipped_steps_is_nan(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ClassifierSession.call

    def skipping(self: ClassifierSession, *arguments: object, **named: object) -> object:
        metrics = call(self, *arguments, **named)
        return metrics | {'loss': metrics['loss'] * 0, 'bad_steps': metrics['bad_steps'] + 2}

    monkeypatch.setattr(ClassifierSession, 'call', skipping)
    train_classifier(SHORT, tmp_path, open_images(SHORT))
    assert logged(tmp_path) == [('2', 'nan'), ('4', 'nan'), ('6', 'nan')]


@pytest.mark.usefixtures('counting')
def test_an_accuracy_that_does_not_fit_into_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is saved at the step that it measured."""
    config = SHORT.replace(train={'holdout_every': 4, 'checkpoint_every': 100})
    monkeypatch.setattr(Accuracy, 'measure', exhaust)
    with pytest.raises(OutOfMemoryError, match=r'^measuring the accuracy: the device has no mem'):
        train_classifier(config, tmp_path, open_images(config))
    assert saved(tmp_path) == ['4']


def test_the_command(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It reports a finished run, and refuses images that have no classes.

    An objective that is left open is that of the classifier that a run starts from.
    """
    fields = {f'{s}.{k}': v for d in (TINY, CHANGES) for s in d for k, v in d[s].items()}
    flags = [f'--config.{name}={value}' for name, value in fields.items()]
    command = ('jaxunet.training.train_classifier', *flags)
    out = call(*command, f'--workdir={run}')
    assert 'has already trained 90 steps' in out
    np.savez(tmp_path / 'plain.npz', images=np.zeros((200, 8, 8, 1), np.uint8))
    data = f'--config.data.path={tmp_path}/plain.npz'
    start = ('--config.diffusion.objective=', f'--config.init_from={run}')
    error = call(*command, data, *start, f'--workdir={tmp_path}/run', code=2)
    assert 'as in the run of init_from: diffusion.objective=epsilon' in error
    assert 'has no class labels' in error.splitlines()[-1]
    assert not (tmp_path / 'run').exists()
