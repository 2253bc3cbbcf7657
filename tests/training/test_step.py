"""The step: the same losses however the batch is spread, skipped bad steps, averages, schedules."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint.optimizer import get_moments, learning_rate_schedule, set_moments
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import read
from jaxunet.data import pipeline
from jaxunet.data.order import batch_indices
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError
from jaxunet.training.ema import ema_decay
from jaxunet.training.logs import mean_loss, read_metrics
from jaxunet.training.loop import train
from jaxunet.training.parallel import Parallel
from jaxunet.training.session import Session, choose_steps_per_call

pytestmark = pytest.mark.usefixtures('shared_steps')


def noisy(**changes):
    """A config with all that a step can do: tests share its programs, as few are quick to compile.

    Dropout and flips draw numbers, and the update clips, decays and averages.
    """
    config = tiny_config(
        model={'dropout': 0.2},
        data={'augment': 'flip'},
        optimizer={'clip_norm': 0.01, 'weight_decay': 100.0},
        ema={'rates': (0.9, 0.0)},
        parallel={'devices': 1},
        train={'steps': 12, 'log_every': 6, 'checkpoint_every': 6},
    )
    return config.replace(**changes)


@pytest.fixture(scope='module')
def benches(source):
    """Benches that tests share, by how they spread a noisy batch."""
    return functools.cache(
        lambda mode, devices: Bench(noisy(parallel={'mode': mode, 'devices': devices}), source)
    )


@pytest.fixture
def bench_of(benches):
    """Returns the bench of a mode and a number of devices, with the state of a new run."""

    def get(mode, devices):
        bench = benches(mode, devices)
        bench.restart()
        return bench

    return get


@pytest.fixture(scope='module')
def one_device(benches):
    bench = benches('jit', 1)
    bench.restart()
    return bench.losses()


def assert_losses(got, one_device):
    np.testing.assert_allclose(got, one_device, rtol=1e-4)
    assert len(set(one_device)) == len(one_device)


@pytest.mark.parametrize('mode', ['jit', pytest.param('pmap', marks=pytest.mark.long)])
def test_losses_do_not_depend_on_the_devices(mode, bench_of, one_device):
    assert_losses(bench_of(mode, 4).losses(), one_device)


@pytest.mark.parametrize(
    'changes',
    [
        {'parallel': {'mode': 'pmap', 'devices': 2}, 'optimizer': {'accumulate_steps': 4}},
        pytest.param(
            {'parallel': {'mode': 'jit', 'devices': 2}, 'optimizer': {'accumulate_steps': 2}},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {'parallel': {'devices': 1}, 'optimizer': {'accumulate_steps': 8}},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_losses_do_not_depend_on_how_a_batch_is_spread(changes, source, one_device):
    assert_losses(Bench(noisy(**changes), source).losses(), one_device)


@pytest.mark.extension
@pytest.mark.parametrize('mode', ['jit', pytest.param('pmap', marks=pytest.mark.long)])
def test_the_cuda_backend_trains_alike(mode, source, one_device):
    """Its ops and its update, on the handlers of this machine's device."""
    config = noisy(backend='cuda', parallel={'mode': mode, 'devices': 2})
    np.testing.assert_allclose(Bench(config, source).losses(), one_device, rtol=1e-4)


@pytest.mark.parametrize(
    ('mode', 'devices'),
    [
        ('jit', 1),
        pytest.param('jit', 4, marks=pytest.mark.long),
        pytest.param('pmap', 4, marks=pytest.mark.long),
    ],
)
def test_streamed_batches_give_the_losses_of_the_resident_dataset(
    mode, devices, source, bench_of, one_device
):
    bench = bench_of(mode, devices)
    stream = pipeline.stream(source, bench.config, 0, bench.parallel.local_rows)
    batches = [next(stream) for _ in range(3)]
    stream.close()
    np.testing.assert_allclose(bench.losses(batches=batches), one_device, rtol=1e-4)


@pytest.mark.parametrize(
    ('mode', 'devices', 'streams'),
    [
        ('jit', 1, False),  # those of a stream are in the test below
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ('jit', 1, True),
                *((mode, 4, streams) for mode in ('jit', 'pmap') for streams in (False, True)),
            )
        ),
    ],
)
def test_steps_of_one_call_are_those_of_several(mode, devices, streams, source, bench_of):
    bench = bench_of(mode, devices)
    losses, singly = bench.losses(count=3), bench.parallel.fetch(bench.state)
    bench.restart()
    data = bench.resident
    if streams:
        stream = pipeline.stream(source, bench.config, 0, bench.parallel.local_rows)
        data = bench.parallel.put_batches([next(stream) for _ in range(3)])
        stream.close()
    three = bench.parallel.compile(bench.make, bench.state, data, steps=3, cache=True)
    bench.state, metrics = three(bench.state, data)
    metrics, at_once = bench.parallel.fetch(metrics), bench.parallel.fetch(bench.state)
    assert {value.shape for value in metrics.values()} == {(3,)}
    np.testing.assert_allclose(
        np.stack([metrics['step_loss'], metrics['grad_norm']], axis=1).ravel(), losses, rtol=1e-5
    )
    for one, other in zip(*map(jax.tree.leaves, (singly, at_once)), strict=True):
        np.testing.assert_allclose(np.float64(other), np.float64(one), rtol=0, atol=1e-5)


def test_the_loop_counts_every_step_of_a_call(tmp_path, source, caplog):
    rows = []
    for steps, cache in ((1, 'auto'), (3, 'auto'), (3, 'stream')):
        config = noisy(train={'steps_per_call': steps}, data={'cache': cache})
        workdir = tmp_path / f'{steps}{cache}'
        assert train(config, workdir, source) == 12
        rows.append(
            [
                (int(row['step']), float(row['loss']), float(row['grad_norm']))
                for row in read_metrics(workdir / 'metrics.csv')
            ]
        )
        assert sorted(path.name for path in (workdir / 'checkpoints').iterdir()) == ['12', '6']
    assert [row[0] for row in rows[1]] == [6, 12]
    slow = 'train.steps_per_call: XLA runs a loop of 3 steps slowly on a CPU; 1 is faster there'
    assert [
        record.getMessage() for record in caplog.records if 'on a CPU' in record.getMessage()
    ] == [slow, slow]
    for row in rows[1:]:
        np.testing.assert_allclose(row, rows[0], rtol=1e-4)
    with pytest.raises(
        UserError,
        match=r'train.steps_per_call: 8 does not divide 12, the step to resume from; set it to '
        r'0, to 1 or',
    ):
        train(config.replace(train={'steps': 24, 'steps_per_call': 8}), workdir, source)


@pytest.mark.parametrize(('steps', 'bad'), [(1, 2), (3, 3)])
def test_training_stops_after_too_many_bad_steps(steps, bad, tmp_path, source):
    """A call's steps are read together, so that there can be more of them than are allowed."""
    config = noisy(train={'steps_per_call': steps, 'max_bad_steps': 2})
    state = fresh_state(config)
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), state.params)
    with pytest.raises(
        UserError,
        match=rf'{bad} steps in a row had a loss or gradient that is not finite '
        r'\(train.max_bad_steps=2\); lower',
    ):
        train(config, tmp_path, source, initial=dataclasses.replace(state, params=broken))


def test_the_loss_of_steps_that_were_all_skipped(tmp_path, source):
    """Is nan, not the 0 that their sum is; a log with one finite step has the loss of that."""
    config = noisy()
    state = fresh_state(config)
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), state.params)
    train(config, tmp_path / 'broken', source, dataclasses.replace(state, params=broken))
    rows = read_metrics(tmp_path / 'broken' / 'metrics.csv')
    assert [(row['loss'], row['skipped_steps']) for row in rows] == [('nan', '6'), ('nan', '12')]
    two = dataclasses.replace(state, bad_steps=np.int32(2))  # and then finite ones
    train(config, tmp_path / 'two', source, two)
    assert all(float(r['loss']) > 0 for r in read_metrics(tmp_path / 'two' / 'metrics.csv'))


def test_a_row_after_the_last_step_of_a_shorter_run_counts_no_step_twice(tmp_path, source):
    """The row of step 8 has two steps; that of step 12 has six, or four after a run of eight."""

    def rows(name, *ends):
        for steps in ends:
            train(noisy(train={'steps': steps}), tmp_path / name, source)
        found = read_metrics(tmp_path / name / 'metrics.csv')
        return {int(row['step']): float(row['loss']) for row in found}

    whole, extended = rows('whole', 12), rows('extended', 8, 12)
    assert list(extended) == [6, 8, 12]
    assert extended[6] == whole[6]
    np.testing.assert_allclose(2 * extended[8] + 4 * extended[12], 6 * whole[12], rtol=1e-6)


def test_the_mean_of_no_losses():
    """It is nan, however many steps were to come until the next row."""
    assert math.isnan(mean_loss({'loss': np.float32(0), 'bad_steps': np.int32(2)}))
    assert mean_loss({'loss': np.float32(0.5), 'bad_steps': np.int32(2)}) == 0.5


def test_as_many_steps_of_a_call_as_suit():
    counts = {'steps': 400, 'log_every': 100, 'sample_every': 0, 'checkpoint_every': 200}
    config = tiny_config(train={'steps_per_call': 0, **counts})
    assert choose_steps_per_call(config, resident=True, platform='gpu') == 20
    assert choose_steps_per_call(config, resident=True, platform='gpu', start=30) == 10
    assert (
        choose_steps_per_call(
            config.replace(train={'checkpoint_every': 199}), resident=True, platform='gpu'
        )
        == 1
    )
    assert choose_steps_per_call(config, resident=True, platform='cpu') == 1
    assert choose_steps_per_call(config, resident=False, platform='gpu') == 20
    large = config.replace(data={'batch_size': 2**16})  # 4 MiB a batch
    assert choose_steps_per_call(large, resident=False, platform='gpu') == 10
    assert choose_steps_per_call(large, resident=True, platform='gpu') == 20
    assert (
        choose_steps_per_call(
            config.replace(train={'steps_per_call': 4}), resident=True, platform='cpu'
        )
        == 4
    )


def test_a_session_streams_from_the_step_of_its_state(source):
    config = noisy(data={'cache': 'stream'})
    state = dataclasses.replace(fresh_state(config), step=np.int32(2))
    with Session(config, source) as session:
        session.load(state)
        assert not np.any(session.data['image'])
        session.open_stream(end=4)
        for step in (2, 3):
            rows = np.asarray(batch_indices(step, config.data.batch_size, len(source), config.seed))
            batch = session.next_data()
            np.testing.assert_array_equal(batch['image'], source.load(rows))
            np.testing.assert_array_equal(batch['label'], source.labels[rows])
        with pytest.raises(StopIteration):
            session.next_data()


@pytest.mark.usefixtures('counted_steps')
def test_a_corrupt_image_takes_no_step_with_it(tmp_path, source, monkeypatch):
    stream = pipeline.stream

    def broken(*arguments):
        for number, batch in enumerate(stream(*arguments)):
            if number == 5:
                raise UserError('cat.png: cannot be read')
            yield batch

    monkeypatch.setattr(pipeline, 'stream', broken)
    config = noisy(data={'cache': 'stream'}, train={'checkpoint_every': 100})
    with pytest.raises(UserError, match=r'cat\.png'):
        train(config, tmp_path, source)
    assert int(read(tmp_path).state.step) == 5


def test_ema_is_the_recurrence(bench_of):
    bench = bench_of('jit', 1)
    weights = [bench.parallel.fetch(bench.state).params]
    for _ in range(3):
        bench.losses(count=1)
        weights.append(bench.parallel.fetch(bench.state).params)
    expected = weights[0]
    for n, new in enumerate(weights[1:]):
        decay = min(0.9, (1 + n) / (10 + n))
        expected = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, expected, new)
    state = bench.parallel.fetch(bench.state)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(state.ema['0.9']), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    for want, got in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(state.ema['0.0']), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    assert float(ema_decay(0.9, jnp.int32(0), False)) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ('schedule', 'halfway', 'end'),
    [
        ('constant', 1e-3, 1e-3),
        ('cosine', 5e-4, 0.0),
        ('linear', 5e-4, 0.0),
        ('cooldown', 1e-3, 0.0),
    ],
)
def test_learning_rate(schedule, halfway, end):
    rate = learning_rate_schedule(
        tiny_config(optimizer={'schedule': schedule, 'warmup_steps': 10}, train={'steps': 110})
    )
    np.testing.assert_allclose(
        [rate(0), rate(4), rate(9), rate(10), rate(60), rate(110)],
        [1e-4, 5e-4, 1e-3, 1e-3, halfway, end],
        rtol=1e-4,
        atol=1e-9,
    )


@pytest.mark.parametrize('warmup_steps', [0, 10, 90])
def test_a_cooldown_takes_the_last_quarter(warmup_steps):
    """It begins after a warm-up that reaches into that quarter."""
    rate = learning_rate_schedule(
        tiny_config(
            optimizer={'schedule': 'cooldown', 'warmup_steps': warmup_steps}, train={'steps': 100}
        )
    )
    begin = max(75, warmup_steps)
    rates = [float(rate(begin)), float(rate((begin + 100) / 2)), float(rate(99)), float(rate(100))]
    np.testing.assert_allclose(rates, [1e-3, 5e-4, 1e-3 / (100 - begin), 0.0], atol=1e-9, rtol=1e-5)
    if warmup_steps < 75:
        assert rate(begin - 1) == pytest.approx(1e-3)


def test_clipping_and_moments(bench_of):
    """Adam's first moment after one step is 0.1 times the clipped gradient."""
    bench = bench_of('jit', 1)
    _, norm = bench.losses(count=1)
    mu, nu = get_moments(bench.parallel.fetch(bench.state).opt_state)
    assert norm > 0.1
    assert math.sqrt(sum(float((m**2).sum()) for m in jax.tree.leaves(mu))) == pytest.approx(
        0.1 * 0.01, rel=1e-3
    )
    replaced = set_moments(bench.parallel.fetch(bench.state).opt_state, nu, mu)
    assert get_moments(replaced)[0] is nu


def test_weight_decay_pulls_weights_down(bench_of):
    """The decay is 100 times the learning rate: a tenth a step, far more than Adam moves them."""
    bench = bench_of('jit', 1)
    before = bench.parallel.fetch(bench.state).params['conv_in']['kernel']
    bench.losses()
    after = bench.parallel.fetch(bench.state).params['conv_in']['kernel']
    assert np.linalg.norm(after) < 0.9 * np.linalg.norm(before)
    # The weights shrink where they are: Adam alone would take them elsewhere.
    assert np.vdot(after, before) > 0.99 * np.linalg.norm(after) * np.linalg.norm(before)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'parallel': {'devices': 5}}, r'parallel.devices: 5 asked for, but this machine has 4'),
        (
            {'data': {'batch_size': 6}},
            r'data.batch_size: 6 .* gives 6 images, which do not divide among 4 devices',
        ),
        (
            {'optimizer': {'accumulate_steps': 4}},
            r'gives 2 images, which do not divide among 4 devices',
        ),
    ],
)
def test_batches_that_do_not_divide(changes, message):
    with pytest.raises(UserError, match=message):
        Parallel(tiny_config(parallel={'devices': 4}).replace(**changes), choose('xla'))
