"""The benchmark of the kernels: what it reads from a trace, the rows and tables it makes of it, and
that every case can be built.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree
from support import kernel_names
from support.commands import call

from jaxunet.benchmark.kernels import adamw, lowering, verdict
from jaxunet.benchmark.kernels import measure as kernels
from jaxunet.benchmark.kernels import table as kernel_table
from jaxunet.ops.adamw.cases import AWKWARD
from jaxunet.runtime import device, rows
from jaxunet.runtime import gpu_time as timing
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.measurement import Arrays, Inputs, Measurement, Side, with_gradients
from jaxunet.runtime.plugins import load_backend
from pallas_kernels.conv3x3 import hopper, hopper_weight_gradient, tune_hopper

PALLAS, CUDA = load_backend('pallas'), load_backend('cuda')
ROOT = pathlib.Path(__file__).parents[2]
ORIGIN = {
    'kind': 'kernel',
    'device': 'NVIDIA H200',
    'git': 'abc1234',
    'driver': '1',
    'versions': {'jax': '0.11.2'},
}


def profile(
    events: list[tuple[str, str, float, float]], line: str = 'Stream #14(Compute)'
) -> jax.profiler.ProfileData:
    """A GPU's trace of (module, kernel, start, microseconds)."""
    names = sorted({kernel for _, kernel, _, _ in events})
    text = ''.join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        for i, name in enumerate(names, 1)
    )
    text += 'stat_metadata { key: 1 value { id: 1 name: "hlo_module" } }\n'
    body = ''.join(
        f'events {{ metadata_id: {names.index(kernel) + 1} offset_ps: {int(start * 1e6)} '
        f'duration_ps: {int(us * 1e6)} '
        + (f'stats {{ metadata_id: 1 str_value: "{module}" }}' if module else '')
        + ' }\n'
        for module, kernel, start, us in events
    )
    planes = [
        ('/device:GPU:0', line, body),
        ('/device:GPU:0', 'XLA Modules', body),
        ('/host:CPU', 'Stream of thought', body),
    ]
    return jax.profiler.ProfileData.from_text_proto(
        '\n'.join(
            f'planes {{ name: "{plane}" lines {{ name: "{name}" {inner} }} {text} }}'
            for plane, name, inner in planes
        )
    )


def test_times_of_each_call_and_kernel() -> None:
    """Programs by module, calls in the order of time, and only what a GPU's streams ran."""
    events = []
    for i, us in enumerate((5.0, 7.0, 6.0)):
        events += [
            ('jit_a', 'main', 100.0 * i, us),
            ('jit_a', 'sum', 100.0 * i + 20, 1.0),
            ('jit_a', 'sum', 100.0 * i + 30, 2.0 + i),
        ]
        events += [
            ('jit_b(17)', 'main', 100.0 * i + 50, 2 * us),
            ('', 'other', 100.0 * i + 70, 9.0),
            ('jit_c', 'main', 100.0 * i + 80, 9.0),
        ]
    times = timing.read_times(profile(events[::-1]), ['a', 'b', 'missing'], 3)
    assert set(times) == {'a', 'b'}
    assert times['a'].calls == pytest.approx((8, 11, 11))
    assert (times['a'].us, *times['a'].quartiles) == pytest.approx((11, 9.5, 11))
    assert times['a'].kernels == pytest.approx({'main': 6, 'sum': 2 * 1.5})
    assert times['b'].us == pytest.approx(12)


def test_a_trace_that_lost_kernels_has_no_calls() -> None:
    events = [('jit_a', kernel, 10.0 * i, 1.0 + i) for i in range(3) for kernel in 'xy']
    lost = timing.read_times(profile([*events[:-1], ('jit_a', 'x', 90.0, 1.0)]), ['a'], 3)['a']
    assert lost.calls == ()
    assert lost.us == sum(lost.kernels.values())
    assert timing.read_times(profile([]), ['a'], 3) == {}


def test_programs_are_named_in_traces() -> None:
    lowered = timing.named('some_name', lambda x: x + 1).lower(jnp.ones(3))
    assert '@jit_some_name ' in lowered.as_text()
    # GPU programs get this; a JAX that does not know it must fail here rather than on the GPU.
    assert lowered.compile(compiler_options=timing.COMPILER_OPTIONS)(jnp.ones(3)).sum() == 6


def toy(name: str, pallas: Side | None = None, flops: int | None = 2_000_000) -> Measurement:
    def double(i: Arrays) -> Arrays:
        return {'y': i['x'][0] * 2, 'sum': jnp.sum(i['x'][0], axis=0)}

    inputs = {'x': (jax.ShapeDtypeStruct((16, 8), 'float32'),)}
    return Measurement(
        'toy', name, 'forward', 4, {'xla': double, 'pallas': pallas or double}, inputs, flops
    )


def fake_trace(
    programs: Mapping[str, Callable[[int], PyTree]], *, rounds: int
) -> dict[str, timing.Times]:
    """Runs everything; XLA's side takes 30 us a call, the kernels' 8 to 10."""
    found = {}
    for name, program in programs.items():
        outputs = [jax.block_until_ready(program(number)) for number in range(rounds)]
        assert (
            np.asarray(outputs[0]['y']) != np.asarray(outputs[1]['y'])
        ).any()  # calls take sets of inputs in turn
        np.testing.assert_array_equal(outputs[0]['y'], outputs[2]['y'])
        each = (
            (30.0,) * rounds
            if name.endswith('xla')
            else tuple(8.0 + 2 * (i % 2) for i in range(rounds))
        )
        found[name] = timing.Times({'kernel_of_' + name: sum(each) / rounds}, each)
    return found


def fails(_: Arrays) -> Arrays:
    raise ValueError('does not compile')


def outcomes(
    *wanted: Measurement,
    trace: kernels.Trace = fake_trace,
    seconds: float = 600,
    elsewhere: kernels.Elsewhere | None = None,
) -> list[rows.Row | Measurement]:
    stop = time.monotonic() + seconds
    return list(kernels.measure(wanted, stop=stop, elsewhere=elsewhere, trace=trace))


def measured(
    *wanted: Measurement,
    trace: kernels.Trace = fake_trace,
    elsewhere: kernels.Elsewhere | None = None,
) -> list[rows.Row]:
    found = outcomes(*wanted, trace=trace, elsewhere=elsewhere)
    assert all(isinstance(row, dict) for row in found)
    return found


def test_rows() -> None:
    """The numbers follow from the times; a side that fails, or computes something else, is a row
    that says so and harms no other.
    """
    good, broken, wrong, nan = measured(
        toy('good'),
        toy('broken', fails),
        toy('wrong', lambda i: {'y': i['x'][0] * 2.5, 'sum': jnp.sum(i['x'][0], axis=0)}),
        toy('nan', lambda i: {'y': i['x'][0] * jnp.nan, 'sum': jnp.sum(i['x'][0], axis=0)}),
    )
    assert (good['us_pallas'], good['us_pallas_quartiles'], good['us_xla'], good['ratio']) == (
        9.0,
        [8.0, 10.0],
        30.0,
        3.333,
    )
    moved = 4 * (16 * 8 * 2 + 8)  # x, y and their sum
    assert (good['bytes'], good['gbps'], good['tflops']) == (moved, round(moved / 9e3, 1), 0.2)
    assert good['kernels_pallas'] == {'kernel_of_measurement0_pallas': 9.0}
    assert (good['error'], good['difference']) == (None, 0)
    assert all(
        good[f'{what}_{side}'] >= 0
        for what in ('lower_s', 'compile_s', 'temp_bytes')
        for side in ('xla', 'pallas')
    )
    json.dumps(good, allow_nan=False)
    assert 'pallas: ValueError: does not compile' in broken['error']
    assert 'us_pallas' not in broken
    assert 'differ by 0.25' in wrong['error']
    assert 'differ by inf' in nan['error']
    assert nan['difference'] is None
    json.dumps(nan, allow_nan=False)


def test_a_row_of_three_sides() -> None:
    """Every backend has its numbers, and none may differ from XLA."""

    def sides(cuda: float) -> Measurement:
        m = toy('three')
        return m._replace(
            sides={
                **m.sides,
                'cuda': lambda i: {'y': i['x'][0] * cuda, 'sum': jnp.sum(i['x'][0], axis=0)},
            }
        )

    (row,) = measured(sides(2.0))
    assert (row['us_cuda'], row['ratio_cuda'], row['ratio'], row['error']) == (
        9.0,
        3.333,
        3.333,
        None,
    )
    assert (row['tflops_cuda'], row['gbps_cuda']) == (row['tflops'], row['gbps'])
    (row,) = measured(sides(2.5))
    assert 'differ by 0.25' in row['error']


def test_what_was_not_compiled_or_seen_is_not_lost() -> None:
    late = toy('late')
    assert outcomes(late, seconds=-1) == [late]
    (row,) = measured(toy('unseen'), trace=lambda programs, rounds: {})
    assert row['error'] == 'xla: the trace lost all of its kernels'
    (row,) = measured(
        toy('torn'),
        trace=lambda programs, rounds: dict.fromkeys(programs, timing.Times({'k': 1.0}, ())),
    )
    assert row['error'] == 'xla: the trace lost some of its kernels'


def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement has its row, in order, however they are grouped."""
    monkeypatch.setattr(kernels, 'GROUP', 2)
    assert [row['case'] for row in measured(*(toy(f'case{i}') for i in range(5)))] == [
        f'case{i}' for i in range(5)
    ]


def test_lowering_elsewhere() -> None:
    """A side that another process lowered is what runs; where that fails it lowers here, and
    nothing is waited for in vain.
    """
    pytest.importorskip('flatbuffers')  # jax.export needs it to serialize
    m = toy('apart')

    def future(
        result: lowering.Lowered | Exception | None,
    ) -> concurrent.futures.Future[lowering.Lowered]:
        waiting: concurrent.futures.Future[lowering.Lowered] = concurrent.futures.Future()
        if isinstance(result, Exception):
            waiting.set_exception(result)
        elif result is not None:
            waiting.set_result(result)
        return waiting

    exported = bytes(jax.export.export(jax.jit(m.sides['xla']))(m.inputs).serialize())
    (row,) = measured(m, elsewhere={(m.name, 'pallas'): future(lowering.Lowered(exported, 12.5))})
    assert (row['lower_s_pallas'], row['error']) == (12.5, None)
    (row,) = measured(m, elsewhere={(m.name, 'pallas'): future(RuntimeError('a worker died'))})
    assert row['error'] is None
    assert outcomes(m, elsewhere={(m.name, 'pallas'): future(None)}, seconds=1) == [m]


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


def counted(m: Measurement, side: str = 'pallas') -> collections.Counter[str]:
    with device.use(device.Target.HOPPER):
        return kernel_names.count(
            jax.jit(m.sides[side]).trace(m.inputs).lower(lowering_platforms=('cuda',))
        )


# Cases of each op and direction that differ in kernels; the channel sums are the bias gradient.
GRADIENTS = {
    f'jaxunet_group_norm_{name}': 1 for name in ('gradient_sums', 'gradient', 'channel_sums')
} | {'jaxunet_conv3x3_weight_gradient': 1}
KERNELS: dict[str, dict[str, int]] = {
    'conv3x3 forward, 32x32_192to128, batch 2': {'jaxunet_conv3x3_forward': 1},
    'conv3x3 forward, 64x64_3to64, batch 2': {'jaxunet_conv3x3_triton_forward': 1},
    'conv3x3 input_gradient, 32x32_192to128, batch 2': {'jaxunet_conv3x3_forward': 1},
    'conv3x3 weight_gradient, 32x32_192to128, batch 2': {'jaxunet_conv3x3_weight_gradient': 1},
    'norm_silu_conv3x3 forward, norm_32x32_128+64to128, batch 2': {
        'jaxunet_group_norm_moments': 2,
        'jaxunet_group_norm_affine': 1,
        'jaxunet_conv3x3_forward': 1,
    },
    'norm_silu_conv3x3 forward+backward, norm_8x8_256to256_res192, batch 2': GRADIENTS
    | {'jaxunet_group_norm_forward': 1, 'jaxunet_conv3x3_forward': 2},
    'group_norm forward+backward, 16x16_192, batch 2': {
        'jaxunet_group_norm_forward': 1,
        'jaxunet_group_norm_backward': 1,
    },
    'attention forward, 64_tokens_8x32, batch 2': {'jaxunet_attention_forward': 1},
    'attention forward+backward, 256_tokens_6x32, batch 2': {
        'jaxunet_attention_forward': 1,
        'jaxunet_attention_backward_dq': 1,
        'jaxunet_attention_backward_dkv': 1,
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
        pallas = {'pallas'} if m.op not in ('linear', 'adamw') else set()
        assert set(shapes) == {'xla', 'cuda'} | pallas
        assert all(shape == shapes['xla'] for shape in shapes.values()), m.name
        assert m.bytes_needed() > 0
        assert (m.flops is None) == (m.op in ('group_norm', 'adamw'))


@pytest.mark.extension
def test_adamw_is_measured_once_and_in_place(monkeypatch) -> None:
    monkeypatch.setattr(adamw, 'CASES', (AWKWARD[1],))
    wanted = kernels.select(['adamw'], ['32', '256'], '', [PALLAS, CUDA])
    assert [m.name for m in wanted] == [
        f'adamw {direction}, two_averages, batch 1'
        for direction in ('step', 'sum_of_squares', 'narrow')
    ]
    called = collections.Counter()

    def trace(programs, **_):
        for name, program in programs.items():
            for number in range(3):  # a call leaves the inputs of the next
                jax.block_until_ready(program(number))
                called[name] += 1
        return {name: timing.Times({'k': 1.0}, (2.0,)) for name in programs}

    found = measured(*wanted, trace=trace)
    assert [row['error'] for row in found] == [None] * 3
    assert set(called.values()) == {3}
    assert len(called) == 6
    elements = AWKWARD[1].elements
    assert found[0]['bytes'] == 4 * (1 + elements * (1 + 5 + 5)) - 2 * sum(
        math.prod(shape) for shape in AWKWARD[1].shapes if len(shape) > 1
    )
    assert found[2]['bytes'] == 6 * sum(
        math.prod(shape) for shape in AWKWARD[1].shapes if len(shape) > 1
    )


@pytest.mark.extension
def test_an_op_that_pallas_has_not_is_measured() -> None:
    wanted = kernels.select(['linear'], ['1'], '^4x4', [PALLAS, CUDA])
    found = measured(
        *wanted,
        trace=lambda programs, **_: {name: timing.Times({'k': 1.0}, (2.0,)) for name in programs},
    )
    assert [(row['error'], row['ratio_cuda'], 'us_pallas' in row) for row in found] == [
        (None, 1.0, False)
    ] * 4
    text = kernel_table.tables([ORIGIN | row for row in found])
    assert "XLA's time over the CUDA kernels'" in text
    assert 'Pallas' not in text


def test_a_kernel_is_measured_through_to_its_row() -> None:
    """The real sides, interpreted on the CPU: their results agree."""
    wanted = kernels.select(['attention'], ['1'], '64_tokens', [PALLAS]) + kernels.select(
        ['group_norm'], ['1'], '^8x8_192$', [PALLAS]
    )

    def trace(programs: Mapping[str, object], *, rounds: int) -> dict[str, timing.Times]:
        return {name: timing.Times({'k': 1.0}, (1.0,) * rounds) for name in programs}

    with device.use(device.Target.INTERPRET):
        found = measured(*wanted, trace=trace)
    assert [row['error'] for row in found] == [None] * 4
    assert all(0 <= row['difference'] < 0.02 for row in found)


def test_inputs() -> None:
    inputs = Inputs()
    like = {
        'x': (jax.ShapeDtypeStruct((64, 9), 'bfloat16'),),
        'kernel': jax.ShapeDtypeStruct((3, 3, 64, 32), 'bfloat16'),
    }
    like['dy'] = jax.ShapeDtypeStruct((64, 9), 'bfloat16')
    m = Measurement('op', 'case', 'forward', 1, {}, like, None)
    first, second = inputs.of(m, 0), inputs.of(m, 1)
    assert first['x'][0] is inputs.of(m, 2)['x'][0]
    assert (np.asarray(first['x'][0]) != np.asarray(second['x'][0])).any()
    assert (np.asarray(first['x'][0]) != np.asarray(first['dy'])).any()
    kernel = np.asarray(first['kernel'].astype(jnp.float32))
    np.testing.assert_allclose(kernel.std(), (9 * 64) ** -0.5, rtol=0.05)
    large = Measurement(
        'op', 'case', 'forward', 1, {}, {'x': jax.ShapeDtypeStruct((4_100_000,), 'float32')}, None
    )
    assert abs(float(jnp.std(inputs.of(large, 0)['x'])) - 1) < 0.01


def test_gradients() -> None:
    function = with_gradients(lambda i: i['a'] * i['b'] + i['c'], fixed=('c',))
    y, (gradients,) = function(
        {'a': jnp.float32(2), 'b': jnp.float32(3), 'c': jnp.float32(1), 'dy': jnp.float32(10)}
    )
    assert (y, gradients) == (7, {'a': 30, 'b': 20})


def example(
    case: str, batch: int, ratio: float, op: str = 'conv3x3', **changes: object
) -> rows.Row:
    row = {
        'op': op,
        'case': case,
        'direction': 'forward',
        'batch': batch,
        'dtype': 'bfloat16',
        'error': None,
    }
    return (
        ORIGIN
        | row
        | {
            'us_pallas': 10.0,
            'us_xla': 10.0 * ratio,
            'ratio': ratio,
            'tflops': 600.4,
            'gbps': 1234.5,
        }
        | changes
    )


def test_tables(tmp_path: pathlib.Path) -> None:
    found = [
        {'kind': 'benchmark'},
        example('a', 32, 9.0),  # a later row takes its place
        example('a', 32, 2.0),
        example('b', 32, 0.5),
        example('a', 256, 3.0),
        example('b', 256, 1.0, error='broken'),
        example(
            'n',
            32,
            1.5,
            op='group_norm',
            tflops=None,
            us_cuda=5.0,
            ratio_cuda=3.0,
            tflops_cuda=None,
            gbps_cuda=2469.0,
        ),
    ]
    path = tmp_path / 'rows.jsonl'
    for row in found:
        rows.append(path, row)
    printed = call('jaxunet.benchmark.kernels.__main__', f'--table={path}').splitlines()
    missed = 'not met: mean under 1.5, rates unknown; 1 under 0.95 of XLA'
    assert f'| conv3x3 | forward | 32 | 2 | 1.00 | 0.50 | b | – | {missed} |' in printed
    assert '| conv3x3 | forward | 256 | 1 | 3.00 | 3.00 | a | – | met |' in printed
    assert '| a | 10.0 | 600 | 1234 | 2.00 | 10.0 | 600 | 1234 | 3.00 |' in printed
    assert '| b | 10.0 | 600 | 1234 | 0.50 | – | – | – | – |' in printed
    assert '| n | 10.0 | – | 1234 | 1.50 |' in printed
    (cuda,) = (
        at for at, line in enumerate(printed) if line.endswith("XLA's time over the CUDA kernels'.")
    )
    assert printed[cuda + 4] == '| group_norm | forward | 32 | 1 | 3.00 | 3.00 | n | – | met |'
    assert '| n | 5.0 | – | 2469 | 3.00 |' in printed
    assert sum('NVIDIA H200' in line for line in printed) == 5
    assert printed == kernel_table.tables(found).splitlines()


RATES = {'matmul_flops': 700e12, 'copy_bytes_per_s': 4e12}


@pytest.mark.parametrize(
    ('cases', 'share', 'text'),
    [
        # (XLA's time over the kernel's, its TFLOP/s, its GB/s); the rates are 700 and 4,000
        ([(1.5, 100.0, 100.0), (1.6, None, 200.0)], 0.05, 'met'),
        ([(1.0, 600.0, 100.0), (0.95, None, 3500.0)], 600 / 700, 'met'),
        (
            [(1.0, 600.0, 100.0), (1.2, 500.0, 100.0), (1.0, 10.0, 3000.0)],
            500 / 700,
            'not met: mean under 1.5, 2 under 85% of the rates',
        ),
        ([(9.0, 600.0, 100.0), (0.94, 650.0, 100.0)], 600 / 700, 'not met: 1 under 0.95 of XLA'),
    ],
)
def test_a_verdict_names_the_bars_that_a_group_misses(cases, share, text):
    group = [
        example(str(i), 32, ratio, tflops=tflops, gbps=gbps) | RATES
        for i, (ratio, tflops, gbps) in enumerate(cases)
    ]
    found = verdict.verdict(group)
    assert found.share == pytest.approx(share)
    assert found.text == text
    assert verdict.verdict([*group, example('old', 32, 9.0)]).share is None


@pytest.mark.parametrize(
    ('op', 'direction', 'bar'),
    [
        ('conv3x3', 'forward', 1.5),
        ('conv3x3', 'weight_gradient', 1.3),
        ('attention', 'forward+backward', 3.0),
        ('adamw', 'step', 1.5),
    ],
)
def test_the_bar_of_a_group(op, direction, bar):
    for ratio, met in ((bar - 0.01, False), (bar, True)):
        row = example('a', 32, ratio, op=op) | RATES | {'direction': direction, 'tflops': 1.0}
        assert (verdict.verdict([row]).text == 'met') == met


def test_committed_rows_make_a_table_of_each_backend() -> None:
    """Without the CUDA kernels' columns the table is of Pallas alone, which has no linear layer."""
    committed = rows.read(ROOT / 'docs/results/kernels/rows.jsonl')
    three = kernel_table.summary(committed)
    both = [row for row in committed if 'us_pallas' in row]
    assert {row['op'] for row in committed if row not in both} == {'linear'}
    two = kernel_table.summary(
        {name: value for name, value in row.items() if not name.endswith('_cuda')} for row in both
    )
    assert "XLA's time over the Pallas kernels'." in two
    assert 'CUDA' not in two
    assert "XLA's time over the CUDA kernels'." in three
    assert three.startswith(two)


@pytest.mark.parametrize(
    ('found', 'message'),
    [
        ([], 'no measurements of kernels'),
        ([{'kind': 'kernel', 'op': 'conv3x3', 'error': None}], 'expected a field device, found'),
    ],
)
def test_rows_that_make_no_table(found: list[rows.Row], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kernel_table.tables(found)


def test_directions_are_chosen() -> None:
    every = kernels.select(['conv3x3'], ['2'], '8x8', [PALLAS])
    found = kernels.select(['conv3x3'], ['2'], '8x8', [PALLAS], directions=['weight_gradient'])
    assert found
    assert [m.name for m in found] == [m.name for m in every if m.direction == 'weight_gradient']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ((['conv'], ['32'], ''), '--ops: .*did you mean "conv3x3"'),
        ((['linear'], ['32'], ''), '--ops: linear: only the CUDA backend has kernels for that'),
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
            options = {
                name: s.inputs[name]
                for name in ('affine', 'residual', 'shortcut')
                if name in s.inputs
            }
            chosen = hopper.choose_tile(
                s.inputs['x'], s.inputs['kernel'], flipped=s.direction == 'input', **options
            )
            assert s.tiles[0] == chosen
        with device.use(device.Target.HOPPER):
            texts = {
                jax.jit(lambda i, s=s, t=t: s.run(t, i))
                .trace(s.inputs)
                .lower(lowering_platforms=('cuda',))
                .as_text()
                for t in s.tiles[:2]
            }
        assert len(texts) == 2
