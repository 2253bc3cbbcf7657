"""The profiler knows what operations are for: phases of real programs, and kernels that hide in
CUDA graphs.
"""

import pytest
from support.tiny import tiny_config

from jaxunet.data.sources import open_images
from jaxunet.profile.align import align, stem
from jaxunet.profile.capture import single_steps
from jaxunet.profile.events import COLLECTIVE, KERNEL, Event, build_trace
from jaxunet.profile.hlo import Instruction, Program, read_hlo
from jaxunet.profile.phases import (
    ALL_REDUCE,
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    backend_of,
    module_of,
    own_name,
    phase_of,
)
from jaxunet.runtime.errors import UserError


def test_phase_of_paths():
    assert phase_of('jit(whole)/data/jit(_threefry_fold_in)/while') == DATA
    assert phase_of('jit(whole)/jvp(data)/vmap(jit(_normal))/lt') == DATA
    assert (
        phase_of('jit(whole)/jvp(forward)/UNet.predict/UNet/middle_res_0/transpose') == FORWARD
    )  # the primitive of that name
    assert (
        phase_of('jit(whole)/transpose(jvp(forward))/UNet.predict/UNet/middle_res_0/mul')
        == BACKWARD
    )
    assert phase_of('jit(whole)/while/body/backward/add') == BACKWARD
    assert phase_of('jit(whole)/all_reduce/psum') == ALL_REDUCE
    assert phase_of('jit(whole)/optimizer/ema/add;jit(whole)/jvp(forward)/mul') == OPTIMIZER
    assert phase_of('jit(whole)/forwarded/mul') == phase_of('') == OTHER


def test_several_steps_of_a_call_have_no_profile():
    config = tiny_config(train={'steps_per_call': 2, 'log_every': 2})
    with pytest.raises(
        UserError, match=r'train.steps_per_call: a profile is of steps one by one, found 2'
    ):
        single_steps(config, open_images(config))


@pytest.mark.parametrize(
    ('changes', 'devices'),
    [
        ({'parallel': {'mode': 'pmap', 'devices': 2}}, 2),
        pytest.param(
            {
                'optimizer': {'accumulate_steps': 2},
                'model': {'remat': True},
                'data': {'cache': 'stream', 'augment': 'flip'},
            },
            1,
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_operation_of_a_real_step_has_its_phase(changes, devices):
    config = tiny_config(**{'parallel': {'devices': devices}, **changes})
    with single_steps(config, open_images(config)) as session:
        program = read_hlo(session.compile().as_text())
    working = {name: program.instructions[name] for name in program.schedule}
    phases = {name: phase_of(i.path) for name, i in working.items()}
    assert {DATA, FORWARD, BACKWARD, OPTIMIZER} <= set(phases.values())
    unknown = [name for name, phase in phases.items() if phase == OTHER]
    assert len(unknown) < 0.02 * len(phases), unknown
    everything = program.instructions.values()
    convolutions = [phase_of(i.path) for i in everything if i.opcode == 'convolution']
    # Conv in, five blocks of two, conv out. Each has two gradients, but the first one's input needs
    # none; recomputing adds to these.
    forward, backward = convolutions.count(FORWARD), convolutions.count(BACKWARD)
    assert forward == 12
    assert backward == 23 if not config.model.remat else backward > 23
    assert forward + backward == len(convolutions)
    assert {phase_of(i.path) for i in everything if 'threefry' in i.path} == {DATA}
    if devices > 1:
        assert {
            phases[name] for name, i in working.items() if i.opcode.startswith('all-reduce')
        } == {ALL_REDUCE}
    assert any(module_of(i.path) == 'UNet/middle_res_0' for i in everything)


def test_hlo_reader_finds_lost_paths():
    program = read_hlo(
        """HloModule jit_f, is_scheduled=true

%fused (p.1: f32[2], p.2: f32[2]) -> (f32[2], f32[]) {
  %p.1 = f32[2]{0} parameter(0)
  %a.1 = f32[2]{0} add(%p.1, %p.1), metadata={op_name="jit(f)/forward/add"}
  %a.2 = f32[2]{0} add(%p.1, %a.1), metadata={op_name="jit(f)/forward/add"}
  ROOT %m.1 = f32[2]{0} multiply(%a.2, %a.2), metadata={op_name="jit(f)/data/mul"}
}

ENTRY %main.4 (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0), metadata={op_name="x"}
  %copy.1 = f32[2]{0} copy(%x)
  %loop_fusion.1 = (f32[2]{0}, f32[]) fusion(%copy.1), kind=kLoop, calls=%fused
  %copy.2 = f32[2]{0} copy(%loop_fusion.1)
  %reduce.1 = f32[2]{0} reduce(%copy.2), metadata={op_name="reduce_sum"}
  ROOT %neg = f32[2]{0} negate(%reduce.1), metadata={op_name="jit(f)/optimizer/neg"}
}
"""
    )
    assert program.instructions['loop_fusion.1'] == Instruction(
        'fusion', 'jit(f)/forward/add'
    )  # the path of most instructions in it
    assert (
        program.instructions['copy.2'].path
        == program.instructions['reduce.1'].path
        == 'jit(f)/forward/add'
    )  # the operand's
    assert (
        program.instructions['copy.1'].path == 'jit(f)/forward/add'
    )  # the user's, as an argument has none
    assert program.instructions['neg'] == Instruction('negate', 'jit(f)/optimizer/neg')


def test_module_of_paths():
    inner = 'UNet.predict/UNet/jvp(forward)/UNet.predict/UNet/checkpoint/rematted_computation/middle_res_0'  # noqa: E501
    assert (
        module_of(f'jit(whole)/while/body/eval_jaxpr/transpose(jvp(forward))/{inner}/embed/add')
        == 'UNet/middle_res_0/embed'
    )
    assert (
        module_of(
            'jit(whole)/shard_map/jvp(forward)/UNet.predict/UNet/UNet._embed/bc,cf->bf/dot_general;jit(whole)/x/mul'
        )
        == 'UNet'
    )
    assert module_of('jit(whole)/optimizer/ema/mul') == 'ema'
    assert module_of('') == module_of('jit(whole)/optimizer/mul') == ''


def test_names_tell_backends():
    assert backend_of('jaxunet_conv3x3_forward', 'custom-call.3') == 'pallas'
    assert backend_of('kernel', 'jaxunet_conv3x3_forward.3') == 'pallas'
    norm = (
        'void jaxunet::cuda::(anonymous namespace)::group_norm_backward<__nv_bfloat16, '
        '8>(jaxunet::cuda::(anonymous namespace)::Backward)'
    )
    conv = (
        'void jaxunet::cuda::forward::hopper_forward_kernel<__half, '
        'jaxunet::cuda::TileTraits<16, 64> >(jaxunet::cuda::forward::Parameters)'
    )
    assert backend_of(norm, 'ffi_call.3') == backend_of(conv, 'ffi_call.3') == 'cuda'
    assert backend_of('sm90_xmma_fprop', 'cudnn-conv.1') == 'xla'
    assert own_name(norm, 'ffi_call.3') == 'jaxunet_cuda_group_norm_backward'
    assert own_name(conv, 'ffi_call.3') == 'jaxunet_cuda_hopper_forward_kernel'
    assert (
        own_name(
            'jaxunet::cuda::(anonymous namespace)::split_k_reduce_kernel(jaxunet::cuda::Reductions)'
        )
        == 'jaxunet_cuda_split_k_reduce_kernel'
    )
    assert (
        own_name('jaxunet_conv3x3_forward_mosaic_gpu_kernel', 'custom-call.3')
        == 'jaxunet_conv3x3_forward'
    )
    assert own_name('copy', 'copy.1') == ''


def test_stems():
    names = ('loop_add_fusion_12', 'loop_add_fusion.3.1', 'gemm_64x32', 'copy', '12')
    stems = ['loop_add_fusion', 'loop_add_fusion', 'gemm_64x32', 'copy', '12']
    assert list(map(stem, names)) == stems


def test_kernels_of_cuda_graphs_find_their_instructions():
    """The trace names the graph only; the third conv's kernels come with a fill, and identical
    fusions share a kernel.
    """
    schedule = {
        'fusion.1': Instruction('fusion', 'jit(f)/data/add'),
        'copy.1': Instruction('copy', 'jit(f)/forward/copy'),
        'cudnn-conv.1': Instruction('custom-call', 'jit(f)/jvp(forward)/UNet/a/conv'),
        'cudnn-conv.2': Instruction('custom-call', 'jit(f)/jvp(forward)/UNet/b/conv'),
        'fusion.2': Instruction('fusion', 'jit(f)/jvp(forward)/UNet/b/add'),
        'cudnn-conv.3': Instruction('custom-call', 'jit(f)/transpose(jvp(forward))/UNet/b/conv'),
        'all-reduce-start.1': Instruction('all-reduce-start', 'jit(f)/all_reduce/psum'),
        'wrapped_add.1': Instruction('fusion', 'jit(f)/optimizer/add'),
        'fusion.3': Instruction('fusion', 'jit(f)/optimizer/mul'),
    }
    launches = [
        ('fusion_1', 'fusion.1'),
        ('memcpy128', 'copy.1'),
        ('sm90_a', 'cudnn-conv.1'),
        ('sm90_b', 'cudnn-conv.2'),
        ('fusion_1', 'fusion.2'),
        ('Memset 3', 'cudnn-conv.3'),
        ('prepare<int>', 'cudnn-conv.3'),
        ('sm90_b', 'cudnn-conv.3'),
        ('wrapped_add', 'wrapped_add.1'),
        ('fusion_1', 'fusion.3'),
    ]
    graph = {'hlo_op': 'command_buffer_1', 'hlo_module': 'jit_f', 'cuda_graph_id': '7'}
    events = [Event(name, 10.0 * i, 5.0, graph) for i, (name, _) in enumerate(launches * 2)]
    reduced = {'hlo_op': 'all-reduce-start.1', 'hlo_module': 'jit_f'}
    nccl = [Event('ncclDevKernel_AllReduce', 80.0, 5.0, reduced)]
    program = Program('jit_f', schedule, list(schedule))
    streams = [('Stream #1', events), ('Stream #2', nccl)]
    ops = build_trace([('/device:GPU:0', streams)], program, 2).ops
    instructions = [hlo for _, hlo in launches]
    assert [op.hlo for op in ops if op.kind != COLLECTIVE] == instructions * 2
    convolutions = ['cudnn-conv'] * 2
    assert [op.operation for op in ops if op.kind == KERNEL][:8] == [
        *('fusion', *convolutions, 'fusion', *convolutions, 'wrapped_add', 'fusion')
    ]
    phases = [DATA, *[FORWARD] * 4, *[BACKWARD] * 3, *[OPTIMIZER] * 2]
    assert [op.phase for op in ops if op.kind != COLLECTIVE] == phases * 2
    assert [op.graph for op in ops].count(False) == 1
    # Steps that differ are not guessed at.
    ops = build_trace([('/device:GPU:0', [('Stream #1', events[:-1])])], program, 2).ops
    assert {op.phase for op in ops} == {OTHER}


def test_aligning_without_a_schedule_or_kernels():
    assert align(['a'], [], []) == ['']
    assert align([], ['a.1'], [False]) == []
    assert align(['x', 'y'], ['a.1'], [True]) == ['a.1', 'a.1']


def test_aligning_what_a_graph_moved():
    schedule = [
        *('a.1', 'b.1', 'custom-call.1', 'a.2', 'copy.1', 'c.1'),
        *('b.2', 'custom-call.2', 'a.3'),
    ]
    libraries = [name.startswith('custom') for name in schedule]
    kernels = [  # b.2 came early
        *('a_1', 'b_1', 'init', 'gemm', 'b_1', 'a_1', 'memcpy32', 'c_1'),
        *('init', 'gemm', 'split', 'a_1'),
    ]
    assert align(kernels, schedule, libraries) == [
        *['a.1', 'b.1', 'custom-call.1', 'custom-call.1', 'b.2', 'a.2', 'copy.1', 'c.1'],
        *['custom-call.2', 'custom-call.2', 'custom-call.2', 'a.3'],
    ]


def test_schedule_runs_loops():
    program = read_hlo(
        """HloModule jit_f, is_scheduled=true

%body.2 (t: (s32[])) -> (s32[]) {
  %t = (s32[]) parameter(0)
  ROOT %fusion.1 = (s32[]) fusion(%t), kind=kLoop, calls=%fused
}

ENTRY %main (x: (s32[])) -> (s32[]) {
  %x = (s32[]) parameter(0)
  %while.1 = (s32[]) while(%x), condition=%cond.2, body=%body.2, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %call.1 = (s32[]) call(%while.1), to_apply=%body.2
}
"""
    )
    assert program.schedule == ['fusion.1'] * 4
    assert program.name == 'jit_f'


def test_waiting_is_not_in_the_schedule():
    program = read_hlo(
        """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %copy-start.1 = (f32[2]{0}, f32[2]{0}, u32[]) copy-start(%x)
  %copy-done.1 = f32[2]{0} copy-done(%copy-start.1)
  ROOT %copy.2 = f32[2]{0} copy(%copy-done.1)
}
"""
    )
    assert program.schedule == ['copy-start.1', 'copy.2']
    copies = align(['memcpy32', 'memcpy32'], program.schedule, [False, False])
    assert copies == ['copy-start.1', 'copy.2']
