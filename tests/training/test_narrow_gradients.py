"""Gradients of weights that the CUDA backend narrows to 16 bits: where they are summed wide."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.model.unet import build_unet, init_params
from jaxunet.ops.backends import choose
from jaxunet.training.all_reduce import computed_last

pytestmark = [pytest.mark.extension, pytest.mark.usefixtures('shared_steps')]


@pytest.fixture(scope='module')
def narrow_benches(source):
    """Benches of bfloat16 on the CUDA backend, by how they spread a batch."""
    config = tiny_config(backend='cuda', precision='bfloat16', parallel={'devices': 1})
    spreads = {
        'one': {},
        'devices': {'parallel': {'devices': 2}},
        'micro_batches': {'optimizer': {'accumulate_steps': 2}},
        'teacher': {
            'diffusion': {
                'objective': 'consistency',
                'consistency_of': 'edm',
                'consistency_q': 64,
                'consistency_guidance': 2.0,
            }
        },
    }
    return functools.cache(lambda spread: Bench(config.replace(**spreads[spread]), source))


@pytest.mark.parametrize(
    ('spread', 'narrow'), [('one', True), ('devices', False), ('micro_batches', False)]
)
def test_the_update_takes_narrow_gradients_and_sums_are_wide(spread, narrow, narrow_benches):
    program = narrow_benches(spread).lowered.as_text()
    (update,) = (line for line in program.splitlines() if '@jaxunet_adamw(' in line)
    assert ('bf16' in update) == narrow
    sums = re.findall(r'stablehlo.all_reduce.*?\}\) : \((.*?)\)', program, re.DOTALL)
    assert sums
    assert (
        any('bf16' in operands for operands in sums) == narrow
    )  # over a single device they are none


@pytest.mark.parametrize(
    'spread',
    [
        'one',
        'teacher',
        *(pytest.param(name, marks=pytest.mark.long) for name in ('devices', 'micro_batches')),
    ],
)
def test_a_loop_keeps_the_copies_of_the_weights(spread, narrow_benches):
    """In a loop, all weights are narrowed once; steps give the same bits as one by one."""
    bench = narrow_benches(spread)
    bench.restart()
    loop = bench.parallel.lower(bench.make, bench.state, bench.resident, 3)
    program = loop.as_text()
    assert program.count('@jaxunet_narrow(') == (2 if spread == 'teacher' else 1)
    assert program.rindex('@jaxunet_narrow(') < program.index('stablehlo.while')
    assert 'copies = true' in program
    bench.losses(3)
    want = jax.device_get(bench.state)
    bench.restart()
    found, _ = loop.compile()(bench.state, bench.resident)
    bench.restart()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), want)


@pytest.mark.parametrize('spread', ['devices', 'micro_batches'])
def test_gradients_of_narrowed_weights_add_up(spread, narrow_benches):
    """The update of one device and batch takes them in 16 bits, a sum over devices or micro-batches
    in 32.
    """
    one, several = (narrow_benches(name) for name in ('one', spread))
    one.restart()
    np.testing.assert_allclose(several.losses(), one.losses(), rtol=0.02)


def test_gradients_of_several_devices_are_summed_packed(narrow_benches):
    """Each array takes one all-reduce, and the update reads it as it is."""
    program = narrow_benches('devices').lowered.as_text()
    reductions = [line for line in program.splitlines() if 'stablehlo.all_reduce' in line]
    assert len(reductions) == 3  # those that come last, all others, and the loss
    (update,) = (line for line in program.splitlines() if '@jaxunet_adamw(' in line)
    assert 'packed = 2 : i64' in update
    assert 'packed = 0 : i64' in narrow_benches('one').lowered.as_text()


@pytest.mark.parametrize('changed', [{}, {'num_classes': 10}, {'scale_shift_norm': True}])
def test_gradients_that_come_last_are_known(changed, source):
    """Those that wait for the gradients of all projections are packed apart from the others."""
    config = tiny_config(backend='cuda', precision='bfloat16', model=changed)
    model, images = (
        build_unet(config, choose('cuda', here=False).ops),
        jnp.zeros((2, *config.image_shape)),
    )
    params = jax.eval_shape(lambda: init_params(model, config, jax.random.key(0)))
    labels = jnp.zeros(2, jnp.int32) if changed.get('num_classes') else None

    def loss(params):
        return jnp.sum(model.predict(params, images, jnp.zeros(2, jnp.int32), labels))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    late: set[object] = set()
    for equation in jaxpr.eqns:
        projections = equation.params.get('target_name') == 'jaxunet_projection_gradients'
        if projections or any(id(var) in late for var in equation.invars):
            late |= {id(var) for var in equation.outvars}
    assert late
    found = [id(var) in late for var in jaxpr.outvars]
    known = computed_last(params)
    assert not [late for late, told in zip(found, known, strict=True) if late and not told]
    assert not all(known)
