"""Gradients that are added up over devices in bfloat16 (`parallel.reduce_dtype`)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.ops.adamw.packed import Packed, unpack
from jaxunet.ops.backends import choose
from jaxunet.training.all_reduce import summed
from jaxunet.training.parallel import AXIS

pytestmark = pytest.mark.usefixtures('shared_steps')

ROUNDING = 2.0**-8  # largest relative error of a number in bfloat16
REDUCED = {'reduce_dtype': 'bfloat16'}
CUDA = pytest.param('cuda', marks=pytest.mark.extension)
FUSED = {'backend': 'cuda'}
SUMS = re.compile(r'stablehlo\.(?:all_reduce|reduce_scatter)".*?\}\) : \((.*?)\)', re.DOTALL)


def gradients(devices):
    """Returns gradients of both types, with an axis of devices in front."""
    draw = np.random.default_rng(0)

    def one(shape, dtype='float32'):
        return jnp.asarray(draw.standard_normal((devices, *shape)), dtype)

    return {
        'conv_in': {'kernel': one((3, 3, 3, 8), 'bfloat16'), 'bias': one((8,))},
        'middle': {'kernel': one((33, 65)), 'scale': one(())},
        'conv_out': {'kernel': one((3, 3, 8, 3), 'bfloat16'), 'bias': one((3,))},
    }


@pytest.mark.parametrize('simultaneous', [False, True])
@pytest.mark.parametrize('backend', ['xla', CUDA])
@pytest.mark.parametrize('mode', ['jit', 'pmap'])
@pytest.mark.parametrize('devices', [2, 4])
def test_a_sum_is_that_of_float32_rounded(devices, mode, backend, simultaneous):
    """Every gradient and every addition is rounded once at most."""
    fused = choose(backend, here=False).update
    grads = gradients(devices)

    def total(grads):
        found = summed(grads, AXIS, fused and fused.pack, 'bfloat16', simultaneous=simultaneous)
        assert isinstance(found, Packed) == (fused is not None)
        found = unpack(found, grads) if fused else found
        assert all(array.dtype == jnp.bfloat16 for array in jax.tree.leaves(found))
        return found

    those, split = jax.devices()[:devices], PartitionSpec(AXIS)
    if mode == 'pmap':
        mapped = jax.pmap(total, axis_name=AXIS, devices=those)
    else:
        specs = {'in_specs': split, 'out_specs': split, 'check_vma': False}
        mapped = jax.jit(jax.shard_map(total, mesh=Mesh(np.array(those), (AXIS,)), **specs))
    found, parts = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
        for tree in (mapped(grads), grads)
    )
    errors = []
    for got, given in zip(found, parts, strict=True):
        np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))
        error = np.abs(got[0] - given.sum(axis=0))
        assert (error <= devices * ROUNDING * np.abs(given).sum(axis=0)).all()
        errors.append(error.max())
    assert max(errors) > ROUNDING / 4  # the sum is in bfloat16


@pytest.mark.parametrize(
    ('mode', 'backend', 'shard'),
    [
        ('jit', 'xla', False),
        pytest.param('pmap', 'cuda', False, marks=pytest.mark.extension),
        pytest.param('jit', 'cuda', True, marks=pytest.mark.extension),
        pytest.param('pmap', 'xla', False, marks=pytest.mark.long),
        pytest.param('pmap', 'xla', True, marks=pytest.mark.long),
    ],
)
def test_devices_exchange_gradients_in_bfloat16(mode, backend, shard, source):
    parallel = {'devices': 2, 'mode': mode, 'shard_optimizer': shard}
    config = tiny_config(backend=backend, parallel=parallel)
    wide, narrow = (
        SUMS.findall(Bench(config.replace(parallel=changed), source).lowered.as_text())
        for changed in ({}, REDUCED)
    )
    assert wide
    assert not any('bf16' in operands for operands in wide)
    loss = 'tensor<f32>'  # and with shard, the square of the norm
    assert [operands for operands in narrow if 'bf16' not in operands] == [loss] * (1 + shard)
    assert len(narrow) == len(wide)


def test_micro_batches_are_added_up_before_they_are_rounded(source):
    parallel, optimizer = REDUCED | {'devices': 2}, {'accumulate_steps': 2}
    bench = Bench(tiny_config(parallel=parallel, optimizer=optimizer), source)
    program = bench.lowered.as_text()
    rounded = re.findall(r'stablehlo\.convert .*f32>\) -> tensor<\S*bf16>', program)
    assert len(rounded) == len(jax.tree.leaves(bench.state.params))


@pytest.mark.extension
def test_one_device_has_the_same_program(source):
    config = tiny_config(backend='cuda', parallel={'devices': 1})
    one, other = (
        Bench(config.replace(parallel=changed), source).lowered.as_text()
        for changed in ({}, REDUCED)
    )
    assert one == other


@pytest.mark.parametrize(
    ('parallel', 'changes'),
    [
        pytest.param({'mode': 'pmap', 'devices': 4}, FUSED, marks=pytest.mark.extension),
        *(
            pytest.param(*case, marks=[pytest.mark.long, pytest.mark.extension])
            for case in (
                ({'devices': 2}, {}),
                ({'devices': 4}, FUSED | {'precision': 'bfloat16'}),
                ({'devices': 2}, FUSED | {'optimizer': {'name': 'muon'}}),
                ({'devices': 2, 'shard_optimizer': True}, FUSED),
                (
                    {'devices': 2},
                    FUSED | {'precision': 'float16', 'optimizer': {'accumulate_steps': 2}},
                ),
            )
        ),
    ],
)
def test_losses_are_close_to_those_of_float32(parallel, changes, source):
    config = tiny_config(parallel=parallel, **changes)
    wide, narrow = (
        Bench(config.replace(parallel=changed), source).losses(4) for changed in ({}, REDUCED)
    )
    np.testing.assert_allclose(narrow, wide, rtol=ROUNDING)
    assert narrow[0] == wide[0]
    assert narrow[1:] != wide[1:]
