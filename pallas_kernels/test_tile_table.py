"""The tables of measured tiles: their tiles are chosen and valid, other shapes get a default, and
tuning updates the tables.
"""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import pytest

from jaxunet.runtime import device
from pallas_kernels import tile_table
from pallas_kernels.attention import tiles as attention
from pallas_kernels.conv3x3 import hopper, hopper_weight_gradient, triton, triton_weight_gradient
from pallas_kernels.conv3x3.triton_blocks import shape_class as triton_class
from pallas_kernels.group_norm import tiles as group_norm
from pallas_kernels.tile_table import Entry, Key

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

KINDS = {'NVIDIA H200': 'nvidia_h200.jsonl'}
ROWS = [(kind, key, entry) for kind in KINDS for key, entry in tile_table.load(kind).items()]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Tables of their own for a test."""
    monkeypatch.setattr(tile_table, 'FOLDER', tmp_path)
    tile_table.load.cache_clear()
    yield tmp_path
    tile_table.load.cache_clear()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r'\d+', text)))


def chosen(key: Key) -> tuple[DataclassInstance, str]:
    """The tile that the kernels take for the shapes that a key describes, and the key's shape
    again.
    """
    array = lambda *shape, dtype=key.dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    op, _, kernel = key.kernel.partition('/')
    if op == 'attention':
        tokens, width = numbers(key.shape)
        return attention.default_tile(
            kernel, tokens, width, key.dtype, shared=227 * 1024
        ), attention.shape_class(tokens, width)
    if op == 'group_norm':
        batch, pixels, channels = numbers(key.shape)
        group = channels // 32
        return group_norm.choose_tile(
            kernel, key.dtype, batch, pixels, channels, group
        ), group_norm.shape_class(batch, pixels, channels)
    image, convolution, *options = key.shape.split(', ')
    parts, features = (numbers(text) for text in convolution.split(' to '))
    if kernel.startswith('triton'):
        module = triton_weight_gradient if 'weight' in kernel else triton
        shape = triton_class(parts, *features, *numbers(image))
        return tile_table.measured(module.Tile, key.kernel, key.dtype, shape), shape
    inputs, dy = tuple(array(*numbers(image), c) for c in parts), array(*numbers(image), *features)
    if 'weight' in kernel:
        tile = hopper_weight_gradient.choose_tile(inputs, dy)
        assert hopper_weight_gradient.supports(inputs, dy, tile) is None
        return tile, hopper_weight_gradient.shape_class(inputs, dy)
    named: dict[str, object] = {'flipped': 'flipped' in options}
    weights = (
        array(3, 3, *features, sum(parts))
        if named['flipped']
        else array(3, 3, sum(parts), *features)
    )
    for option in options:
        if option == 'activated':
            named['affine'] = (array(numbers(image)[0], sum(parts), dtype='float32'),) * 2
        elif 'added' in option or 'projected' in option:
            named['residual'] = tuple(array(*numbers(image), c) for c in numbers(option))
            if 'projected' in option:
                named['shortcut'] = array(sum(numbers(option)), *features)
    tile = hopper.choose_tile(inputs, weights, **named)
    assert hopper.supports(inputs, weights, tile=tile, **named) is None
    return tile, hopper.shape_class(inputs, weights, **named)


def test_committed_tables() -> None:
    """Every file belongs to a known device and is sorted as `save` writes it."""
    assert {path.name for path in tile_table.FOLDER.iterdir()} == set(KINDS.values())
    for kind, name in KINDS.items():
        path = tile_table.path(kind)
        assert path.name == name
        found = list(tile_table.load(kind))
        assert found == sorted(found, key=tile_table.natural)
        kernels = {key.kernel for key in found}
        assert kernels >= {f'attention/{k}' for k in attention.KERNELS} | {
            'group_norm/gradient',
            'conv3x3/hopper_weight_gradient',
        }


@pytest.mark.parametrize(
    ('kind', 'key', 'entry'), ROWS, ids=lambda v: '-'.join(v) if isinstance(v, Key) else ''
)
def test_a_tile_of_the_table_is_chosen_and_valid(kind: str, key: Key, entry: Entry) -> None:
    with device.use(device.Target.HOPPER, kind):
        tile, shape = chosen(key)
    assert shape == key.shape
    assert tile == type(tile)(**entry.tile)
    assert entry.us is None or 0 < entry.us < 1e5


def test_another_device_takes_defaults(caplog: pytest.LogCaptureFixture) -> None:
    """It says so, and only shapes in the table get other tiles than on an H200."""
    kind = 'NVIDIA A100-SXM4-80GB'
    tile_table.load.cache_clear()
    with caplog.at_level(logging.INFO), device.use(device.Target.TRITON, kind):
        assert device.kind() == kind
        default = group_norm.choose_tile('gradient', 'bfloat16', 32, 1024, 64, 2)
        assert group_norm.choose_tile('gradient', 'float32', 32, 1024, 64, 2) == default
    assert [record.message for record in caplog.records] == [
        f'no measured tiles for {kind} (nvidia_a100_sxm4_80gb.jsonl): kernels take their default '
        'tiles'
    ]
    with device.use(device.Target.HOPPER, 'NVIDIA H200'):
        assert group_norm.choose_tile('gradient', 'bfloat16', 32, 1024, 64, 2) != default
        assert group_norm.choose_tile('gradient', 'float32', 32, 1024, 64, 2) == default
        assert group_norm.choose_tile('gradient', 'bfloat16', 32, 1024, 62, 2) == default


def test_update(folder: pathlib.Path) -> None:
    """A tile that is clearly faster replaces the one that is chosen now; others do not, nor does a
    tile that was timed without the chosen one.
    """
    kind, tile = 'Some GPU', group_norm.Tile
    default, fast, even, other = tile(), tile(channels=64), tile(channels=128), tile(rows=16)
    keys = [
        Key('group_norm/moments', 'bfloat16', group_norm.shape_class(2, pixels, 8))
        for pixels in (4, 16, 64)
    ]
    timed = {
        keys[0]: {default: 10.0, even: 9.9, fast: 9.0},
        keys[1]: {default: 10.0, even: 9.9},
        keys[2]: {fast: 1.0},
    }
    assert tile_table.update(kind, timed, dict.fromkeys(keys, default)).endswith(
        '2 tiles written, 1 of them faster than what was chosen'
    )
    found = tile_table.load(kind)
    assert [(key, tile(**entry.tile), entry.us) for key, entry in found.items()] == [
        (keys[0], fast, 9.0),
        (keys[1], default, 10.0),
    ]
    with device.use(device.Target.TRITON, kind):
        assert group_norm.choose_tile('moments', 'bfloat16', 2, 4, 8) == fast
    tile_table.update(
        kind,
        {keys[0]: {fast: 9.1, other: 8.9}, keys[1]: {default: 10.0, other: 5.0}},
        {keys[0]: fast, keys[1]: default},
    )
    assert [(tile(**entry.tile), entry.us) for entry in tile_table.load(kind).values()] == [
        (fast, 9.1),
        (other, 5.0),
    ]
    assert (folder / 'some_gpu.jsonl').read_text().count('\n') == 2


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (
            '{"kernel": "a"}\n',
            r"some_gpu.jsonl:1: expected kernel, dtype, .*'dtype'.*correct the line",
        ),
        (
            '{"kernel": "a", "dtype": "b", "shape": "c", "tile": {}, "us": null}\n' * 2,
            'some_gpu.jsonl:2: .*twice',
        ),
        ('no JSON\n', 'some_gpu.jsonl:1: expected'),
    ],
)
def test_mistakes(folder: pathlib.Path, text: str, message: str) -> None:
    (folder / 'some_gpu.jsonl').write_text(text)
    with pytest.raises(ValueError, match=message):
        tile_table.load('Some GPU')
