"""A made-up trace of a GPU, and the traced program."""

from jaxunet.profile.events import Event, build_trace
from jaxunet.profile.hlo import Instruction, Program

INSTRUCTIONS = {
    'conv.1': Instruction('custom-call', 'jit(whole)/jvp(forward)/UNet/middle_res_0/conv'),
    'jaxunet_conv3x3_dx.2': Instruction(
        'custom-call', 'jit(whole)/transpose(jvp(forward))/UNet/middle_res_0/pallas_call'
    ),
    'all-reduce-start.1': Instruction('all-reduce-start', 'jit(whole)/all_reduce/psum'),
    'add_fusion.3': Instruction('fusion', 'jit(whole)/optimizer/add'),
}
PROGRAM = Program('jit_whole', INSTRUCTIONS, list(INSTRUCTIONS))


def gpu_events(shift=0.0):
    """Returns the events of one step, times in microseconds.

    0-10 forward, 10-30 backward, 20-40 all-reduce at the same time, idle until 44, 44-50 optimizer,
    50-51 copy.
    """
    compute = [
        ('sm90_xmma_fprop', 0, 10, 'conv.1'),
        ('jaxunet_conv3x3_dx', 10, 20, 'jaxunet_conv3x3_dx.2'),
        ('add_fusion_3', 44, 6, 'add_fusion.3'),
        ('MemcpyD2H', 50, 1, ''),
    ]
    collective = [('ncclDevKernel_AllReduce_Sum_f32_RING_LL', 20, 20, 'all-reduce-start.1')]

    def events(rows):
        return [
            Event(
                n, (s + shift) * 1e3, d * 1e3, {'hlo_op': h, 'hlo_module': 'jit_whole'} if h else {}
            )
            for n, s, d, h in rows
        ]

    return [
        ('Stream #13(Compute)', events(compute)),
        ('Stream #20(Nccl)', events(collective)),
        ('XLA Modules', events(compute)),
    ]


def gpu_trace(devices=2):
    host = [
        Event('step', 0.0, 100.0, {}),
        Event('dispatch', 10.0, 60.0, {}),
        Event('launch', 20.0, 30.0, {}),
        Event('launch', 60.0, 10.0, {}),
        Event('after', 100.0, 5.0, {}),
    ]
    planes = [(f'/device:GPU:{d}', gpu_events(shift=d)) for d in range(devices)]
    return build_trace(
        [*planes, ('/host:CPU', [('python', host)]), ('/host:metadata', [])], PROGRAM, 1
    )
