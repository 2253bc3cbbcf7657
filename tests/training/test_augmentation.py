"""EDM's augmentation: geometry against scipy, parameters, and what the network is told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_golden import IMAGES, PROBABILITY
from methods_golden import pictures as smooth
from scipy import ndimage
from support.bench import Bench
from support.peer_values import FIXTURES
from support.tiny import tiny_config

from jaxunet.checkpoint.fine_tune import Network, fit
from jaxunet.checkpoint.resumable import check_resumable
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import identity, resolve, to_dict
from jaxunet.config.schema import AUGMENTATION_INPUTS
from jaxunet.data.automatic import complete
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError
from jaxunet.training.augmentation import Geometry, augment, draw, labels, transform

GOLDEN = np.load(FIXTURES / 'methods_golden.npz')


def pictures(n: int, shape: tuple[int, ...] = (10, 14, 3)) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (n, *shape)).astype(np.float32)


def geometry(n: int, **fields) -> Geometry:
    zeros = {name: np.zeros(n) for name in Geometry._fields} | {'shift': np.zeros((n, 2))}
    return Geometry(
        **{
            name: jnp.asarray(np.broadcast_to(fields.get(name, value), value.shape), jnp.float32)
            for name, value in zeros.items()
        }
    )


def test_an_image_without_transformations_stays_bit_for_bit():
    images = pictures(3)
    np.testing.assert_array_equal(transform(jnp.asarray(images), geometry(3)), images)
    assert not np.any(labels(geometry(3)))


@pytest.mark.parametrize(
    ('fields', 'expected'),
    [
        ({'mirror': 1}, lambda x: x[:, :, ::-1]),
        ({'flip': 1}, lambda x: x[:, ::-1]),
        # A quarter of the width to the right; what comes in is the reflection.
        (
            {'shift': [2, 0]},
            lambda x: np.pad(x, ((0, 0), (0, 0), (4, 0), (0, 0)), mode='reflect')[:, :, :16],
        ),
        (
            {'shift': [0, -4]},
            lambda x: np.pad(x, ((0, 0), (0, 8), (0, 0), (0, 0)), mode='reflect')[:, 8:],
        ),
        ({'rotation': np.pi / 2}, lambda x: np.rot90(x, 1, (1, 2))),
        ({'rotation': np.pi, 'mirror': 1}, lambda x: x[:, ::-1]),
    ],
)
def test_whole_pixels(fields, expected):
    images = pictures(2, (16, 16, 2))
    found = transform(jnp.asarray(images), geometry(2, **fields))
    np.testing.assert_allclose(found, expected(images), atol=3e-5)


def matrix(a: float, b: float, c: float, d: float) -> np.ndarray:
    return np.array([[a, b], [c, d]])


def turn(angle: float) -> np.ndarray:
    """Turns counter-clockwise where y points down."""
    return matrix(np.cos(angle), np.sin(angle), -np.sin(angle), np.cos(angle))


def test_all_at_once_as_scipy_resamples_it():
    """Points of the image move by translate · stretch · rotate · scale · flip, in that order."""
    images, rng = pictures(8), np.random.default_rng(1)
    _, height, width, channels = images.shape
    fields = {
        'mirror': rng.integers(0, 2, 8),
        'flip': rng.integers(0, 2, 8),
        **{name: rng.normal(size=8) for name in ('scale', 'rotation', 'direction', 'stretch')},
        'shift': rng.normal(size=(8, 2)),
    }
    found = np.asarray(transform(jnp.asarray(images), geometry(8, **fields)))
    rows, columns = np.indices((height, width)).astype(float)
    for i in range(8):
        g = {name: values[i] for name, values in fields.items()}
        forward = (
            turn(g['direction'])
            @ np.diag([2 ** (0.2 * g['stretch']), 2 ** (-0.2 * g['stretch'])])
            @ turn(-g['direction'])
            @ turn(g['rotation'])
            @ np.diag([2 ** (0.2 * g['scale'])] * 2)
            @ np.diag([1 - 2 * g['mirror'], 1 - 2 * g['flip']])
        )
        middle = np.array([(width - 1) / 2, (height - 1) / 2])
        shift = g['shift'] * np.array([width, height]) / 8
        points = np.stack([columns, rows], axis=-1) - middle - shift
        x, y = np.moveaxis(points @ np.linalg.inv(forward).T + middle, -1, 0)
        for channel in range(channels):
            expected = ndimage.map_coordinates(
                images[i, ..., channel].astype(float), [y, x], order=1, mode='mirror'
            )
            np.testing.assert_allclose(found[i, ..., channel], expected, atol=2e-5)


def test_the_network_is_told_of_every_transformation():
    told = labels(
        geometry(
            1, mirror=1, flip=1, scale=0.3, rotation=0.5, direction=0.7, stretch=2, shift=[-1, 4]
        )
    )
    expected = [1, 1, 0.3, np.cos(0.5) - 1, np.sin(0.5), 2 * np.cos(0.7), 2 * np.sin(0.7), -1, 4]
    assert told.shape == (1, AUGMENTATION_INPUTS)
    np.testing.assert_allclose(told[0], expected, rtol=1e-6)


@pytest.mark.parametrize('probability', [0.0, 0.12, 1.0])
def test_draws(probability):
    keys = jax.random.split(jax.random.key(0), 20_000)
    g = jax.tree.map(np.asarray, jax.jit(draw, static_argnums=1)(keys, probability))
    assert abs(g.mirror.mean() - 0.5) < 0.02
    assert abs(g.flip.mean() - probability / 2) < 0.02
    for values in (g.scale, g.rotation, g.stretch, g.shift[:, 0], g.shift[:, 1]):
        assert abs((values != 0).mean() - probability) < 0.01
    assert not g.direction[g.stretch == 0].any()
    assert abs((g.direction != 0).mean() - probability / 2) < 0.01
    if probability:
        happens = g.scale != 0
        assert abs(g.scale[happens].std() - 1) < 0.05
        assert abs(g.shift[g.shift[:, 0] != 0].std() - 1) < 0.05
        angles = np.concatenate([g.rotation[g.rotation != 0], g.direction[g.direction != 0]])
        assert abs(angles.std() - np.pi / np.sqrt(3)) < 0.05
        # Independent of each other.
        both = (happens & (g.rotation != 0)).mean()
        assert abs(both - probability**2) < 0.01


def test_each_image_draws_from_its_own_key():
    images, keys = jnp.asarray(pictures(6)), jax.random.split(jax.random.key(3), 6)
    augmented = jax.jit(augment, static_argnums=2)
    together, told = augmented(images, keys, 0.8)
    alone, told_alone = augmented(images[4:5], keys[4:5], 0.8)
    np.testing.assert_allclose(together[4:5], alone, atol=1e-6)
    np.testing.assert_allclose(told[4:5], told_alone, rtol=1e-6, atol=1e-6)
    assert np.abs(together).max() <= 1 + 1e-6  # interpolation makes no new values


def test_one_gather_and_no_loop():
    text = str(
        jax.make_jaxpr(lambda x, k: augment(x, k, 0.5))(
            pictures(2), jax.random.split(jax.random.key(0), 2)
        )
    )
    assert text.count(' gather[') == 1
    assert 'while' not in text
    assert 'scan' not in text


@pytest.mark.long
def test_a_step_trains_on_augmented_images_however_the_batch_is_spread():
    source = open_source('digits:', image_shape=(8, 8, 1))
    edm = {'data': {'augment': 'edm', 'augment_probability': 0.8}}
    one = Bench(tiny_config(**edm, parallel={'devices': 1}), source)
    losses = one.losses()
    spread = {'parallel': {'mode': 'pmap', 'devices': 2}, 'optimizer': {'accumulate_steps': 2}}
    np.testing.assert_allclose(
        Bench(tiny_config(**edm).replace(**spread), source).losses(), losses, rtol=1e-4
    )
    kernel = one.parallel.fetch(one.state.params)['time_embed_augmentation']['kernel']
    assert (np.abs(kernel).max(axis=1) > 0).all()  # for each of the nine numbers
    barely = {'data': {'augment': 'edm', 'augment_probability': 0.0}}
    other = Bench(tiny_config(**barely, parallel={'devices': 1}), source).losses(count=1)
    assert other[1] != losses[1]  # the first gradient; the first prediction is zero


def test_a_resumed_run_keeps_its_layer(tmp_path):
    plain, flip, edm = (tiny_config(data={'augment': name}) for name in ('none', 'flip', 'edm'))
    assert check_resumable(plain, flip, tmp_path)
    for saved, now in ((plain, edm), (edm, flip)):
        with pytest.raises(UserError, match=r'(?s)data\.augment: .*or start from its weights'):
            check_resumable(saved, now, tmp_path)
    more = edm.replace(data={'augment_probability': 0.3})
    assert check_resumable(edm, more, tmp_path)


def test_runs_with_and_without_the_layer_start_from_each_other():
    plain, edm = (Network(tiny_config(data={'augment': name}), ()) for name in ('none', 'edm'))
    params = jax.device_get(fresh_state(plain.config).params)
    wider = fit(params, plain, edm, 'plain')
    assert not wider.complete
    assert 'fresh: time_embed_augmentation, the layer of data.augment=edm' in wider.report
    assert not wider.params['time_embed_augmentation']['kernel'].any()
    back = fit(wider.params, edm, plain, 'edm')
    assert any(line.startswith('left out: time_embed_augmentation') for line in back.report)
    jax.tree.map(np.testing.assert_array_equal, back.params, params)


def of_edm(draws: np.ndarray) -> Geometry:
    """The geometry that EDM's code makes of its random numbers, in the order of its draws.

    A number of each pair is the parameter, and the other decides whether the image gets it.
    """
    mirror, _, flip, flips, scale, scales, turn, turns, stretch, axis, stretches, along, *shift = (
        draws
    )
    happens = [row < 0.75 for row in (flips, scales, turns, stretches, shift[2])]
    return geometry(
        IMAGES,
        mirror=mirror,
        flip=flip * happens[0],
        scale=scale * happens[1],
        rotation=np.pi * (2 * turn - 1) * happens[2],
        direction=np.pi * (2 * axis - 1) * (along < 0.5) * happens[3],
        stretch=stretch * happens[3],
        shift=np.stack(shift[:2], axis=1) * happens[4][:, None],
    )


def test_images_and_inputs_are_those_of_edms_code():
    """On its own random numbers; its filter and our bilinear interpolation differ by up to 1.8%."""
    g = of_edm(GOLDEN['augment_draws'])
    np.testing.assert_allclose(labels(g), GOLDEN['augment_labels'], atol=2e-6)
    images = jnp.asarray(smooth()[..., None], jnp.float32)

    def errors(g: Geometry) -> np.ndarray:
        difference = np.asarray(transform(images, g))[..., 0] - GOLDEN['augmented']
        return np.sqrt(np.mean(difference**2, axis=(1, 2)))

    assert errors(g).max() < 0.02
    for name in ('rotation', 'direction'):
        angles = getattr(g, name)
        turned = np.asarray(jnp.abs(jnp.sin(angles)) > 0.1)
        assert turned.sum() > 3
        assert errors(g._replace(**{name: -angles}))[turned].max() > 0.1


def test_as_many_inputs_are_zero_as_with_edms_code():
    keys = jax.random.split(jax.random.key(1), 50_000)
    told = np.asarray(jax.jit(lambda k: labels(draw(k, PROBABILITY)))(keys))
    np.testing.assert_allclose((told != 0).mean(0), GOLDEN['augment_shares'], atol=0.006)
    assert GOLDEN['augment_shares'][6] == pytest.approx(PROBABILITY / 2, abs=0.006)


def test_the_earlier_rule_is_the_mirror_image():
    """Same draws, same inputs, opposite angles; and no direction is fixed."""
    images, keys = jnp.asarray(pictures(6)), jax.random.split(jax.random.key(3), 6)
    found, told = augment(images, keys, 0.9, 'earlier')
    g = draw(keys, 0.9, along_x=0)
    np.testing.assert_array_equal(g.direction != 0, g.stretch != 0)
    opposite = g._replace(rotation=-g.rotation, direction=-g.direction)
    np.testing.assert_array_equal(found, transform(images, opposite))
    np.testing.assert_array_equal(told, labels(g))


def test_a_config_from_before_the_rule_keeps_its_meaning(tmp_path):
    edm = tiny_config(data={'augment': 'edm'})
    values = to_dict(edm)
    del values['data']['augment_rule']  # as its checkpoints have it
    old = resolve(values)
    assert (old.data.augment_rule, edm.data.augment_rule) == ('earlier', 'edm')
    assert identity(values) == identity(to_dict(old)) != identity(to_dict(edm))
    assert complete(to_dict(edm), old) == old  # a resumed run
    assert complete(to_dict(edm)) == edm
    with pytest.raises(UserError, match=r'data\.augment_rule: .*earlier.* -> .*edm'):
        check_resumable(old, edm, tmp_path)
    # Other runs have no rule to keep.
    flip = to_dict(tiny_config(data={'augment': 'flip'}))
    before = {**flip, 'data': {k: v for k, v in flip['data'].items() if k != 'augment_rule'}}
    assert identity(flip) == identity(before)
    assert resolve(before) == resolve(flip)


def test_weights_of_the_earlier_rule_are_turned():
    """With the sines' rows negated, the network is told of an image what it was told before."""
    edm, old = (
        Network(tiny_config(data={'augment': 'edm', 'augment_rule': rule}), ())
        for rule in ('edm', 'earlier')
    )
    params = jax.device_get(fresh_state(old.config).params)
    kernel = np.random.default_rng(0).normal(size=params['time_embed_augmentation']['kernel'].shape)
    params['time_embed_augmentation'] = {'kernel': kernel.astype(np.float32)}
    fitted = fit(params, old, edm, 'old')
    assert any('turned: time_embed_augmentation' in line for line in fitted.report)
    g = draw(jax.random.split(jax.random.key(5), 8), 0.9)
    opposite = g._replace(rotation=-g.rotation, direction=-g.direction)
    np.testing.assert_allclose(
        labels(g) @ fitted.params['time_embed_augmentation']['kernel'],
        labels(opposite) @ kernel.astype(np.float32),
        rtol=1e-4,
        atol=1e-5,
    )
    assert fit(params, edm, edm, 'same').complete
