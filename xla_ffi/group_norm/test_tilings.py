"""Tilings of the GPU's normalisation kernels: they cover every pixel and channel, and none asks for
more than a multiprocessor has.
"""

import functools
import itertools
import math

import pytest

import xla_ffi
from jaxunet.ops.group_norm.cases import CASES, Case

H200 = {'processors': 132, 'shared': 227 * 1024, 'cluster': 8}
A100 = {'processors': 108, 'shared': 163 * 1024, 'cluster': 1}
L4 = {'processors': 58, 'shared': 99 * 1024, 'cluster': 1}
STAGES = 4  # chunks in shared memory: kChunkStages, kBackwardStages
THREADS = 512  # most in a block

pytestmark = pytest.mark.extension


def vector_of(element, parts):
    """Channels of a load: 16 bytes of them, or one if some part is not a multiple of that."""
    vector = 16 // element
    return vector if all(part % vector == 0 for part in parts) else 1


def forward(device, batch, pixels, channels, group, *, parts=(), element=2, writes_y=True):
    vector = vector_of(element, (*parts, channels))
    return vector, xla_ffi._cpu.group_norm_smem_resident(
        batch, pixels, channels, group, vector, element, writes_y, *device.values()
    )


def backward(device, batch, pixels, channels, group, *, parts=(), element=2, added=0):
    vector = vector_of(element, (*parts, channels))
    return vector, xla_ffi._cpu.group_norm_backward(
        batch, pixels, channels, group, vector, element, added, *device.values()
    )


def blocks_of_a_multiprocessor(found):
    """Returns how many blocks of a backward tiling share a multiprocessor of an H200."""
    size = found['stage_bytes'] + found['scratch_bytes'] + 1024  # reserved by the driver
    return min(228 * 1024 // size, 768 // found['threads'])  # 80 registers per thread


@pytest.mark.parametrize('device', [H200, A100, L4], ids=['H200', 'A100', 'L4'])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_pixel_and_channel_has_a_thread(case, device):
    pixels, channels, group = case.height * case.width, case.channels, case.channels // case.groups
    for batch, element, writes_y in itertools.product((1, 32, 256), (2, 4), (False, True)):
        vector, found = forward(
            device,
            batch,
            pixels,
            channels,
            group,
            parts=case.parts,
            element=element,
            writes_y=writes_y,
        )
        assert found['channels'] % math.lcm(group, vector) == 0
        assert (
            (found['channel_blocks'] - 1) * found['channels']
            < channels
            <= found['channel_blocks'] * found['channels']
        )
        assert (
            (found['ranks'] - 1) * found['block_pixels']
            < pixels
            <= found['ranks'] * found['block_pixels']
        )
        assert found['ranks'] in (1, 2, 4, 8)
        assert found['ranks'] <= device['cluster']
        assert found['lanes'] * found['warp_columns'] >= found['channels'] // vector
        assert found['warp_columns'] == 1 or found['lanes'] == 32
        assert found['threads'] == found['lanes'] * found['warp_columns'] * found['rows']
        assert found['threads'] <= THREADS
        assert (
            found['rows'] * found['chunk_steps'] * found['chunks']
            >= found['block_pixels']
            > found['rows'] * found['chunk_steps'] * (found['chunks'] - 1)
        )
        assert group % found['piece'] == 0 == vector % found['piece']
        held = (
            found['threads']
            * vector
            * element
            * found['chunk_steps']
            * min(found['chunks'], STAGES)
        )
        assert held < found['bytes'] <= device['shared']


@pytest.mark.parametrize('device', [H200, A100, L4], ids=['H200', 'A100', 'L4'])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_the_backward_pass_covers_every_pixel_and_channel(case, device):
    pixels, channels, group = case.height * case.width, case.channels, case.channels // case.groups
    for batch, element, added in itertools.product((1, 32, 256), (2, 4), (0, 2)):
        vector, found = backward(
            device, batch, pixels, channels, group, parts=case.parts, element=element, added=added
        )
        own, rows, ranks = found['channels'], found['rows'], found['ranks']
        assert own % math.lcm(group, vector) == 0
        assert own * found['channel_blocks'] == channels
        assert ranks in (1, 2, 4, 8)
        assert ranks <= device['cluster']
        assert rows * own // vector <= found['threads'] <= THREADS
        assert found['threads'] % 32 == 0
        assert found['team'] * own <= found['threads'] or found['team'] == 1
        steps = -(-pixels // (rows * ranks))
        assert (
            found['chunk_steps'] * found['chunks']
            >= steps
            > found['chunk_steps'] * (found['chunks'] - 1)
        )
        assert not found['keep'] or (vector > 1 and found['chunks'] <= STAGES)
        arrays = 3 if found['keep'] and element == 2 else 2
        held = rows * own * element * found['chunk_steps'] * min(found['chunks'], STAGES) * arrays
        assert held <= found['stage_bytes']
        assert found['stage_bytes'] % (arrays * 16) == 0
        mailbox = 16 + 8 * ranks * own if ranks > 1 else 0
        assert mailbox + 4 * (9 * own + rows * (own + 4)) <= found['scratch_bytes']
        assert found['stage_bytes'] + found['scratch_bytes'] <= device['shared']


@pytest.mark.parametrize(
    ('side', 'channels', 'writes_y', 'own', 'ranks', 'read_once'),
    [
        (64, 64, True, 32, 4, True),  # rows of 64 bytes, pixels divided among a cluster
        (64, 192, True, 48, 8, True),
        (64, 64, False, 16, 1, False),  # statistics: nothing is read twice
        (32, 128, True, 32, 1, True),
        (8, 256, True, 32, 1, True),
    ],
)
def test_forward_tilings_of_an_h200(side, channels, writes_y, own, ranks, read_once):
    _, found = forward(H200, 32, side * side, channels, channels // 32, writes_y=writes_y)
    assert (found['channels'], found['ranks'], found['chunks'] <= STAGES) == (own, ranks, read_once)
    assert (
        32 * found['channel_blocks'] * found['ranks'] >= 128
    )  # about one block per multiprocessor
    assert 2 * found['bytes'] <= 227 * 1024  # and room for two


@pytest.mark.parametrize(
    ('batch', 'side', 'channels', 'added', 'expected', 'sharing'),
    [  # channels, cluster, rows; blocks of a multiprocessor
        (32, 64, 64, 0, (32, 8, 64), 2),
        (32, 32, 64, 2, (32, 2, 128), 1),  # one block per multiprocessor: as large as possible
        (256, 32, 128, 0, (32, 4, 32), 4),
        (256, 32, 128, 2, (32, 4, 64), 3),  # more threads
        (256, 32, 192, 1, (48, 4, 64), 2),  # a third block would not fit
        (256, 32, 320, 1, (40, 4, 32), 3),
        (32, 16, 192, 0, (48, 1, 64), 2),
        (32, 16, 512, 1, (64, 2, 16), 4),
        (256, 16, 192, 0, (48, 2, 32), 4),  # clusters of two
        (256, 16, 192, 2, (48, 2, 32), 4),
        (256, 16, 256, 0, (64, 2, 16), 4),  # and longer rows
        (256, 16, 256, 2, (32, 2, 32), 6),
        (256, 16, 320, 1, (80, 2, 16), 3),
        (32, 8, 256, 0, (32, 1, 64), 3),
        (256, 8, 256, 0, (64, 1, 16), 6),
        (256, 8, 448, 1, (112, 1, 8), 4),
        (128, 4, 512, 1, (128, 1, 8), 6),
    ],
)
def test_backward_tilings_of_an_h200(batch, side, channels, added, expected, sharing):
    _, found = backward(H200, batch, side * side, channels, channels // 32, added=added)
    assert tuple(found[k] for k in ('channels', 'ranks', 'rows')) == expected
    assert found['keep']  # x and dy are read once, dz is computed once
    assert blocks_of_a_multiprocessor(found) == sharing


@pytest.mark.parametrize(
    ('device', 'channels', 'vector', 'element', 'expected'),
    [
        (A100, 256, 8, 2, (32, 1, 64)),
        (L4, 256, 8, 2, (32, 1, 64)),
        (H200, 256, 4, 4, (16, 1, 64)),
        (H200, 96, 1, 2, (48, 1, 8)),  # one channel per load
    ],
    ids=['A100', 'L4', 'float32', 'odd'],
)
def test_small_backward_blocks_only_where_they_were_measured(
    device, channels, vector, element, expected
):
    """Elsewhere, two blocks get all threads of a multiprocessor, and one block holds a sample."""
    for added in (0, 2):
        found = xla_ffi._cpu.group_norm_backward(
            256, 256, channels, channels // 32, vector, element, added, *device.values()
        )
        assert tuple(found[k] for k in ('channels', 'ranks', 'rows')) == expected


@pytest.mark.parametrize(
    ('batch', 'side', 'channels', 'element', 'expected'),
    [
        (256, 64, 64, 2, True),  # all pixels of a block's channels fit in a cluster
        (32, 64, 64, 2, True),
        (256, 64, 192, 2, True),
        (256, 128, 64, 2, False),  # do not fit in a cluster's shared memory
        (256, 64, 64, 4, False),  # clusters were not measured in float32
        (32, 32, 256, 2, True),  # one block holds them
        (256, 32, 256, 4, True),
    ],
)
def test_large_images_take_one_launch_where_it_is_faster(batch, side, channels, element, expected):
    pixels, group = side * side, channels // 32
    assert streaming(H200, batch, pixels, channels, group, element=element)[1] is not None
    found = xla_ffi._cpu.group_norm_faster_than_streaming(
        batch, pixels, channels, group, 16 // element, element, *H200.values()
    )
    assert found == expected


def test_few_samples_are_spread_over_more_multiprocessors():
    _, one = forward(H200, 1, 4096, 64, 2)
    assert one['channel_blocks'] * one['ranks'] == 64
    _, without = forward(A100, 1, 4096, 64, 2)
    assert without['ranks'] == 1
    _, two = backward(H200, 1, 4096, 64, 2)
    assert two['ranks'] == 8
    _, alone = backward(A100, 1, 4096, 64, 2)
    assert alone['ranks'] == 1
    assert alone['chunks'] > STAGES


@pytest.mark.parametrize('tiling', [forward, backward])
def test_groups_beyond_a_block_are_an_error(tiling):
    tiling(H200, 1, 16, 2048, 2048)
    with pytest.raises(
        RuntimeError,
        match=r'groups of 65536 channels need .* use more groups, or backend=pallas or xla',
    ):
        tiling(H200, 1, 16, 65536, 65536)


def test_a_block_never_has_more_threads_than_the_kernels_are_compiled_for():
    """An odd group is loaded one channel per thread."""
    for tiling in (functools.partial(forward, writes_y=False), forward, backward):
        _, found = tiling(H200, 1, 4, 511, 511, element=4)
        assert found['threads'] == THREADS
        with pytest.raises(
            RuntimeError, match=r'groups of 513 channels need 544 threads and .* found 512 and'
        ):
            tiling(H200, 1, 4, 513, 513, element=4)


def streaming(device, batch, pixels, channels, group, *, parts=(), element=2, least=192 * 1024):
    vector = vector_of(element, (*parts, channels))
    return vector, xla_ffi._cpu.group_norm_streaming(
        least, batch, pixels, channels, group, vector, element, *device.values()
    )


@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_streaming_covers_the_channels_and_keeps_groups_whole(case):
    pixels, channels, group = case.height * case.width, case.channels, case.channels // case.groups
    for device, batch, element, least in itertools.product(
        (H200, A100, L4), (1, 13, 32, 256), (2, 4), (1, 192 * 1024)
    ):
        vector, found = streaming(
            device, batch, pixels, channels, group, parts=case.parts, element=element, least=least
        )
        ranks, row = device['cluster'], 128 if device is H200 else 32  # the shortest, in bytes
        if found is None:
            unit = math.lcm(group, vector, row // element)
            few = batch * ranks * channels < device['processors'] * 3 // 4 * unit * 2
            assert pixels * channels < least or few or channels // vector > 256
            continue
        assert found['channels'] * found['channel_blocks'] == channels
        assert found['channels'] % math.lcm(group, vector) == 0
        assert 1 <= found['rows'] * (found['channels'] // vector) <= found['threads']
        assert found['ranks'] == ranks
        assert channels % found['second_pass_channels'] == 0
        assert found['second_pass_channels'] // vector <= found['threads']
        assert 1 <= found['second_pass_ranks'] <= 128
        assert group % found['piece'] == 0 == vector % found['piece']


def test_streaming_tilings_of_an_h200():
    for side, channels, second_pass_ranks in ((64, 64, 12), (64, 192, 12), (32, 320, 12)):
        _, found = streaming(H200, 32, side * side, channels, channels // 32)
        assert (found['channels'], found['channel_blocks'], found['second_pass_ranks']) == (
            channels,
            1,
            second_pass_ranks,
        )
    assert streaming(H200, 32, 256, 448, 14)[1] is None  # small samples
    assert streaming(H200, 1, 4096, 64, 2)[1] is None  # few samples
    assert streaming(H200, 8, 4096, 128, 4)[1]['channel_blocks'] == 2


def tiling(name, device, batch, case, element):
    """Returns a case's vector, and its tiling for one of the kernels that load into registers."""
    vector = vector_of(element, case.parts)
    shape = (batch, case.height * case.width, case.channels, case.channels // case.groups)
    found = getattr(xla_ffi._cpu, f'group_norm_{name}')(*shape, vector, element, *device.values())
    return vector, found


def check_block(case, vector, found, sharing):
    """A block has whole groups and rows for all pixels, and fits on a multiprocessor.

    Args:
      sharing: blocks that share the pixels of a sample.
    """
    group, pixels = case.channels // case.groups, case.height * case.width
    assert found['channels'] * found['channel_blocks'] == case.channels
    assert found['channels'] == found['groups'] * group
    assert found['channels'] % vector == 0
    assert group % found['piece'] == 0 == vector % found['piece']
    assert found['entries'] % 2 == 1
    assert found['entries'] >= found['channels'] // found['piece']
    assert found['rows'] * found['channels'] // vector <= found['threads'] <= 512
    assert found['threads'] % 32 == 0
    assert found['team'] in (8, 16, 32)
    rows = found['rows'] * sharing
    assert rows * found['each'] + found['rest'] == pixels
    assert 0 <= found['rest'] < rows
    assert found['bytes'] <= 99 * 1024


@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_registers_hold_every_pixel(case):
    for batch, element in itertools.product((1, 13, 32, 256), (2, 4)):
        vector, found = tiling('register_resident', H200, batch, case, element)
        if found is None:
            odd = vector == 1 or case.channels // case.groups % 2 == 1
            unit = math.lcm(case.channels // case.groups, vector) // vector
            assert odd or unit * math.ceil(case.height * case.width / 8) > 512
            continue
        check_block(case, vector, found, 1)
        assert found['thread_pixels'] in (2, 4, 8)
        assert found['each'] + (found['rest'] > 0) <= found['thread_pixels']


@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_statistics_read_every_pixel(case):
    for device, batch, element in itertools.product((H200, A100, L4), (1, 13, 32, 256), (2, 4)):
        vector, found = tiling('statistics', device, batch, case, element)
        check_block(case, vector, found, found['ranks'])
        assert found['ranks'] in (1, 2, 4, 8)
        assert found['ranks'] <= device['cluster']


def test_statistics_of_many_groups_fit_into_shared_memory():
    case = Case(8, 8, (4096,), groups=4096)
    _, found = tiling('statistics', L4, 256, case, 2)
    assert found['channel_blocks'] == 2  # a block with all channels would need 112 KB
    assert found['bytes'] <= L4['shared']


@pytest.mark.parametrize(
    ('batch', 'side', 'channels', 'own', 'threads', 'ranks'),
    [
        (1, 64, 64, 16, 128, 8),  # few samples: rows of one sector, clusters
        (8, 64, 64, 32, 256, 8),
        (8, 32, 128, 16, 256, 1),
        (32, 64, 64, 32, 512, 2),
        (32, 32, 128, 32, 256, 1),
        (64, 32, 128, 64, 512, 1),
        (128, 64, 64, 64, 512, 1),
        (256, 64, 64, 64, 256, 1),  # one block per sample, two per multiprocessor
        (256, 32, 320, 320, 256, 1),
    ],
)
def test_statistics_of_an_h200(batch, side, channels, own, threads, ranks):
    case = Case(side, side, (channels,))
    _, found = tiling('statistics', H200, batch, case, 2)
    assert (found['channels'], found['threads'], found['ranks']) == (own, threads, ranks)


@pytest.mark.parametrize(
    ('batch', 'side', 'channels', 'own', 'pixels'),
    [
        (1, 8, 256, 16, 2),
        (32, 16, 192, 48, 4),
        (32, 8, 256, 32, 2),
        (32, 16, 448, 56, 8),  # with 4 pixels a block would have 448 threads
        (128, 32, 128, 32, 8),
        (256, 16, 192, 48, 8),
        (256, 8, 256, 32, 4),
        (256, 8, 448, 224, 8),  # fewer channels would leave lanes idle
    ],
)
def test_registers_of_an_h200(batch, side, channels, own, pixels):
    _, found = tiling('register_resident', H200, batch, Case(side, side, (channels,)), 2)
    assert (found['channels'], found['thread_pixels']) == (own, pixels)


def cluster_tiling(side, channels, element=2, device=H200):
    """Returns the register-resident tiling with clusters for 32 groups, or None."""
    vector = 16 // element
    shape = (side * side, channels, channels // 32)
    module = xla_ffi._cpu
    return module.group_norm_register_resident_cluster(*shape, vector, element, *device.values())


@pytest.mark.parametrize(
    ('side', 'channels', 'own', 'ranks', 'threads'),
    [
        (64, 64, 32, 8, 256),
        (64, 192, 48, 8, 384),  # rows of 48 bytes would not be whole sectors
        (32, 192, 48, 4, 192),
        (32, 256, 32, 2, 256),
        (32, 320, 80, 8, 160),
    ],
)
def test_clusters_hold_large_samples_in_registers(side, channels, own, ranks, threads):
    found = cluster_tiling(side, channels)
    assert (found['channels'], found['ranks'], found['threads']) == (own, ranks, threads)
    check_block(Case(side, side, (channels,)), 8, found, ranks)
    assert found['each'] + (found['rest'] > 0) <= found['thread_pixels'] == 8


def test_clusters_cannot_hold_everything():
    assert cluster_tiling(96, 64) is None  # more pixels than 8 blocks of 512 threads
    assert cluster_tiling(64, 96) is None  # groups of an odd number of channels
    assert cluster_tiling(64, 64, device=A100) is None


def test_kernels_that_load_to_registers_leave_images_without_pixels_to_others():
    for name in ('statistics', 'register_resident'):
        assert tiling(name, H200, 2, CASES[0]._replace(height=0), 2)[1] is None
    assert cluster_tiling(0, 64) is None
