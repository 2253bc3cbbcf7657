"""Measured tiles: `tiles/<device>.jsonl`, one line per kernel, type and shape.

    {"kernel": "attention/forward", "dtype": "bfloat16", "shape": "256 tokens, 32 wide",
     "tile": {"queries": 128, ...}, "us": 10.2}

The tuning programs write the lines. `us` is the GPU time of one call, in microseconds, or null
where it was not measured. Each kernel names its shape classes, and has a rule or a cost model that
gives a tile for shapes, types and devices without a line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxunet.runtime import device
from jaxunet.runtime.whole_files import replacing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOLDER = pathlib.Path(__file__).parent / 'tiles'
# A tile replaces the one in the table if its time is at most this share of that tile's time.
# Smaller gains are within the noise between runs.
FASTER = 0.97
T = TypeVar('T')
Tile = TypeVar('Tile', bound='DataclassInstance')


class Key(NamedTuple):
    """The kernel, type and shape class of a line."""

    kernel: str
    dtype: str
    shape: str


class Entry(NamedTuple):
    """The fields of a tile, and the microseconds of a call with it; None if not measured."""

    tile: dict[str, int]
    us: float | None


def path(kind: str) -> pathlib.Path:
    """Returns the file for the tiles of a kind of device; it may not exist."""
    return FOLDER / f'{re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")}.jsonl'


@functools.cache
def load(kind: str) -> Mapping[Key, Entry]:
    """Returns the table of a kind of device; empty, with a line in the log, if it has none.

    Raises:
      ValueError: a line is not an entry, or its key occurs twice.
    """
    file = path(kind)
    if not file.exists():
        logging.getLogger(__name__).info(
            'no measured tiles for %s (%s): kernels take their default tiles', kind, file.name
        )
        return {}
    entries: dict[Key, Entry] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            key, entry = (
                Key(row['kernel'], row['dtype'], row['shape']),
                Entry(dict(row['tile']), row['us']),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{file}:{number}: expected kernel, dtype, shape, tile and us, '
                f'found {line[:80]!r} ({error}); correct the line'
            ) from None
        if key in entries:
            raise ValueError(f'{file}:{number}: {key} is there twice; remove one of the lines')
        entries[key] = entry
    return entries


def _entry(kernel: str, dtype: DTypeLike, shape: str) -> Entry | None:
    return load(device.kind()).get(Key(kernel, jnp.dtype(dtype).name, shape))


def measured(make: type[T], kernel: str, dtype: DTypeLike, shape: str) -> T | None:
    """Returns the tile from the table of this process's device, built by `make`, or None."""
    entry = _entry(kernel, dtype, shape)
    return None if entry is None else make(**entry.tile)


def time(kernel: str, dtype: DTypeLike, shape: str) -> float | None:
    """Returns the microseconds of the tile that `measured` returns; None if they are not known."""
    entry = _entry(kernel, dtype, shape)
    return None if entry is None else entry.us


def update(kind: str, timed: Mapping[Key, Mapping[Tile, float]], chosen: Mapping[Key, Tile]) -> str:
    """Puts tiles into a device's table.

    Each key gets the fastest tile if its time is at most `FASTER` times that of the tile chosen
    now; otherwise it keeps the latter.

    Args:
      timed: microseconds of each tile, a dataclass, that was timed for a key.
      chosen: the tile that the kernels currently take for a key. A key whose chosen tile was not
        timed stays as it is.

    Returns: a sentence about what changed.
    """
    table = dict(load(kind))
    changed = written = 0
    for key, times in timed.items():
        if chosen[key] in times:
            best = min(times, key=lambda tile: times[tile])
            best = best if times[best] <= FASTER * times[chosen[key]] else chosen[key]
            changed, written = changed + (best != chosen[key]), written + 1
            table[key] = Entry(dataclasses.asdict(best), round(times[best], 2))
    save(kind, table)
    return f'{path(kind)}: {written} tiles written, {changed} of them faster than what was chosen'


def save(kind: str, table: Mapping[Key, Entry]) -> None:
    """Writes a device's table, sorted by key."""
    lines = [
        json.dumps({**key._asdict(), **entry._asdict()})
        for key, entry in sorted(table.items(), key=lambda item: natural(item[0]))
    ]
    with replacing(path(kind)) as partial:
        partial.write_text('\n'.join(lines) + '\n')
    load.cache_clear()


def natural(key: Key) -> list[tuple[str, int]]:
    """Returns a key for sorting that orders numbers by value."""
    return [
        (text, int(number or 0)) for text, number in re.findall(r'([^0-9]*)([0-9]*)', ' '.join(key))
    ]
