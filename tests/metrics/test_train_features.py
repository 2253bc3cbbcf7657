"""The feature network that the project trains: it learns, its file comes back, and evaluate labels
what it measures.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import call

from jaxunet.data.sources import open_source
from jaxunet.metrics import features
from jaxunet.metrics.augmentation import augment, mix
from jaxunet.metrics.classifier import Architecture, apply, from_arrays, init, normalise, to_arrays
from jaxunet.metrics.classifier_recipe import Recipe, one_cycle
from jaxunet.metrics.classifier_training import fitting, train
from jaxunet.metrics.labelled_images import Images, fingerprint, split
from jaxunet.runtime.errors import UserError

SMALL = ['--epochs=6', '--channels=8', '--noflip', '--batch_size=64', '--learning_rate=1.6']


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp('features') / 'digits.npz'
    return path, call(
        'jaxunet.metrics.train_features',
        '--reference=digits:',
        f'--output={path}',
        '--cutout=0.3',
        '--cutmix=0.2',
        *SMALL,
    )


def test_it_learns_and_says_so(trained):
    path, out = trained
    with np.load(path) as arrays:
        told = json.loads(str(arrays['training']))
    assert told['test_accuracy'] > 0.8  # chance is 0.1
    assert (told['cutout'], told['cutmix']) == (0.3, 0.2)
    assert (
        f'test accuracy {told["test_accuracy"]:.4f} on 179 images (a tenth of digits:, held '
        'out); 6 epochs' in out
    )
    source = open_source('digits:', image_shape=(8, 8, 3))
    assert told['reference_sha256'] == fingerprint(
        Images(source.load(np.arange(1797)), source.labels)
    )
    assert (told['images'], told['test_images'], len(told['classes'])) == (1618, 179, 10)


@pytest.mark.long
def test_evaluate_labels_what_it_measures(trained, tmp_path):
    path, _ = trained
    digits = open_source('digits:', image_shape=(8, 8, 3)).load(np.arange(0, 1797, 3))
    noise = np.random.default_rng(0).integers(0, 256, digits.shape, dtype=np.uint8)
    values = {}
    for name, images in (('digits', digits), ('noise', noise)):
        np.savez(tmp_path / f'{name}.npz', images=images)
        sides = [f'--samples={tmp_path}/{name}.npz', '--reference=digits:', f'--features={path}']
        out = call(
            'jaxunet.evaluate',
            *sides,
            '--metrics=fid,kid,recall',
            f'--output={tmp_path}/{name}.jsonl',
        )
        rows = [json.loads(line) for line in (tmp_path / f'{name}.jsonl').read_text().splitlines()]
        own = rows[0]['features']
        assert own.startswith('classifier-')
        assert [row['metric'] for row in rows] == [
            f'{m}[features={own}]' for m in ('frechet_distance', 'kernel_distance', 'recall')
        ]
        assert 'trained on digits:, test accuracy 0.' in rows[0]['resize']
        assert 'fid' not in out.lower()
        values[name] = [row['value'] for row in rows]
    assert values['noise'][0] > 20 * values['digits'][0]
    assert values['noise'][1] > 0.5 > abs(values['digits'][1])
    assert values['digits'][2] > 0.9
    assert values['noise'][2] < 0.1


def test_the_file_comes_back(trained):
    path, _ = trained
    network = features.load_features(str(path))
    images = open_source('digits:', image_shape=(8, 8, 3)).load(np.arange(100))
    found = np.asarray(network.extract(images))
    assert found.shape == (100, network.dimension) == (100, 16)
    with np.load(path) as arrays:
        everything = dict(arrays)
    architecture, params, statistics, scale, told = from_arrays('x', everything)
    again = to_arrays(architecture, params, statistics, np.asarray(scale), told)
    assert {**again, 'jaxunet_features': np.array('classifier')}.keys() == everything.keys()
    for name, value in again.items():
        np.testing.assert_array_equal(value, everything[name])
    # Every stage's features have a mean variance of 1 over the images that it was trained on.
    every = np.asarray(
        network.extract(open_source('digits:', image_shape=(8, 8, 3)).load(np.arange(1797)))
    )
    assert every.var(axis=0).mean() == pytest.approx(1, rel=0.1)
    with pytest.raises(UserError, match='compares images of 8x8 pixels, found 16x8'):
        network.extract(np.zeros((2, 16, 8, 3), np.uint8))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'first.kernel': None}, r'expected an array first\.kernel, found none'),
        (
            {'first.scale': np.ones(3, np.float32)},
            r'first\.scale: expected finite float32 of shape \(8,\), found float32 of \(3,\)',
        ),
        (
            {'first.kernel': np.ones((3, 3, 3, 8), np.float32)},
            r'first\.kernel: expected finite float16',
        ),
        ({'first.bias': np.full(8, np.nan, np.float32)}, r'first\.bias: expected finite'),
        ({'architecture': np.array('nothing')}, 'architecture: expected a JSON object'),
        ({'architecture': np.array('{"height": 8}')}, 'architecture: expected a field width'),
        ({'training': None}, 'training: expected a JSON object'),
    ],
)
def test_damaged_files(change, message, trained, tmp_path):
    with np.load(trained[0]) as arrays:
        everything = dict(arrays) | change
    np.savez(
        tmp_path / 'x.npz',
        **{name: value for name, value in everything.items() if value is not None},
    )
    with pytest.raises(UserError, match=message):
        features.load_features(str(tmp_path / 'x.npz'))


def test_shapes_of_larger_images():
    """CIFAR-10's: three stages, two of them with a branch; batch statistics and stored ones agree
    where they are the same.
    """
    architecture = Architecture(32, 32, 2, 5, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    assert architecture.stages == [4, 8, 16]
    assert [name for name in architecture.convolutions if '.' in name] == [
        'stage0.0',
        'stage0.1',
        'stage2.0',
        'stage2.1',
    ]
    params, statistics = init(architecture, jax.random.key(0))
    arrays = to_arrays(architecture, params, statistics, np.ones(28), {})
    assert {
        name: value.shape for name, value in arrays.items() if value.dtype.kind == 'f'
    } == architecture.shapes
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    x = normalise(architecture, jnp.asarray(images))
    np.testing.assert_allclose(x, images / 63.75 - 2, atol=1e-5)
    scores, found, used = apply(architecture, params, x, None)
    assert (scores.shape, found.shape) == ((6, 5), (6, 28))
    for mine, again in zip((scores, found), apply(architecture, params, x, used), strict=False):
        np.testing.assert_allclose(mine, again, rtol=1e-5, atol=1e-6)


def test_mixed_images_have_mixed_targets():
    """Each image is a number of its own, and so the class of its target."""
    numbers = jnp.arange(8)
    x = jnp.broadcast_to(numbers[:, None, None, None].astype(jnp.float32), (8, 12, 10, 1))
    target = jax.nn.one_hot(numbers, 8)
    shares = []
    for seed in range(200):
        mixed, targets = (
            np.asarray(a) for a in jax.jit(mix)(x, target, jax.random.key(seed), 0.75)
        )
        for i in range(8):
            own = mixed[i, :, :, 0] == i
            assert ((mixed[i, :, :, 0] == (i - 1) % 8) | own).all()
            np.testing.assert_allclose(
                targets[i],
                own.mean() * np.eye(8)[i] + (1 - own.mean()) * np.eye(8)[i - 1],
                atol=1e-6,
            )
            rows, columns = np.nonzero(~own)
            assert (~own).sum() == (np.unique(rows).size * np.unique(columns).size)  # a rectangle
        shares.append(1 - own.mean())
    untouched = np.mean(np.array(shares) == 0)
    assert 0.15 < untouched < 0.4  # a quarter, and a few rectangles between two pixels
    assert max(shares) > 0.7
    same, targets = mix(x, target, jax.random.key(0), 0.0)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(targets, target)


def test_augmentation():
    """A crop of the padded image, mirrored or not, around a blank square; and each differs."""
    image = np.arange(1, 65, dtype=np.float32).reshape(8, 8, 1)
    keys = jax.random.key(3)
    batch = jnp.broadcast_to(jnp.asarray(image)[None], (64, 8, 8, 1))
    found = np.asarray(jax.jit(lambda x: augment(x, keys, Recipe()))(batch))[..., 0]
    padded = np.pad(image[..., 0], 1, mode='reflect')
    crops = [padded[i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    crops += [crop[:, ::-1] for crop in crops]
    seen = set()
    for one in found:
        assert (one == 0).sum() == 4  # a quarter of the side, squared
        (which,) = (i for i, crop in enumerate(crops) if (one[one != 0] == crop[one != 0]).all())
        seen.add(which)
    assert len(seen) > 12
    unchanged = augment(batch, keys, Recipe(flip=False, crop=0.0, cutout=0.0))
    np.testing.assert_array_equal(unchanged, batch)


def test_the_learning_rate_and_the_time():
    np.testing.assert_allclose(
        [one_cycle(jnp.float32(s)) for s in (0, 0.1, 0.2, 0.6, 1)], [0, 0.5, 1, 0.5, 0], atol=1e-6
    )
    random = np.random.default_rng(0)
    few = Images(random.integers(0, 256, (32, 4, 4, 3), dtype=np.uint8), np.arange(32) % 2)
    said: list[str] = []
    done = train(few, few, 2, Recipe(seconds=1.0, batch_size=16, flip=False), said.append)
    assert done.epochs > 1
    assert np.isnan(done.mirrored_accuracy)
    assert any(f'{done.epochs} epochs fit in 1 s' in line for line in said)


@pytest.mark.parametrize(
    ('seconds', 'first', 'others', 'epochs', 'timed'),
    [
        (5, 0.4, 0.01, 500, 51),
        (300, 2, 1, 300, 2),
        (2, 0.1, 0.25, 8, 2),
        (20, 4, 4, 5, 1),
        (1, 3, 3, 1, 1),
    ],
)
def test_epochs_that_fit(monkeypatch, seconds, first, others, epochs, timed):
    now = [0.0]
    monkeypatch.setattr('time.perf_counter', lambda: now[-1])
    found = fitting(seconds, lambda: now.append(now[-1] + (others if now[1:] else first)))
    assert found == pytest.approx(epochs, rel=0.01)
    assert timed <= len(now[1:]) <= timed + 1


@pytest.mark.long
def test_an_epoch_as_one_program_is_the_same(monkeypatch):
    """GPUs run an epoch as one program."""
    random = np.random.default_rng(0)
    few = Images(random.integers(0, 256, (48, 8, 8, 3), dtype=np.uint8), np.arange(48) % 3)
    recipe = Recipe(epochs=2, batch_size=16, learning_rate=3.0, dtype='float32')
    by_steps = train(few, few, 2, recipe, str)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    whole = train(few, few, 2, recipe, str)
    for one, other in zip(
        jax.tree.leaves(by_steps.params), jax.tree.leaves(whole.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=5e-3, atol=5e-4)
    scores = sum(
        np.asarray(
            apply(
                whole.architecture,
                whole.params,
                normalise(whole.architecture, jnp.asarray(x)),
                whole.statistics,
            )[0]
        )
        for x in (few.images, few.images[:, :, ::-1])
    )
    assert whole.mirrored_accuracy == np.mean(scores.argmax(axis=1) == few.labels)
    fresh, _ = init(whole.architecture, jax.random.key(0))
    assert not np.allclose(fresh['first']['kernel'], whole.params['first']['kernel'], atol=1e-2)


def test_held_out_images_are_not_trained_on():
    random = np.random.default_rng(0)
    images = Images(random.integers(0, 256, (50, 4, 4, 3), dtype=np.uint8), np.arange(50))
    rest, held = split(images, 1)
    assert sorted([*rest.labels, *held.labels]) == list(range(50))
    assert len(held.labels) == 5


def test_mistakes(tmp_path):
    images = np.zeros((30, 8, 8, 3), np.uint8)
    np.savez(tmp_path / 'plain.npz', images=images)
    np.savez(tmp_path / 'one.npz', images=images, labels=np.zeros(30, int))
    module = 'jaxunet.metrics.train_features'
    for name, found in (('plain.npz', 'none'), ('one.npz', '1')):
        assert f'two classes or more, found {found}; put each class' in call(
            module, f'--reference={tmp_path / name}', f'--output={tmp_path}/f.npz', code=2
        )
    assert '--output: expected a name that ends in .npz' in call(
        module, '--reference=digits:', f'--output={tmp_path}/f.pt', code=2
    )
    (tmp_path / 'folder.npz').mkdir()
    assert 'folder.npz: cannot be written: it is a folder; name a file' in call(
        module, '--reference=digits:', f'--output={tmp_path}/folder.npz', code=2
    )
    assert {path.name for path in tmp_path.iterdir()} == {'plain.npz', 'one.npz', 'folder.npz'}
