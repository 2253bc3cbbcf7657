"""The GroupNorm kernels of GPUs without clusters, for every norm of the configs.

Tests which ones run, and that they cover all channels and fit in the shared memory of any such GPU.
"""

import itertools
import math

import pytest

import xla_ffi

# Multiprocessors, shared memory of a block, no clusters. The first two are a Hopper GPU with
# JAXUNET_KERNELS=portable and =ada.
DEVICES = {
    'portable': (132, 227 * 1024, 1),
    'ada': (132, 99 * 1024, 1),
    'A100': (108, 163 * 1024, 1),
    'RTX4090': (128, 99 * 1024, 1),
    'L4': (58, 99 * 1024, 1),
}
SMALLEST = 99 * 1024  # bytes of shared memory that a block has on every GPU
STAGES, THREADS = 4, 256  # of the streaming kernels
LARGE = 192 * 1024  # kStreamingMinElements
# Height -> channels of the norms of a training step; groups are always 32.
NORMS = {
    'elephants64': {
        64: (64, 128, 192),
        32: (64, 128, 192, 256, 320),
        16: (128, 192, 320, 384, 448),
        8: (192, 256, 448, 512),
    },
    'cifar10': {32: (128, 256, 384), 16: (128, 256, 384, 512), 8: (256, 512), 4: (256, 512)},
    'imagenet64': {
        64: (192, 384, 576),
        32: (192, 384, 576, 768, 960),
        16: (384, 576, 768, 960, 1152, 1344),
        8: (576, 768, 1344, 1536),
    },
}
SHAPES = sorted(
    {(side, channels) for norms in NORMS.values() for side in norms for channels in norms[side]}
)

pytestmark = pytest.mark.extension


def tilings(device, batch, side, channels, element):
    """Returns the tiling of each kernel that takes the norm, and the arguments."""
    shape = (batch, side * side, channels, channels // 32, 16 // element, element)
    on, module = DEVICES[device], xla_ffi._cpu
    found = {
        'register': module.group_norm_register_resident(*shape, *on),
        'streaming': module.group_norm_streaming(LARGE, *shape, *on),
        'statistics': module.group_norm_statistics(*shape, *on),
        'smem_forward': module.group_norm_smem_resident(*shape, True, *on),
        'smem_backward': module.group_norm_backward(*shape, 0, *on),
    }
    return found, (*shape, *on)


def kernels(device, batch, side, channels, element=2):
    """Returns the kernels that dispatch.cu chooses, forward and backward."""
    found, arguments = tilings(device, batch, side, channels, element)
    large, small = found['streaming'], found['register']
    if small and (not large or small['faster_than_streaming']):
        forward = 'register_resident'
    else:
        forward = 'streaming' if large else 'smem_resident'
    one = xla_ffi._cpu.group_norm_faster_than_streaming(*arguments)
    return forward, 'streaming' if large and not one else 'smem_resident'


@pytest.mark.parametrize(('side', 'channels'), SHAPES, ids=str)
@pytest.mark.parametrize('device', DEVICES)
def test_every_norm_of_the_configs_has_valid_tilings(device, side, channels):
    for batch, element in itertools.product((1, 32, 128, 256), (2, 4)):
        found, _ = tilings(device, batch, side, channels, element)
        unit = math.lcm(channels // 32, 16 // element)
        memory = DEVICES[device][1]
        for name, one in found.items():
            if one is None:
                assert name in ('register', 'streaming')
                continue
            assert one['channels'] % unit == 0
            assert one['channels'] * one['channel_blocks'] == channels
            assert one.get('ranks', 1) == 1
            if name in ('register', 'statistics'):
                assert one['bytes'] <= SMALLEST
                assert one['rows'] * one['each'] + one['rest'] == side * side
        assert found['smem_forward']['bytes'] <= memory
        backward = found['smem_backward']
        assert backward['stage_bytes'] + backward['scratch_bytes'] <= memory
        if large := found['streaming']:
            check_streaming(large, batch, side, channels, element, DEVICES[device][0])


def check_streaming(large, batch, side, channels, element, processors):
    vector = 16 // element
    stage = STAGES * THREADS * vector * element  # one tensor's pipeline, in bytes
    # The first launch: the sums of the rows overwrite the pipelines of x and dy.
    assert large['rows'] * large['channels'] // vector <= THREADS
    assert 8 * large['rows'] * large['channels'] <= 2 * stage <= SMALLEST
    assert batch * large['channel_blocks'] >= processors * 3 // 4
    assert large['channels'] * element >= 32
    # The second launch: whole pixels, contiguous in memory; two added tensors, and four floats per
    # channel.
    assert large['second_pass_channels'] == channels or channels // vector > THREADS
    assert 1 <= large['second_pass_ranks'] <= 128
    assert 4 * stage + 16 * large['second_pass_channels'] <= SMALLEST


def test_few_samples_keep_the_kernels_that_take_one_launch():
    for device in DEVICES:
        assert kernels(device, 1, 64, 192) == ('smem_resident', 'smem_resident')
    assert kernels('portable', 16, 64, 64)[1] == 'smem_resident'
    assert kernels('L4', 16, 64, 64)[1] == 'streaming'  # fewer multiprocessors


@pytest.mark.parametrize('batch', [32, 128, 256])
@pytest.mark.parametrize('device', DEVICES)
def test_images_of_64x64_pixels_stream(device, batch):
    for channels in NORMS['elephants64'][64] + NORMS['imagenet64'][64]:
        assert kernels(device, batch, 64, channels) == ('streaming', 'streaming')


@pytest.mark.parametrize('batch', [32, 128, 256])
@pytest.mark.parametrize('device', DEVICES)
def test_images_up_to_32x32_pixels_take_one_launch(device, batch):
    """The backward pass reads again, from L2, what a block could not keep.

    Forward, 320 channels have groups of 10, and registers cannot hold 32x32 pixels of those.
    """
    for side, channels in SHAPES:
        if side > 32 or channels > 512:
            continue
        forward, backward = kernels(device, batch, side, channels)
        assert backward == 'smem_resident'
        assert forward == ('streaming' if (side, channels) == (32, 320) else 'register_resident')


@pytest.mark.parametrize(
    ('batch', 'channels', 'row', 'blocks'),
    [  # bytes of a row, blocks of the first backward launch
        (32, 64, 32, 128),  # short rows, for enough blocks
        (128, 64, 64, 256),
        (256, 64, 128, 256),  # two blocks per multiprocessor, with whole lines
        (32, 192, 96, 128),
        (256, 192, 192, 512),
    ],
)
def test_first_launches_of_64x64_pixels(batch, channels, row, blocks):
    found, _ = tilings('portable', batch, 64, channels, 2)
    large = found['streaming']
    assert (2 * large['channels'], batch * large['channel_blocks']) == (row, blocks)


def test_with_clusters_one_block_never_takes_large_samples():
    """On Hopper, a cluster holds them, or they stream."""
    shape = (32, 1024, 256, 8, 8, 2, 132, 227 * 1024, 8)
    assert not xla_ffi._cpu.group_norm_register_resident(*shape)['faster_than_streaming']
    assert xla_ffi._cpu.group_norm_streaming(LARGE, *shape)['ranks'] == 8
