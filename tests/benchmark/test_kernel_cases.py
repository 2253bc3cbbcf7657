"""Every case of the benchmark of the kernels can be built, and its sides are the kernels."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re

import jax
import numpy as np
import pytest
from support import kernel_names
from support.commands import call
from support.kernel_measurements import ORIGIN, measured, same_times
from support.mosaic import simulated

from jaxunet.benchmark.kernels import adamw, lowering, project
from jaxunet.benchmark.kernels import measure as kernels
from jaxunet.benchmark.kernels import table as kernel_table
from jaxunet.ops.adamw.cases import AWKWARD
from jaxunet.ops.adamw.packed import room
from jaxunet.ops.linear.projection_cases import ELEPHANTS64, Case, Layer
from jaxunet.runtime import device
from jaxunet.runtime import gpu_time as timing
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.measurement import Inputs, Measurement
from jaxunet.runtime.plugins import load_backend
from pallas_kernels.conv3x3 import hopper, hopper_weight_gradient, tune_hopper

PALLAS, CUDA = load_backend('pallas'), load_backend('cuda')
ONLY_CUDA = ('linear', 'project', 'adamw')


def test_other_processes_lower() -> None:
    pytest.importorskip('flatbuffers')
    wanted = kernels.select(['attention'], ['2'], '64_tokens', [PALLAS])
    with lowering.pool(1) as workers:
        found = lowering.start(workers, wanted, 'bfloat16', 'NVIDIA H200')
        assert list(found) == [(m.name, 'pallas') for m in wanted]
        assert all(waiting.result().exported for waiting in found.values())


def test_lowered_elsewhere_is_the_same_program() -> None:
    pytest.importorskip('flatbuffers')
    m = next(
        m
        for m in kernels.select([], ['2'], '', [PALLAS])
        if m.name == 'conv3x3 input_gradient, 64x64_64to64, batch 2'
    )
    found = lowering.lower(m.name, 2, 'bfloat16', 'NVIDIA H200')
    function = jax.export.deserialize(bytearray(found.exported)).call
    apart = timing.named('p', function).trace(m.inputs).lower(lowering_platforms=('cuda',))
    assert kernel_names.count(apart) == counted(m)
    assert found.seconds > 0


def test_a_backend_is_measured_where_it_has_the_op() -> None:
    other = dataclasses.replace(CUDA, name='other', ops={'linear': CUDA.ops['linear']})
    found = kernels.select(['conv3x3', 'linear'], ['2'], '', [other, PALLAS])
    sides = {m.name.split()[0]: list(m.sides) for m in found}
    assert sides.pop('linear') == ['xla', 'other']
    assert set(sides) == {'conv3x3', 'upsample_conv3x3', 'norm_silu_conv3x3'}
    assert all(names == ['xla', 'pallas'] for names in sides.values())


def counted(m: Measurement, side: str = 'pallas') -> collections.Counter[str]:
    with device.use(device.Target.HOPPER):
        return kernel_names.count(
            jax.jit(m.sides[side]).trace(m.inputs).lower(lowering_platforms=('cuda',))
        )


# Cases of each op and direction that differ in kernels; the channel sums are the bias gradient.
GRADIENTS = {
    f'jaxunet_group_norm_{name}': 1 for name in ('gradient_sums', 'gradient', 'channel_sums')
} | {'jaxunet_conv3x3_weight_gradient': 1}
NORMALISE = {f'jaxunet_group_norm_{name}': 1 for name in ('moments', 'normalise')}
KERNELS: dict[str, dict[str, int]] = {
    'conv3x3 forward, 32x32_192to128, batch 2': {'jaxunet_conv3x3_forward': 1},
    'conv3x3 forward, 64x64_3to64, batch 2': {'jaxunet_conv3x3_forward': 1},
    'conv3x3 input_gradient, 32x32_192to128, batch 2': {'jaxunet_conv3x3_forward': 1},
    'conv3x3 weight_gradient, 32x32_192to128, batch 2': {'jaxunet_conv3x3_weight_gradient': 1},
    'norm_silu_conv3x3 forward, norm_32x32_128+64to128, batch 2': {
        'jaxunet_group_norm_moments': 1,
        'jaxunet_group_norm_affine': 1,
        'jaxunet_conv3x3_forward': 1,
    },
    'norm_silu_conv3x3 forward+backward, norm_8x8_256to256_res192, batch 2': GRADIENTS
    | NORMALISE
    | {'jaxunet_conv3x3_forward': 2},
    'group_norm forward+backward, 16x16_192, batch 2': {
        'jaxunet_group_norm_gradient_sums': 1,
        'jaxunet_group_norm_gradient': 1,
    }
    | NORMALISE,
    'attention forward, 64_tokens_8x32, batch 2': {'jaxunet_attention_forward': 1},
    'attention forward+backward, 256_tokens_6x32, batch 2': {
        'jaxunet_attention_forward': 1,
        'jaxunet_attention_backward_delta': 1,
        'jaxunet_attention_backward': 1,
    },
}


@pytest.mark.parametrize('name', KERNELS)
def test_sides_are_the_kernels_and_xla(name: str) -> None:
    m = next(m for m in kernels.select([], ['2'], '', [PALLAS]) if m.name == name)
    assert counted(m) == KERNELS[name]
    assert not any('jaxunet' in kernel for kernel in counted(m, 'xla'))


def test_every_measurement_can_be_built() -> None:
    """Names are unique, all sides give the same shapes and types, and work is counted."""
    found = kernels.select([], ['2'], '', [PALLAS, CUDA])
    assert len({m.name for m in found}) == len(found) > 200
    for m in found[::9]:
        with device.use(device.Target.HOPPER):
            shapes = {
                side: jax.eval_shape(function, m.inputs) for side, function in m.sides.items()
            }
        pallas = {'pallas'} if m.op not in ONLY_CUDA else set()
        assert set(shapes) == {'xla', 'cuda'} | pallas
        assert all(shape == shapes['xla'] for shape in shapes.values()), m.name
        assert m.bytes_needed() > 0
        assert (m.flops is None) == (m.op in ('group_norm', 'adamw'))


@pytest.mark.parametrize('direction', ['step', 'step_with_copies'])
@pytest.mark.parametrize('side', ['xla', 'cuda'])
def test_results_of_adamw_have_the_memory_of_their_own_inputs(side, direction) -> None:
    m = next(m for m in adamw.measurements(1, backends=[CUDA]) if m.direction == direction)
    donated, kept = {}, {}
    for name, value in m.inputs.items():
        (donated if name in m.updated else kept)[name] = value

    def call(donated, kept):
        return m.sides[side](donated | kept)

    lowered = jax.jit(call, donate_argnums=0).lower(donated, kept)
    results = jax.tree_util.tree_leaves_with_path(lowered.out_info)
    aliases = re.findall(r'%arg(\d+)[^%]*?tf.aliasing_output = (\d+)', lowered.as_text())
    names = [path for path, _ in jax.tree_util.tree_leaves_with_path(donated)]
    assert len(aliases) == len(names) == len(results)
    for argument, result in aliases:
        assert names[int(argument)] == results[int(result)][0]


DIRECTIONS_OF_ADAMW = (
    *('step', 'step_with_copies', 'step_then_narrow'),
    *('sum_of_squares', 'pack', 'narrow'),
)


@pytest.mark.extension
def test_adamw_is_measured_once_and_in_place(monkeypatch) -> None:
    monkeypatch.setattr(adamw, 'CASES', (AWKWARD[1],))
    wanted = kernels.select(['adamw'], ['32', '256'], '', [PALLAS, CUDA])
    assert [m.name for m in wanted] == [
        f'adamw {direction}, two_averages, batch 1' for direction in DIRECTIONS_OF_ADAMW
    ]
    called = collections.Counter()

    def trace(programs, **_):
        for _ in range(3):  # a call leaves the inputs of the next
            called.update(list(programs))
            times = same_times(programs)
        return times

    found = {row['direction']: row for row in measured(*wanted, trace=trace)}
    assert [row['error'] for row in found.values()] == [None] * 6
    assert set(called.values()) == {3}
    assert len(called) == 12
    elements = AWKWARD[1].elements
    copied = sum(math.prod(shape) for shape in AWKWARD[1].shapes if len(shape) > 1)
    step = 4 * (1 + elements * (1 + 5 + 5)) - 2 * copied
    sizes = [math.prod(shape) for shape in AWKWARD[1].shapes]
    assert {direction: row['bytes'] for direction, row in found.items()} == {
        'step': step,
        'step_with_copies': step + 2 * copied,  # they are written, but not read
        'step_then_narrow': step + 2 * copied,
        'sum_of_squares': 4 * (elements + 1) - 2 * copied,
        'pack': 4 * elements - 2 * copied + 4 * sum(map(room, sizes)),
        'narrow': 6 * copied,
    }


def test_copies_are_measured_where_a_backend_updates_them() -> None:
    update = CUDA.ops['adamw']._replace(updates_copies=False)
    other = dataclasses.replace(CUDA, name='other', ops={'adamw': update})
    sides = {m.direction: list(m.sides) for m in adamw.measurements(1, backends=[other, CUDA])}
    assert sides.pop('step_with_copies') == ['xla', 'cuda']
    assert all(names == ['xla', 'other', 'cuda'] for names in sides.values())


@pytest.mark.parametrize('side', ['xla', pytest.param('cuda', marks=pytest.mark.extension)])
def test_both_ways_to_copies_have_the_same_results(monkeypatch, side) -> None:
    monkeypatch.setattr(adamw, 'CASES', (AWKWARD[1],))
    by_direction = {m.direction: m for m in adamw.measurements(1, backends=[CUDA])}
    m = by_direction['step_with_copies']
    inputs = Inputs().of(m, 0)
    together, apart = (
        jax.jit(way.sides[side])({name: inputs[name] for name in way.inputs})
        for way in (m, by_direction['step_then_narrow'])
    )
    updated = [m.inputs[name] for name in m.updated]
    assert len(jax.tree.leaves(together)) == len(jax.tree.leaves(updated))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.extension
def test_projections_are_measured_with_the_work_of_a_call(monkeypatch) -> None:
    """A product with one bias, one with two, and a sum, which only the CUDA backend computes."""
    layers = (Layer(8), Layer(12, product=False), Layer(4, biases=1))
    monkeypatch.setattr(project, 'CASES', (Case('three', 16, layers),))
    other = dataclasses.replace(CUDA, name='other', ops={'linear': CUDA.ops['linear']})
    wanted = kernels.select(['project'], ['2', '5'], '', [PALLAS, other, CUDA])
    assert [(m.direction, m.batch, list(m.sides)) for m in wanted] == [
        (direction, batch, ['xla', 'cuda'])
        for batch in (2, 5)
        for direction in ('forward', 'forward+backward')
    ]
    found = measured(*wanted, trace=same_times)
    assert [row['error'] for row in found] == [None] * 4
    assert all(0 <= row['difference'] < 0.02 for row in found)
    for row, both in zip(found, (False, True) * 2, strict=True):
        batch, (x, kernels_, biases) = row['batch'], (2 * 16 * row['batch'], 2 * 16 * 12, 4 * 44)
        results = 4 * (12 * batch + 12)
        forward = x + kernels_ + biases + results
        # dy is read, and the gradients of x, of the kernels and of one bias each are written.
        assert row['bytes'] == forward + both * (4 * 12 * batch + x + kernels_ + 4 * 12)
        assert row['flops'] == (3 if both else 1) * 2 * batch * 16 * 12
    text = kernel_table.tables([ORIGIN | row for row in found])
    assert '| project | forward+backward | 5 | 1 | 1.00 | 1.00 | three |' in text


def test_the_gradients_of_projections_are_those_of_the_op() -> None:
    """The gradients are those of x, of all kernels and of one bias each."""
    m = next(m for m in project.measurements(2, 'float32', [CUDA]) if '+' in m.direction)
    inputs = jax.tree.map(np.asarray, Inputs().of(m, 0))
    products, sums, (gradients,) = jax.tree.map(np.asarray, jax.jit(m.sides['xla'])(inputs))
    assert len(products) + len(sums) == len(ELEPHANTS64.layers)
    pairs = list(zip(inputs['dy'], inputs['kernel'], strict=True))
    np.testing.assert_allclose(gradients['x'], sum(dy @ k.T for dy, k in pairs), atol=1e-3)
    for kernel, bias, dy, dk, db, y, added in zip(
        *(inputs[name] for name in ('kernel', 'bias', 'dy')),
        *(gradients[name] for name in ('kernel', 'bias')),
        products,
        inputs['added'],
        strict=True,
    ):
        np.testing.assert_allclose(y, inputs['x'] @ kernel + bias + added[0], atol=1e-4)
        np.testing.assert_allclose(dk, inputs['x'].T @ dy, atol=1e-4)
        np.testing.assert_allclose(db, dy.sum(axis=0), atol=1e-4)
    for (first, second), y in zip(inputs['sums'], sums, strict=True):
        np.testing.assert_allclose(y[0], first + second, atol=1e-4)


@pytest.mark.extension
def test_an_op_that_pallas_has_not_is_measured() -> None:
    wanted = kernels.select(['linear'], ['1'], '^4x4', [PALLAS, CUDA])
    found = measured(*wanted, trace=same_times)
    assert [(row['error'], row['ratio_cuda'], 'us_pallas' in row) for row in found] == [
        (None, 1.0, False)
    ] * 4
    text = kernel_table.tables([ORIGIN | row for row in found])
    assert "XLA's time over the CUDA kernels'" in text
    assert 'Pallas' not in text


def test_a_kernel_is_measured_through_to_its_row() -> None:
    """The real sides, simulated on the CPU: their results agree."""
    wanted = kernels.select(['attention'], ['1'], '64_tokens', [PALLAS]) + kernels.select(
        ['group_norm'], ['1'], '^8x8_192$', [PALLAS]
    )
    with simulated():
        found = measured(*wanted, trace=same_times)
    assert [row['error'] for row in found] == [None] * 4
    assert all(0 <= row['difference'] < 0.02 for row in found)


def test_directions_are_chosen() -> None:
    every = kernels.select(['project', 'adamw'], ['2'], '', [CUDA])
    directions = ['forward', 'forward+backward', 'step_with_copies']
    found = kernels.select(['project', 'adamw'], ['2'], '', [CUDA], directions)
    assert [m.name for m in found] == [
        m.name for m in every if m.op == 'project' or m.direction == 'step_with_copies'
    ]
    every = kernels.select(['conv3x3'], ['2'], '8x8', [PALLAS])
    found = kernels.select(['conv3x3'], ['2'], '8x8', [PALLAS], directions=['weight_gradient'])
    assert found
    assert [m.name for m in found] == [m.name for m in every if m.direction == 'weight_gradient']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ((['conv'], ['32'], ''), '--ops: .*did you mean "conv3x3"'),
        ((['linear'], ['32'], ''), '--ops: linear: only the CUDA backend has kernels for that'),
        ((['project'], ['32'], ''), '--ops: project: only the CUDA backend has kernels for that'),
        (([], [], ''), '--batch_sizes: .*found none'),
        (([], ['0'], ''), "--batch_sizes: .*found '0'"),
        (([], ['32'], '('), '--cases: .*not a regular expression'),
        (([], ['32'], 'none'), '--cases: .*matches no case; there are 256_tokens_6x32'),
        (
            (['conv3x3'], ['32'], '', {}, ['backward']),
            "--directions: expected some of forward, .* found 'backward'",
        ),
    ],
)
def test_mistakes(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kernels.select(*arguments)


def test_without_a_gpu() -> None:
    assert 'needs one' in call('jaxunet.benchmark.kernels.__main__', '--ops=attention', code=2)


@pytest.mark.parametrize('option', ['--ops=attention', '--roofline'])
def test_a_file_that_cannot_be_written_ends_first(option: str, tmp_path: pathlib.Path) -> None:
    options = ['jaxunet.benchmark.kernels.__main__', option, f'--output={tmp_path}']
    assert f'--output: {tmp_path}: cannot be written' in call(*options, code=2)


def test_tuning_covers_the_convolutions() -> None:
    """Every plain convolution of 64 channels or more has tiles in all directions, the chosen first,
    and the tile is what runs.
    """
    with device.use(device.Target.HOPPER):
        found = tune_hopper.shapes(tune_hopper.DIRECTIONS, '', 2, 'bfloat16', 3)
    plain = {(s.case, s.direction) for s in found if s.direction != 'fused'}
    cases = {case for case, _ in plain}
    assert plain == {
        (case, direction) for case in cases for direction in ('forward', 'input', 'weight')
    }
    assert cases == {
        m.case
        for m in kernels.select(['conv3x3'], ['2'], '', [PALLAS])
        if m.op == 'conv3x3'
        and m.direction == 'forward'
        and min(m.inputs['kernel'].shape[2:]) >= 64
    }
    for s in [s for s in found if s.case in ('32x32_128to128', 'norm_32x32_128to128_res128+64')]:
        if s.direction == 'weight':
            assert s.tiles[0] == hopper_weight_gradient.choose_tile(s.inputs['x'], s.inputs['dy'])
        else:
            operands = tune_hopper.call_of(s.inputs, s.direction)
            assert s.tiles[0] == hopper.choose_tile(operands)
        with device.use(device.Target.HOPPER):
            texts = {
                jax.jit(lambda i, s=s, t=t: s.run(t, i))
                .trace(s.inputs)
                .lower(lowering_platforms=('cuda',))
                .as_text()
                for t in s.tiles[:2]
            }
        assert len(texts) == 2
