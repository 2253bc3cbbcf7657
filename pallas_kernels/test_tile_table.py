"""The tables of measured tiles: their tiles are chosen and valid, other shapes get a default, and
tuning updates the tables.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import pytest

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.runtime import device
from pallas_kernels import tile_table
from pallas_kernels.conv3x3 import hopper, hopper_weight_gradient
from pallas_kernels.conv3x3.hopper_weight_gradient_plan import Tile
from pallas_kernels.tile_table import Entry, Key

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WEIGHT_GRADIENT = 'conv3x3/hopper_weight_gradient'
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
    image, convolution, *options = key.shape.split(', ')
    parts, features = (numbers(text) for text in convolution.split(' to '))
    inputs, dy = tuple(array(*numbers(image), c) for c in parts), array(*numbers(image), *features)
    if 'weight' in key.kernel:
        tile = hopper_weight_gradient.choose_tile(inputs, dy)
        assert hopper_weight_gradient.supports(inputs, dy, tile) is None
        return tile, hopper_weight_gradient.shape_class(inputs, dy)
    flipped, affine, residual, shortcut = 'flipped' in options, None, None, None
    ends = (*features, sum(parts)) if flipped else (sum(parts), *features)
    for option in options:
        if option == 'activated':
            affine = (array(numbers(image)[0], sum(parts), dtype='float32'),) * 2
        elif 'added' in option or 'projected' in option:
            residual = Activation(tuple(array(*numbers(image), c) for c in numbers(option)))
            if 'projected' in option:
                shortcut = array(sum(numbers(option)), *features)
    conv = Convolution(
        image=Activation(inputs),
        kernel=array(3, 3, *ends),
        shift=array(1, *features, dtype='float32'),
        residual=residual,
        shortcut=shortcut,
    )
    call = hopper.Call(conv, affine, flipped)
    tile = hopper.choose_tile(call)
    assert hopper.supports(call, tile) is None
    return tile, hopper.shape_class(call)


def test_committed_tables() -> None:
    """Every file belongs to a known device and is sorted as `save` writes it."""
    assert {path.name for path in tile_table.FOLDER.iterdir()} == set(KINDS.values())
    for kind, name in KINDS.items():
        path = tile_table.path(kind)
        assert path.name == name
        found = list(tile_table.load(kind))
        assert found == sorted(found, key=tile_table.natural)
        kernels = {key.kernel for key in found}
        assert kernels == {'conv3x3/hopper', WEIGHT_GRADIENT}


@pytest.mark.parametrize(
    ('kind', 'key', 'entry'), ROWS, ids=lambda v: '-'.join(v) if isinstance(v, Key) else ''
)
def test_a_tile_of_the_table_is_chosen_and_valid(kind: str, key: Key, entry: Entry) -> None:
    with device.use(device.Target.HOPPER, kind):
        tile, shape = chosen(key)
    assert shape == key.shape
    assert tile == type(tile)(**entry.tile)
    assert entry.us is None or 0 < entry.us < 1e5


def of(
    batch: int, dtype: str = 'bfloat16'
) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """The parts and dy of a weight gradient."""
    x = jax.ShapeDtypeStruct((batch, 8, 8, 256), dtype)
    return [x], x


@pytest.mark.usefixtures('folder')
def test_another_device_takes_defaults(caplog: pytest.LogCaptureFixture) -> None:
    """It says so."""
    kind = 'NVIDIA H100 80GB HBM3'
    fast = Tile(8, 2, 3)
    shape = hopper_weight_gradient.shape_class(*of(1))
    tile_table.save(
        'NVIDIA H200',
        {Key(WEIGHT_GRADIENT, 'bfloat16', shape): Entry(dataclasses.asdict(fast), 1.0)},
    )
    with device.use(device.Target.HOPPER, 'NVIDIA H200'):
        assert hopper_weight_gradient.choose_tile(*of(1)) == fast
        default = hopper_weight_gradient.default_tile(*of(1))
        for other in (of(2), of(1, 'float16')):
            found = hopper_weight_gradient.choose_tile(*other)
            assert found == hopper_weight_gradient.default_tile(*other)
    with caplog.at_level(logging.INFO), device.use(device.Target.HOPPER, kind):
        assert hopper_weight_gradient.choose_tile(*of(1)) == default != fast
    assert [record.message for record in caplog.records] == [
        f'no measured tiles for {kind} (nvidia_h100_80gb_hbm3.jsonl): kernels take their default '
        'tiles'
    ]


def test_update(folder: pathlib.Path) -> None:
    """A tile that is clearly faster replaces the one that is chosen now; others do not, nor does a
    tile that was timed without the chosen one.
    """
    kind = 'Some GPU'
    default, fast, even, other = (Tile(8, 2, 1, taps=taps) for taps in (9, 3, 6, 1))
    keys = [
        Key(WEIGHT_GRADIENT, 'bfloat16', hopper_weight_gradient.shape_class(*of(batch)))
        for batch in (1, 2, 4)
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
    assert [(key, Tile(**entry.tile), entry.us) for key, entry in found.items()] == [
        (keys[0], fast, 9.0),
        (keys[1], default, 10.0),
    ]
    with device.use(device.Target.HOPPER, kind):
        assert hopper_weight_gradient.choose_tile(*of(1)) == fast
    tile_table.update(
        kind,
        {keys[0]: {fast: 9.1, other: 8.9}, keys[1]: {default: 10.0, other: 5.0}},
        {keys[0]: fast, keys[1]: default},
    )
    assert [(Tile(**entry.tile), entry.us) for entry in tile_table.load(kind).values()] == [
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
