"""A run whose devices share out the training state (`parallel.shard_optimizer`) trains alike."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from absl import logging
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import read
from jaxunet.config import Config
from jaxunet.model.cost import memory, parameter_count
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError
from jaxunet.training.loop import train
from jaxunet.training.parallel import Parallel
from jaxunet.training.session import Session

pytestmark = pytest.mark.usefixtures('shared_steps')


def parallel_of(config: Config) -> Parallel:
    return Parallel(config, choose(config.backend, config.precision, here=False))


@pytest.mark.parametrize('mode', ['jit', 'pmap'])
def test_each_device_holds_its_share(mode):
    parallel = {'mode': mode, 'devices': 3, 'shard_optimizer': True}
    config = tiny_config(data={'batch_size': 6}, parallel=parallel)
    parallel, state = parallel_of(config), fresh_state(config)
    placed = parallel.replicate(state)
    jax.tree.map(np.testing.assert_array_equal, parallel.fetch(placed), state)
    average = parallel.local(placed.ema['0.995'])
    assert {x.device for x in jax.tree.leaves(average)} == {parallel.devices[0]}
    jax.tree.map(np.testing.assert_array_equal, average, state.ema['0.995'])
    for array in jax.tree.leaves((placed.params, placed.ema)):
        assert {shard.data.size for shard in array.addressable_shards} == {array.size // 3}
    shapes = parallel.replicated_shapes(state)
    assert jax.tree.structure(shapes) == jax.tree.structure(placed)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding == array.sharding


def trained(config: Config, source, count: int = 3, per_call: int = 1):
    """Returns the losses and norms of some steps, and the numpy state after them."""
    bench = Bench(config, source)
    if per_call == 1:
        losses = bench.losses(count)
    else:
        step = bench.parallel.compile(bench.make, bench.state, bench.resident, steps=per_call)
        bench.state, metrics = step(bench.state, bench.resident)
        metrics = bench.parallel.local(metrics)
        losses = [*np.ravel(metrics['step_loss']), *np.ravel(metrics['grad_norm'])]
    return np.asarray(losses), bench.parallel.fetch(bench.state)


# Dropout and flips draw numbers; the update clips, decays and averages. As in test_step.py, whose
# program it shares.
NOISY = {
    'model': {'dropout': 0.2},
    'data': {'augment': 'flip'},
    'optimizer': {'clip_norm': 0.01, 'weight_decay': 100.0},
    'ema': {'rates': (0.9, 0.0)},
    'train': {'steps': 12, 'log_every': 6, 'checkpoint_every': 6},
}
UNCLIPPED = NOISY | {'optimizer': {'clip_norm': 0.0, 'weight_decay': 1.0}}
# Sums of micro-batches, a loss scale, spikes, and averages by width.
HALF = {
    'precision': 'float16',
    'optimizer': {'accumulate_steps': 2},
    'ema': {'widths': (0.05,), 'rates': (0.999,)},
    'train': {'spike_sigmas': 3.0},
}
CUDA = {'backend': 'cuda'}
POLICY = {
    'diffusion': {'steps': 40},
    'timesteps': {'sampler': 'policy', 'policy_every': 2, 'policy_memory': 5},
}


def check(source, parallel, changes, *, bits=False, per_call=1):
    config = tiny_config(**changes, parallel=parallel)
    losses, state = trained(config, source, per_call=per_call)
    config = config.replace(parallel={'shard_optimizer': True})
    sharded, new = trained(config, source, per_call=per_call)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    # The norm adds the squares in another order.
    np.testing.assert_allclose(sharded, losses, rtol=2e-6)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
        if bits:
            np.testing.assert_array_equal(a, b)
        else:
            # Adam divides by the size of a gradient, and so enlarges the error of one near 0.
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4 * np.abs(b).max(initial=0))


@pytest.mark.parametrize(
    ('mode', 'devices', 'changes'),
    [
        ('jit', 4, NOISY),
        pytest.param('pmap', 4, NOISY, marks=pytest.mark.long),
        pytest.param('jit', 2, HALF, marks=pytest.mark.long),
        pytest.param('pmap', 2, HALF | CUDA, marks=pytest.mark.extension),
        pytest.param('jit', 2, POLICY, marks=pytest.mark.long),
        pytest.param('jit', 3, {'data': {'batch_size': 6}}, marks=pytest.mark.long),
    ],
)
def test_the_losses_are_those_of_a_replicated_state(mode, devices, changes, source):
    check(source, {'mode': mode, 'devices': devices}, changes)


@pytest.mark.parametrize(
    ('mode', 'precision', 'backend'),
    [
        pytest.param('jit', 'bfloat16', 'cuda', marks=pytest.mark.extension),
        pytest.param('pmap', 'bfloat16', 'xla', marks=pytest.mark.long),
        pytest.param('jit', 'float32', 'xla', marks=pytest.mark.long),
    ],
)
def test_two_devices_without_clipping_give_the_same_bits(mode, precision, backend, source):
    """A sum of two gradients has one order, and nothing but the norm depends on another sum."""
    changes = UNCLIPPED | {'precision': precision, 'backend': backend}
    check(source, {'mode': mode, 'devices': 2}, changes, bits=True)


@pytest.mark.extension
@pytest.mark.parametrize('per_call', [1, 3])
def test_fused_kernels_update_the_parts(per_call, source):
    """In a loop of steps they also update the 16-bit copies of the parts, which are gathered."""
    changes = NOISY | CUDA | {'precision': 'bfloat16'}
    check(source, {'devices': 2}, changes, per_call=per_call)


def test_weights_are_gathered_in_the_compute_type(source):
    """Kernels of a 16-bit network travel in 16 bits; gradients are reduced, and scattered."""
    config = tiny_config(precision='bfloat16', parallel={'devices': 2, 'shard_optimizer': True})
    lines = Bench(config, source).lowered.as_text().splitlines()
    gathers = [line for line in lines if 'stablehlo.all_gather' in line]
    state = fresh_state(config)
    count = len(jax.tree.leaves(state.params))
    assert len(gathers) == sum('reduce_scatter' in line for line in lines) == count
    narrow = sum('bf16>' in line.rsplit('->')[1] for line in gathers)
    model_kernels = [
        path
        for path, _ in jax.tree.leaves_with_path(state.params)
        if path[-1].key == 'kernel' and not path[0].key.startswith('time_embed_')
    ]
    assert narrow == len(model_kernels) > 0


def state_of(workdir):
    return jax.tree.leaves(read(workdir).state)


@pytest.mark.parametrize(
    'order', [(False, True), pytest.param((True, False), marks=pytest.mark.long)]
)
def test_a_run_resumes_on_other_devices_with_the_state_shared_out_or_not(order, source, tmp_path):
    base = tiny_config()
    for steps, devices, shard in ((2, 4, order[0]), (4, 2, order[1])):
        parallel = {'devices': devices, 'shard_optimizer': shard}
        config = base.replace(parallel=parallel, train={'steps': steps})
        assert train(config, tmp_path / 'changed', source) == steps
    config = base.replace(parallel={'devices': 4}, train={'steps': 4})
    train(config, tmp_path / 'whole', source)
    found, want = (state_of(tmp_path / name) for name in ('changed', 'whole'))
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'optimizer': {'name': 'muon'}}, 'optimizer.name=muon needs whole matrices'),
        ({'train': {'check_replicas_every': 2}}, 'check_replicas_every: 2 has nothing to compare'),
    ],
)
def test_what_needs_the_whole_state_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(parallel={'shard_optimizer': True}, **changes)


@pytest.mark.parametrize('changed', [{'shard_optimizer': True}, {'reduce_dtype': 'bfloat16'}])
def test_a_single_device_has_nothing_to_share(changed, source, monkeypatch):
    told = []
    monkeypatch.setattr(logging, 'warning', lambda text, *values: told.append(text % values))
    config = tiny_config(parallel={'devices': 1} | changed)
    assert not Session(config, source).parallel.shards_state
    assert told == [f'parallel.{name}: has no effect on a single device' for name in changed]


def test_the_memory_estimate_counts_the_share():
    config = tiny_config(precision='bfloat16', parallel={'devices': 4}, backend='xla')
    kernels, state = choose('xla', here=False), ('parameters', 'averages', 'optimizer')
    plain = memory(config, kernels)
    shared = memory(config.replace(parallel={'shard_optimizer': True}), kernels)
    gathered = sum(shared[name] - plain[name] / 4 for name in state)
    # A small network has many biases, and its time embedding is float32.
    assert 2 * parameter_count(config) < gathered < 3 * parameter_count(config)
