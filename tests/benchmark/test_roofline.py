"""The budget of a training step: the classes of its kernels, their sums, its table."""

from __future__ import annotations

import pathlib
import re

import pytest
from support.commands import call_each

from jaxunet.benchmark.device import Rates
from jaxunet.benchmark.roofline import table
from jaxunet.benchmark.roofline.classify import Call, kind_of_name, kind_of_xla, place
from jaxunet.benchmark.roofline.measured import Line, StepKernels, measure
from jaxunet.benchmark.roofline.run import to_rows
from jaxunet.benchmark.roofline.work import (
    FEW_CHANNELS,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    LINEAR,
    NORM_BACKWARD,
    NORM_FORWARD,
    REDUCTIONS,
    REMAINING,
    UPDATE,
    WEIGHT_GRADIENT,
    Work,
)
from jaxunet.profile.events import Event, Trace, build_trace
from jaxunet.profile.hlo import read_hlo
from jaxunet.profile.phases import own_name
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


def test_every_kernel_of_the_sources_has_a_class() -> None:
    found = []
    for path in (ROOT / 'xla_ffi').rglob('*.cu*'):
        text = path.read_text()
        kernels = re.findall(
            r'__global__\s+void\s+(?:__\w+__\((?:[^()]|\([^()]*\))*\)\s*)*(\w+)\(', text
        )
        assert len(kernels) == len(re.findall(r'__global__', text)), path
        found += [f'jaxunet_cuda_{name}' for name in kernels]
    for path in (ROOT / 'pallas_kernels').rglob('*.py'):
        found += re.findall(r"'(jaxunet_\w*[a-z])'", path.read_text())
    assert len(found) > 30
    assert [name for name in found if kind_of_name(name) is None] == []


# As a trace names the kernels of a step.
TRACED = """\
void jaxunet::cuda::(anonymous namespace)::few_weight_gradient_kernel<__nv_bfloat16, 3>(int)
jaxunet::cuda::(anonymous namespace)::ordered_sums_kernel(jaxunet::cuda::OrderedSums)
void jaxunet::cuda::forward::hopper_forward_kernel<__nv_bfloat16, jaxunet::cuda::Tile<64>>(int)
void jaxunet::cuda::(anonymous namespace)::hopper_weight_gradient_kernel<__nv_bfloat16>(int)
void jaxunet::cuda::(anonymous namespace)::narrow_kernel<__nv_bfloat16>(jaxunet::cuda::Narrow)
void jaxunet::cuda::(anonymous namespace)::group_norm_statistics<__nv_bfloat16, 8>(int)
void jaxunet::cuda::flash_forward_kernel<jaxunet::cuda::ForwardShape<__nv_bfloat16, 32>>(int)
void jaxunet::cuda::(anonymous namespace)::group_norm_dx<__nv_bfloat16, 8>(jaxunet::cuda::Dx)
void jaxunet::cuda::flash_backward_kernel<jaxunet::cuda::BackwardShape<__nv_bfloat16>>(int)
""".splitlines()


def test_every_kernel_of_a_trace_has_a_class() -> None:
    kinds = {kind_of_name(own_name(name)) for name in TRACED}
    assert kinds == set(KINDS) - {INPUT_GRADIENT, LINEAR, REMAINING}  # known by their calls alone


FFI = (
    'custom-call({}), custom_call_target="jaxunet_{}", '
    'metadata={{op_name="jit(whole)/{}/ffi_call"}}'
)
FORWARDS, BACKWARDS = 'jvp(forward)/UNet/x', 'transpose(jvp(forward))/UNet/x'


def ffi(name: str, shape: str, operands: str, target: str, path: str, **attributes: str) -> str:
    config = ', '.join(f'{key} = {value}' for key, value in attributes.items())
    text = FFI.format(operands, target, path)
    return f'  %{name} = {shape} {text}, backend_config={{{config}}}'


X, SMALL, IMAGE = 'bf16[2,8,8,16]{3,2,1,0}', 'bf16[2,4,4,32]{3,2,1,0}', 'bf16[2,8,8,1]{3,2,1,0}'
HLO = '\n'.join(
    [
        'HloModule jit_whole, is_scheduled=true',
        '',
        '%fused_add (p0: f32[10], p1: f32[10]) -> f32[10] {',
        '  %p0 = f32[10]{0} parameter(0)',
        '  %p1 = f32[10]{0} parameter(1)',
        '  ROOT %add.1 = f32[10]{0} add(%p0, %p1)',
        '}',
        '',
        'ENTRY %main () -> f32[10] {',
        f'  %x = {X} parameter(0)',
        f'  %small = {SMALL} parameter(1)',
        f'  %image = {IMAGE} parameter(2)',
        '  %f = f32[10]{0} parameter(3)',
        ffi('c.1', X, '%image, %x', 'conv3x3', FORWARDS, flipped='false'),
        ffi('c.2', X, '%x, %x', 'conv3x3', FORWARDS, flipped='false'),
        ffi('c.3', SMALL, '%small', 'linear', FORWARDS, residual='false'),
        ffi('c.4', SMALL, '%small', 'conv3x3', BACKWARDS, flipped='true'),
        ffi('c.5', SMALL, '%small', 'group_norm_dropout_gradient', BACKWARDS),
        ffi('c.6', 'bf16[3,3,16,16]{3,2,1,0}', '%x, %x', 'conv3x3_weight_gradient', BACKWARDS),
        ffi('c.7', 'bf16[32,32]{1,0}', '%small', 'linear_weight_gradient', BACKWARDS),
        ffi('c.8', 'f32[10]{0}', '%f', 'adamw', 'optimizer'),
        '  ROOT %add_fusion.1 = f32[10]{0} fusion(%f, %c.8), kind=kLoop, calls=%fused_add, '
        'metadata={op_name="jit(whole)/jvp(forward)/UNet/add"}',
        '}',
        '',
    ]
)
# Kernels of a step: name, microseconds, instruction. c.4 has no kernel that its name tells from
# those of forward convolutions, and c.6 and c.7 have the same kernels.
STEP: list[tuple[str, float, str]] = [
    ('few_channels_forward_kernel', 1, 'c.1'),
    ('hopper_forward_kernel', 2, 'c.2'),
    ('hopper_forward_kernel', 4, 'c.3'),
    ('hopper_forward_kernel', 8, 'c.4'),
    ('group_norm_sums', 16, 'c.5'),
    ('group_norm_dx', 32, 'c.5'),
    ('hopper_weight_gradient_kernel', 64, 'c.6'),
    ('split_k_reduce_kernel', 128, 'c.6'),
    ('hopper_weight_gradient_kernel', 256, 'c.7'),
    ('split_k_reduce_kernel', 512, 'c.7'),
    ('adamw_kernel', 1024, 'c.8'),
    ('add_fusion_1', 2048, 'add_fusion.1'),
]
WORK = [
    Work(FORWARD, (8, 8), 6_000, 1_000),
    Work(FORWARD, (8, 8), 1_000, 4_000),
    Work(INPUT_GRADIENT, (4, 4), 0, 1_000),
    Work(LINEAR, (), 3_000, 0),
]
RATES = Rates(1e9, 1e9)  # 1,000 operations or bytes are a microsecond


def trace(step: list[tuple[str, float, str]], *, graph: bool, steps: int = 2) -> Trace:
    events, now = [], 0.0
    for name, us, instruction in step * steps:
        ours = not name.startswith('add')
        shown = f'void jaxunet::cuda::(anonymous namespace)::{name}<float>(int)' if ours else name
        stats = {'hlo_module': 'jit_whole', 'hlo_op': 'graph' if graph else instruction}
        events.append(Event(shown, now, us * 1e3, stats | ({'cuda_graph_id': 7} if graph else {})))
        now += us * 1e3
    return build_trace([('/device:GPU:0', [('Stream #1', events)])], read_hlo(HLO), steps)


@pytest.mark.parametrize('graph', [True, False])
def test_kernels_are_found_by_class_and_level(graph: bool) -> None:
    found = measure(trace(STEP, graph=graph), HLO, 2, WORK, RATES)
    assert (found.unplaced, found.unknown) == (0, [])
    lines = {(line.kind, line.level): line for line in found.lines}
    us = {key: round(line.ms * 1e3, 6) for key, line in lines.items()}
    assert us == {
        (FEW_CHANNELS, ()): 1,
        (FORWARD, ()): 2,
        (FORWARD, (8, 8)): 2,
        (LINEAR, ()): 4 + 256,
        (INPUT_GRADIENT, ()): 8,
        (INPUT_GRADIENT, (4, 4)): 8,
        (NORM_BACKWARD, ()): 48,
        (NORM_BACKWARD, (4, 4)): 48,
        (WEIGHT_GRADIENT, ()): 64,
        (WEIGHT_GRADIENT, (8, 8)): 64,
        (REDUCTIONS, ()): 640,
        (UPDATE, ()): 1024,
        (REMAINING, ()): 2048,
    }
    # Each op's floor is the longer of its two; XLA's fusion reads two arrays and writes one.
    assert lines[FORWARD, (8, 8)] == Line(
        FORWARD, (8, 8), 1, 7_000, 5_000, pytest.approx(10e-3), pytest.approx(2e-3)
    )
    assert lines[REMAINING, ()].bytes == 3 * 40
    assert (lines[NORM_BACKWARD, ()].launches, lines[REDUCTIONS, ()].floor_ms) == (2, 0)


@pytest.mark.parametrize('graph', [True, False])
def test_a_merged_call_has_a_line_with_the_work_of_its_members(graph: bool) -> None:
    """Its members are three convolutions, one of them with few channels, and a linear layer."""
    members = {0: (2, 1, 'true'), 1: (1, 0, 'false'), 3: (1, 0, 'false')}
    attributes = {'members': '4 : i64', 'linear_2': 'true'}
    for i, (parts, residuals, norm) in members.items():
        attributes |= {f'parts_{i}': f'{parts} : i64', f'residuals_{i}': f'{residuals} : i64'}
        attributes |= {f'norm_{i}': norm, f'linear_{i}': 'false'}
    operands = '%x, %x, %x, %x, %f, %small, %small, %small, %small, %image, %x'
    merged = ffi('c.7', '(bf16[3,3,32,16])', operands, 'weight_gradients', 'backward', **attributes)
    program = '\n'.join(merged if ' %c.7 =' in line else line for line in HLO.splitlines())
    kernels = [('hopper_weight_gradient_kernel', 256.0), ('hopper_weight_gradient_kernel', 512.0)]
    kernels += [('few_weight_gradient_kernel', 4096.0), ('split_k_reduce_kernel', 8192.0)]
    step = [kernel for kernel in STEP if kernel[2] != 'c.7']
    step[8:8] = [(name, us, 'c.7') for name, us in kernels]
    alone = Work(WEIGHT_GRADIENT, (8, 8), 2 * 128 * 16 * 9 * 16, 1)  # of c.6
    work = [
        alone,
        Work(WEIGHT_GRADIENT, (8, 8), 2 * 128 * 16 * (9 * 32 + 16), 10),
        Work(WEIGHT_GRADIENT, (4, 4), 2 * 32 * 32 * 9 * 32, 100),
        *(Work(LINEAR, (), 2 * 32 * 32 * 32, size) for size in (5_000, 1_000, 1_000)),
        Work(FEW_CHANNELS, (8, 8), 2 * 128 * 16 * 9, 10_000),
    ]
    found = measure(trace(step, graph=graph), program, 2, work, RATES)
    assert (found.unplaced, found.unknown) == (0, [])
    lines = {(line.kind, line.level): line for line in found.lines}
    weights = {level: lines[kind, level] for kind, level in lines if kind == WEIGHT_GRADIENT}
    several = sum(w.flops for w in work[1:4])
    assert {level: (line.launches, line.flops, line.bytes) for level, line in weights.items()} == {
        (): (3, alone.flops + several, 1 + 1_110),
        (8, 8): (1, alone.flops, 1),
        ('several',): (2, several, 1_110),
    }
    assert weights['several',].ms == pytest.approx(768e-3)
    assert (lines[LINEAR, ()].flops, lines[LINEAR, ()].bytes) == (2 * work[3].flops, 6_000)
    assert lines[FEW_CHANNELS, ()].ms == pytest.approx(4.097)
    assert lines[REDUCTIONS, ()].ms == pytest.approx(8.320)
    levels = [row['level'] for row in to_rows(CASE, found, busy_ms=1.0, step_ms=1.0)]
    assert 'several' in levels


def test_xla_has_no_class_for_few_channels() -> None:
    """Its convolution of the images is in the class and level where `step_work` has its floor."""
    call = FFI.format('%image, %x', '', FORWARDS).replace('jaxunet_', '__cudnn$convForward')
    lines = [line if ' %c.2 =' not in line else f'  %c.2 = {X} {call}' for line in HLO.splitlines()]
    program = '\n'.join(lines)
    stats = {'hlo_module': 'jit_whole', 'hlo_op': 'c.2'}
    event = Event('sm90_xmma_fprop_implicit_gemm_bf16', 0.0, 1e3, stats)
    plane = ('/device:GPU:0', [('Stream #1', [event])])
    found = measure(build_trace([plane], read_hlo(program), 1), program, 1, WORK, RATES)
    assert {(line.kind, line.level) for line in found.lines if line.launches} == {
        (FORWARD, ()),
        (FORWARD, (8, 8)),
    }


def test_kernels_without_a_call_or_a_class_are_told() -> None:
    """Those of a step that lost some count in the class of their name and pass, in no level."""
    lost = measure(trace(STEP[:3] + STEP[-2:], graph=True), HLO, 2, WORK, RATES)
    assert lost.unplaced == 4
    ms = {line.kind: line.ms for line in lost.lines if not line.level}
    assert ms[FEW_CHANNELS] == pytest.approx(1e-3)
    assert ms[FORWARD] + ms[INPUT_GRADIENT] == pytest.approx(6e-3)
    assert all(line.ms == 0 for line in lost.lines if line.level)
    renamed = [('new_kernel', *STEP[0][1:]), *STEP[1:]]
    assert measure(trace(renamed, graph=True), HLO, 2, WORK, RATES).unknown == [
        'jaxunet_cuda_new_kernel'
    ]


@pytest.mark.parametrize(
    ('kernel', 'kind'),
    [
        ('sm90_xmma_wgrad_indexed_implicit_gemm_bf16', WEIGHT_GRADIENT),
        ('sm90_xmma_fprop_implicit_gemm_bf16', FORWARD),
        ('nvjet_sm90_tst_96x128_64x7_2x1_v_bz_TNN', LINEAR),
        ('gemm_fusion_dot_48', LINEAR),
        ('input_reduce_fusion_207', REMAINING),
    ],
)
def test_kernels_of_libraries(kernel: str, kind: str) -> None:
    assert kind_of_xla(None, kernel, 'backward') == kind
    assert kind_of_xla(None, kernel, 'optimizer') == UPDATE


def test_sums_belong_to_the_call_before_them() -> None:
    weights, product = Call('w', WEIGHT_GRADIENT, False), Call('c', FORWARD, True)
    calls = [weights, product, weights, weights]
    wg, sums, forward = 'weight_gradient_kernel', 'split_k_reduce_kernel', 'hopper_forward_kernel'
    assert place([wg, sums, forward, wg, sums, sums, wg], calls) == [0, 0, 1, 2, 2, 2, 3]
    assert place([wg, 'adamw_kernel', forward, wg, wg, sums], calls) == [0, None, 1, 2, 3, 3]
    several = [weights, weights._replace(merged=True), product]
    assert place([wg, sums, wg, wg, sums, forward], several) == [0, 0, 1, 1, 1, 2]
    several = [weights._replace(merged=True), weights, product]
    assert place([wg, wg, sums, wg, sums, forward], several) == [0, 0, 0, 1, 1, 2]
    assert place([wg, forward], calls) == [None, None]
    assert place([wg], []) == [None]


CASE: rows.Row = {
    'kind': 'roofline', 'time': '2030-01-01', 'git': 'abc1234', 'device': 'NVIDIA H200', 'driver': '1',  # noqa: E501
    'versions': {'jax': '1'}, 'config': 'x', 'precision': 'bfloat16', 'batch_size': 32, 'ops': 'ops: a=cuda',  # noqa: E501
    'matmul_flops': 1e15, 'copy_bytes_per_s': 4e12,
}  # fmt: skip
LINES = [
    Line(FORWARD, (), 2, 2_000_000_000, 8_000_000, 3.0, 4.0),
    Line(FORWARD, (8, 8), 1, 10**9, 0, 1.0, 1.5),
    Line(FORWARD, (4, 4), 1, 10**9, 0, 2.0, 2.75),
    Line(UPDATE, (), 1, 0, 8_000_000, 1.0, 5.0),
    Line(NORM_FORWARD, (), 0, 0, 0, 0.5, 0.0),
]


def budget(**changes: object) -> list[rows.Row]:
    return list(to_rows(CASE | changes, StepKernels(LINES, 0, []), busy_ms=8.5, step_ms=9.0))


def test_the_table_shows_the_next_gap(tmp_path: pathlib.Path) -> None:
    """Classes, and levels in their class, by the time above their floor; a later run replaces an
    earlier one.
    """
    file = tmp_path / 'rows.jsonl'
    for row in [{'kind': 'kernel'}, *budget(matmul_flops=1.0), *budget(time='2030-01-02')]:
        rows.append(file, row)
    text = table.markdown(rows.read(file))
    body = [line for line in text.splitlines() if line.startswith('|')][2:]
    assert body == [
        '| AdamW and 16-bit copies | all | 1 | – | 0.008 | 1.000 | 5.000 | 4.000 | – | 2 |',
        '| convolution forward | all | 2 | 2.0 | 0.008 | 3.000 | 4.000 | 1.000 | 0 | 2 |',
        '|  | 4x4 | 1 | 1.0 | – | 2.000 | 2.750 | 0.750 | 0 | – |',
        '|  | 8x8 | 1 | 1.0 | – | 1.000 | 1.500 | 0.500 | 1 | – |',
        '| GroupNorm forward | all | 0 | – | – | 0.500 | – | – | – | – |',
        '| **all kernels** |  | 3 | 2.0 | 0.016 | 4.500 | 9.000 | 4.500 | 0 | 2 |',
    ]
    assert 'matrix product 1000 TFLOP/s and copy 4000 GB/s' in text
    assert text.endswith(
        'Step 9.000 ms: kernels busy 8.500 ms, gaps between them 0.500 ms; floor 4.500 ms.'
    )


def test_what_could_not_be_told_is_below_the_table() -> None:
    found = StepKernels(LINES, 2.0, ['jaxunet_cuda_new'])
    text = table.markdown(to_rows(CASE, found, busy_ms=1.0, step_ms=1.0))
    assert '2 kernels per step could not be matched' in text
    assert text.endswith('Kernels without a class: jaxunet_cuda_new.')


@pytest.mark.parametrize(
    ('found', 'message'),
    [
        ([], 'no budget of a step'),
        (budget()[:-1], 'the rows of x, batch 32, .* have none of the whole step'),
        (
            [{'kind': 'roofline', 'class': 'step'}],
            'a row of kind roofline: expected a field device',
        ),
        ([{**budget()[-1], 'busy_ms': None}], 'busy_ms: expected a number, found None'),
        (budget(versions=None), 'versions: expected a JSON object, found None; remove its line'),
        (budget(ops=['a']), "ops: expected text, found \\['a'\\]"),
        (budget(time=5), 'time: expected text, found 5'),
        ([{**budget()[0], 'level': 3}], 'level: expected text, found 3'),
    ],
)
def test_rows_that_make_no_table(found: list[rows.Row], message: str) -> None:
    with pytest.raises(UserError, match=message):
        table.markdown(found)


def test_command_line(tmp_path: pathlib.Path) -> None:
    """A table is printed from its file; a mistake, and a machine without a GPU, are one line."""
    file, config = tmp_path / 'rows.jsonl', f'--config={ROOT}/configs/elephants64.py'
    for row in budget():
        rows.append(file, row)
    printed = table.markdown(budget()) + '\n'
    expected: dict[tuple[str, ...], str] = {
        ('--roofline', f'--table={file}'): printed,
        ('--roofline', config): 'times the kernels of a training step on an NVIDIA GPU; found cpu',
        ('--roofline', config, '--ops=linear'): '--ops: chooses among single ops; not with',
    }
    commands = [['jaxunet.benchmark.kernels', *arguments] for arguments in expected]
    (code, output, _), *failed = call_each(commands, tmp_path)
    assert (code, output) == (0, printed)
    for (code, _, error), wanted in zip(failed, [*expected.values()][1:], strict=True):
        assert (code, error.startswith('error: '), error.count('\n')) == (2, True, 1)
        assert wanted in error
