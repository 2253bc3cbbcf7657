"""Immiscible diffusion by assignment: the permutation, its cost, devices, and training steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.config import Config
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError
from jaxunet.training.batch import draw_noise, normalise, split_keys
from jaxunet.training.noise_assignment import assign, assigned_noise, distances
from jaxunet.training.start import open_checked

pytestmark = pytest.mark.usefixtures('shared_steps')

CLASSES = jnp.arange(64, dtype=jnp.int32) % 3
assigned = jax.jit(lambda cost: assign(cost, jnp.zeros(len(cost), jnp.int32)))
within_classes = jax.jit(assign)
SHAPE = (8, 8, 1)


@pytest.fixture(scope='module')
def source():
    return open_source('digits:', image_shape=SHAPE)


@pytest.fixture(scope='module')
def digits(source):
    """64 images of the set, uint8."""
    return source.load(np.arange(0, 1280, 20))


def costs(digits, count, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    return np.asarray(distances(normalise(jnp.asarray(digits[:count])), keys, count))


def total(cost, noise):
    return cost.astype(np.float64)[np.arange(len(cost)), noise].sum()


def test_distances_are_those_of_the_noise_that_the_keys_draw(digits):
    images, keys = normalise(jnp.asarray(digits[:6])), jax.random.split(jax.random.key(3), 12)
    noise = np.asarray(draw_noise(keys, jnp.zeros((12, *SHAPE)), 1), np.float64)
    pairs = np.asarray(images, np.float64)[:, None] - noise[None]
    expected = np.sqrt(np.square(pairs).sum(axis=(2, 3, 4)))
    for chunk in (12, 4):
        np.testing.assert_allclose(distances(images, keys, chunk), expected, rtol=1e-5)


@pytest.mark.parametrize(('count', 'share'), [(2, 1.0), (8, 0.95), (32, 0.96), (64, 0.97)])
def test_a_permutation_almost_as_good_as_the_best(count, share, digits):
    for seed in range(3):
        cost = costs(digits, count, seed)
        noise = np.asarray(assigned(cost))
        assert sorted(noise) == list(range(count))
        before, best = (
            total(cost, pairs) for pairs in (range(count), linear_sum_assignment(cost)[1])
        )
        assert before - total(cost, noise) >= share * (before - best) - 1e-4


@pytest.mark.parametrize(
    'cost',
    [
        np.zeros((5, 5)),  # equal images and equal noise
        np.repeat(np.arange(5.0)[:, None], 5, axis=1),  # no noise is nearer than another
        np.repeat(np.arange(5.0)[None], 5, axis=0),  # equal images
        1 - np.eye(5),  # the best already
        np.eye(5),
        np.array([[0, 0, 9, 9], [0, 0, 9, 9], [9, 9, 0, 0], [9, 9, 0, 0.0]]),
        1 - np.eye(64)[np.random.default_rng(0).permutation(64)],  # one good pair for each
        np.random.default_rng(1).random((64, 64)) ** 20 * 1e6,
    ],
)
def test_costs_of_any_kind_give_a_permutation_no_worse_than_before(cost):
    noise = np.asarray(assigned(cost.astype(np.float32)))
    assert sorted(noise) == list(range(len(cost)))
    assert total(cost, noise) <= total(cost, range(len(cost))) + 1e-6
    best = total(cost, linear_sum_assignment(cost)[1])
    assert total(cost, noise) <= best + 0.3 * cost.std() * len(cost)


def test_noise_stays_within_its_class(digits):
    """As near to the best as without classes; one image has a class of its own."""
    classes = np.array([9, *CLASSES[1:]], np.int32)
    for seed in range(3):
        cost = costs(digits, 64, seed)
        noise = np.asarray(within_classes(cost, classes))
        assert sorted(noise) == list(range(64))
        np.testing.assert_array_equal(classes[noise], classes)
        before = total(cost, range(64))
        others = np.where(classes[:, None] == classes[None], cost, 1e6)
        best = total(cost, linear_sum_assignment(others)[1])
        assert before - total(cost, noise) >= 0.95 * (before - best)
    alone = within_classes(costs(digits, 64), np.arange(64, dtype=np.int32))
    np.testing.assert_array_equal(alone, np.arange(64))


@pytest.mark.parametrize('unfinished', [0, 2])
def test_an_unfinished_auction_stays_within_classes(unfinished, digits, monkeypatch):
    monkeypatch.setattr('jaxunet.training.noise_assignment.ROUNDS', unfinished)
    noise = np.asarray(assign(jnp.asarray(costs(digits, 64)), CLASSES))
    assert sorted(noise) == list(range(64))
    np.testing.assert_array_equal(np.asarray(CLASSES)[noise], CLASSES)


def config_of(**changes) -> Config:
    return tiny_config(data={'batch_size': 16, 'noise_assignment': 'batch'}, **changes)


def batch_of(digits, rows):
    return {'image': jnp.asarray(digits)[rows], 'label': CLASSES[rows], 'row': rows}


@pytest.mark.parametrize('augment', ['none', pytest.param('flip', marks=pytest.mark.long), 'edm'])
def test_rows_exchange_their_noise_and_come_nearer(augment, digits):
    config = config_of().replace(data={'augment': augment})
    step_key, rows = jax.random.key(5), jnp.arange(16, dtype=jnp.int32)
    keys = split_keys(step_key, rows, in_pairs=False)
    batch = batch_of(digits, rows)
    given = jax.jit(lambda k: assigned_noise(config, step_key, k, batch, None))(keys)
    before, after = (np.asarray(jax.random.key_data(k)) for k in (keys.noise, given))
    assert sorted(map(tuple, after)) == sorted(map(tuple, before))
    assert not np.array_equal(after, before)
    if augment == 'none':
        images = normalise(batch['image'])
        near, far = (np.mean(distances(images, k, 16).diagonal()) for k in (given, keys.noise))
        assert near < far - 0.2
        # Other images, other pairs, but the same noise for a seed and step.
        again = assigned_noise(config, step_key, keys, batch, None)
        np.testing.assert_array_equal(jax.random.key_data(again), after)


def test_only_a_network_of_classes_keeps_noise_within_them(digits):
    step_key, rows = jax.random.key(5), jnp.arange(16, dtype=jnp.int32)
    keys = split_keys(step_key, rows, in_pairs=False)
    before = np.asarray(jax.random.key_data(keys.noise))
    crossed = {}
    for count in (0, 3):
        config = config_of(model={'num_classes': count, 'label_dropout': 0.0})
        given = assigned_noise(config, step_key, keys, batch_of(digits, rows), None)
        after = np.asarray(jax.random.key_data(given))
        came_from = [int(np.flatnonzero((before == key).all(1))[0]) for key in after]
        crossed[count] = np.count_nonzero(CLASSES[np.array(came_from)] != CLASSES[:16])
        assert came_from != list(range(16))
    assert crossed[0] > 0
    assert crossed[3] == 0


@pytest.mark.parametrize(('accumulate_steps', 'classes'), [(1, 3), (2, 0)])
def test_devices_and_micro_batches_share_one_assignment(accumulate_steps, classes, digits):
    config = config_of(
        optimizer={'accumulate_steps': accumulate_steps},
        model={'num_classes': classes, 'label_dropout': 0.0},
    )
    step_key, rows = jax.random.key(6), jnp.arange(16, dtype=jnp.int32)

    def share(rows, axis_name=None):
        keys = split_keys(step_key, rows, in_pairs=False)
        return jax.random.key_data(
            assigned_noise(config, step_key, keys, batch_of(digits, rows), axis_name)
        )

    mesh = jax.make_mesh(
        (4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    split = jax.P('data')
    mapped = jax.shard_map(
        lambda rows: share(rows, 'data'),
        mesh=mesh,
        in_specs=split,
        out_specs=split,
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(mapped)(rows), jax.jit(share)(rows))


SPREADS = [
    {'parallel': {'devices': 4}},
    {'parallel': {'mode': 'pmap', 'devices': 2}, 'optimizer': {'accumulate_steps': 2}},
]


@pytest.mark.parametrize(
    'spread', [SPREADS[0], pytest.param(SPREADS[1], marks=pytest.mark.long)], ids=str
)
def test_the_first_loss_of_flow_is_the_assigned_distance(spread, digits, source):
    """A new network predicts 0, where flow's target is the noise minus the image."""
    config = config_of(diffusion={'objective': 'flow'}, timesteps={'sampler': 'infonoise'})
    bench = Bench(config.replace(**spread), source)  # uniform timesteps until the warm-up ends
    rng = bench.parallel.fetch(bench.state).rng
    step_key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(rng)), 0)
    rows = jnp.arange(16, dtype=jnp.int32)
    batch, keys = batch_of(digits, rows), split_keys(step_key, rows, in_pairs=False)
    given = assigned_noise(config_of(), step_key, keys, batch, None)
    near, far = (
        np.square(distances(normalise(batch['image']), k, 16).diagonal()).mean() / 64
        for k in (given, keys.noise)
    )
    stream = {name: np.asarray(batch[name]) for name in ('image', 'label')}
    loss, _ = bench.losses(1, [stream])
    assert loss == pytest.approx(near, rel=1e-4)
    assert loss < far - 0.05
    assert bench.parallel.fetch(bench.state).timesteps.updates == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ('objective', 'spread'),
    list(zip(('epsilon', 'x0', 'v', 'edm'), 2 * SPREADS, strict=True)),
)
def test_losses_do_not_depend_on_the_devices(objective, spread, source):
    without = {'num_classes': 0, 'label_dropout': 0.0}  # all rows of the batch exchange noise
    config = config_of(diffusion={'objective': objective}, model=without)
    config = config.replace(parallel={'devices': 1})
    one, several = (Bench(c, source).losses() for c in (config, config.replace(**spread)))
    np.testing.assert_allclose(several, one, rtol=1e-4)
    plain = Bench(config.replace(data={'noise_assignment': 'none'}), source).losses()
    # The first loss of x0 does not depend on the noise: a new network predicts 0.
    assert np.abs(np.subtract(plain, one))[1::2].min() > 1e-3


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (
            {'noise_assignment': 'batch', 'noise_candidates': 4},
            r'data.noise_assignment: batch gives .* found data.noise_candidates=4; set that to 1',
        ),
        (
            {'noise_assignment': 'batch', 'batch_size': 1},
            r'data.noise_assignment: batch needs data.batch_size of 2 or more, found 1',
        ),
        (
            {'noise_assignment': 'batch', 'model': {'low_res_size': (4,)}},
            r'data.noise_assignment: batch would let the pictures .*low_res_size=.*; set none',
        ),
        (
            {'noise_assignment': 'bach'},
            r'data.noise_assignment: expected one of none, batch, .* did you mean "batch"',
        ),
    ],
)
def test_what_does_not_go_together_is_refused(data, message):
    model = data.get('model', {})
    with pytest.raises(UserError, match=message):
        tiny_config(data={k: v for k, v in data.items() if k != 'model'}, model=model)


@pytest.mark.parametrize(
    ('model', 'told'),
    [
        ({'num_classes': 10}, ' class,'),
        ({'num_classes': 0, 'label_dropout': 0.0, 'low_res_size': (4,)}, ' picture,'),
        ({'num_classes': 0, 'label_dropout': 0.0}, ''),
    ],
)
def test_noise_that_tells_the_network_something_is_a_warning(model, told, caplog):
    for count in (1, 4):
        config = tiny_config(data={'path': 'digits:', 'noise_candidates': count}, model=model)
        with caplog.at_level('WARNING', logger='absl'):
            open_checked(config)
        assert ('tells the network the' + told in caplog.text) == (count > 1 and bool(told))
