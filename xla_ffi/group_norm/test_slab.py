"""How the GPU's kernels cut a normalisation: everything is covered, nothing asks for more than a
multiprocessor has.
"""

import itertools
import math

import pytest

import xla_ffi
from jaxunet.ops.group_norm.cases import CASES

H200 = {'processors': 132, 'shared': 227 * 1024, 'cluster': 8}
A100 = {'processors': 108, 'shared': 163 * 1024, 'cluster': 1}
L4 = {'processors': 58, 'shared': 99 * 1024, 'cluster': 1}
RING = 4

pytestmark = pytest.mark.extension


def slab(device, batch, pixels, channels, group, *, parts=(), element=2, arrays=1):
    vector = 16 // element if all(part % (16 // element) == 0 for part in (*parts, channels)) else 1
    threads = 256 if arrays == 2 else 512
    return vector, xla_ffi._cpu.group_norm_smem_resident(
        batch, pixels, channels, group, vector, element, arrays, threads, *device.values()
    )


@pytest.mark.parametrize('device', [H200, A100, L4], ids=['H200', 'A100', 'L4'])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_pixel_and_channel_has_a_thread(case, device):
    pixels, channels, group = case.height * case.width, case.channels, case.channels // case.groups
    for batch, element, arrays in itertools.product((1, 32, 256), (2, 4), (0, 1, 2)):
        vector, found = slab(
            device, batch, pixels, channels, group, parts=case.parts, element=element, arrays=arrays
        )
        assert found['channels'] % math.lcm(group, vector) == 0
        assert (
            (found['blocks'] - 1) * found['channels']
            < channels
            <= found['blocks'] * found['channels']
        )
        assert (found['ranks'] - 1) * found['share'] < pixels <= found['ranks'] * found['share']
        assert found['ranks'] in (1, 2, 4, 8)
        assert found['ranks'] <= device['cluster']
        assert found['lanes'] * found['tiles'] >= found['channels'] // vector
        assert found['tiles'] == 1 or found['lanes'] == 32
        assert found['threads'] == found['lanes'] * found['tiles'] * found['rows']
        assert found['threads'] <= (256 if arrays == 2 else 512)
        assert (
            found['rows'] * found['depth'] * found['chunks']
            >= found['share']
            > found['rows'] * found['depth'] * (found['chunks'] - 1)
        )
        assert group % found['piece'] == 0 == vector % found['piece']
        held = (
            found['threads']
            * vector
            * element
            * found['depth']
            * min(found['chunks'], RING)
            * max(arrays, 1)
        )
        assert held < found['bytes'] <= device['shared']


@pytest.mark.parametrize(
    ('side', 'channels', 'arrays', 'own', 'ranks', 'read_once'),
    [
        (64, 64, 1, 32, 4, True),  # rows of 64 bytes, shared by clusters
        (64, 64, 2, 32, 8, True),
        (64, 192, 1, 48, 8, True),
        (64, 64, 0, 16, 1, False),  # statistics: nothing is read twice
        (32, 128, 1, 32, 1, True),
        (32, 128, 2, 16, 1, True),
        (16, 192, 2, 48, 1, True),
        (8, 256, 1, 32, 1, True),
        (4, 512, 2, 32, 1, True),
    ],
)
def test_slabs_of_an_h200(side, channels, arrays, own, ranks, read_once):
    _, found = slab(H200, 32, side * side, channels, channels // 32, arrays=arrays)
    assert (found['channels'], found['ranks'], found['chunks'] <= RING) == (own, ranks, read_once)
    assert 32 * found['blocks'] * found['ranks'] >= 128  # a block for about every multiprocessor
    assert 2 * found['bytes'] <= 227 * 1024  # and room for two


def test_few_samples_are_spread_over_more_multiprocessors():
    _, one = slab(H200, 1, 4096, 64, 2)
    assert one['blocks'] * one['ranks'] == 64
    _, without = slab(A100, 1, 4096, 64, 2)
    assert without['ranks'] == 1


def test_groups_beyond_a_block_are_an_error():
    slab(H200, 1, 16, 2048, 2048)
    with pytest.raises(
        RuntimeError,
        match=r'groups of 65536 channels need .* use more groups, or backend=pallas or xla',
    ):
        slab(H200, 1, 16, 65536, 65536)


def test_a_block_never_has_more_threads_than_the_kernels_are_compiled_for():
    """An odd group is loaded one channel at a time, a thread each."""
    for arrays in (0, 1, 2):
        _, found = slab(H200, 1, 4, 511, 511, element=4, arrays=arrays)
        assert found['threads'] == 512
        with pytest.raises(
            RuntimeError, match=r'groups of 513 channels need 544 threads and .* found 512 and'
        ):
            slab(H200, 1, 4, 513, 513, element=4, arrays=arrays)


def flow(device, batch, pixels, channels, group, *, parts=(), element=2, least=192 * 1024):
    vector = 16 // element if all(part % (16 // element) == 0 for part in (*parts, channels)) else 1
    return vector, xla_ffi._cpu.group_norm_streaming(
        least, batch, pixels, channels, group, vector, element, *device.values()
    )


@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_a_flow_covers_the_channels_and_keeps_groups_whole(case):
    pixels, channels, group = case.height * case.width, case.channels, case.channels // case.groups
    for batch, element, least in itertools.product((1, 13, 32, 256), (2, 4), (1, 192 * 1024)):
        assert (
            flow(
                A100, batch, pixels, channels, group, parts=case.parts, element=element, least=least
            )[1]
            is None
        )
        vector, found = flow(
            H200, batch, pixels, channels, group, parts=case.parts, element=element, least=least
        )
        if found is None:
            few = batch * 8 * channels < 99 * math.lcm(group, vector, 128 // element) * 2
            assert pixels * channels < least or few or channels // vector > 256
            continue
        assert found['channels'] * found['blocks'] == channels
        assert found['channels'] % math.lcm(group, vector) == 0
        assert 1 <= found['rows'] * (found['channels'] // vector) <= found['threads']
        assert found['ranks'] == 8
        assert 1 <= found['ranks_back'] <= 128
        assert group % found['piece'] == 0 == vector % found['piece']


def test_flows_of_an_h200():
    for side, channels, ranks_back in ((64, 64, 12), (64, 192, 12), (32, 320, 12)):
        _, found = flow(H200, 32, side * side, channels, channels // 32)
        assert (found['channels'], found['blocks'], found['ranks_back']) == (
            channels,
            1,
            ranks_back,
        )
    assert flow(H200, 32, 256, 448, 14)[1] is None  # small samples
    assert flow(H200, 1, 4096, 64, 2)[1] is None  # few samples
    assert flow(H200, 8, 4096, 128, 4)[1]['blocks'] == 2
