"""Damages to valid files, as hypothesis strategies."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import TypeAlias

from support.fuzzing import st

Contents = dict[str, bytes]
Json: TypeAlias = 'dict[str, Json] | list[Json] | str | float | bool | None'
# Numbers at the edges of the types that formats store.
EDGES = (0, 1, -1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63))
LETTERS = 'abZ09 _./-\n\0é世'  # any character would need hypothesis' tables of Unicode
PLACES = st.floats(0, 1, exclude_max=True)
KINDS = ('flip', 'cut', 'insert', 'splice', 'number', 'digits', 'drop')
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([*EDGES, 2**70, 1e308, 'NaN', '\ud800', '', 'x' * 10**4, float('inf')])
    | st.text(LETTERS, max_size=5),
    lambda inside: (
        st.lists(inside, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=3), inside)
    ),
    max_leaves=8,
)


@st.composite
def damages(draw: st.DrawFn) -> list[tuple]:
    """Draws up to three damages, each (kind, part, place, place, number, bytes, JSON)."""
    return [
        (
            draw(st.sampled_from((*KINDS, 'json', 'json'))),
            draw(st.none() | PLACES),
            draw(PLACES),
            draw(PLACES),
            draw(st.sampled_from(EDGES)),
            draw(st.binary(min_size=1, max_size=12)),
            draw(JSON),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]


def damage(contents: Contents, pack: Callable[[Contents], bytes], changes: list[tuple]) -> bytes:
    """Applies damages to the parts of a file; a damage whose part is None, to the packed file."""
    contents = dict(contents)
    late = []
    for change in changes:
        part = change[1]
        if part is None:
            late.append(change)
            continue
        name = list(contents)[int(part * len(contents))]
        if change[0] == 'drop' and len(contents) > 1:
            del contents[name]
        else:
            contents[name] = changed(contents[name], change)
    data = pack(contents)
    for change in late:
        data = changed(data, change)
    return data


def changed(data: bytes, change: tuple) -> bytes:
    kind, _, place, other, number, some, value = change
    at, to = int(place * len(data)), int(other * len(data))
    if kind == 'json' and data[:1] in (b'{', b'['):
        try:
            return json.dumps(replaced(json.loads(data), place, value)).encode()
        except ValueError:
            return data
    match kind:
        case 'cut':
            return data[:at] if number % 2 else data[:at] + data[to:]
        case 'insert':
            return data[:at] + some + data[at:]
        case 'splice':
            return data[:at] + data[to : to + 64] + data[at + 64 * (number % 2) :]
        case 'number':
            size, order = (4, 8)[number % 2], '<>'[len(some) % 2]
            packed = struct.pack(f'{order}q', max(min(number, 2**63 - 1), -(2**63)))
            packed = packed[:size] if order == '<' else packed[-size:]
            return data[:at] + packed + data[at + size :]
        case 'digits':  # the next digit becomes a long number
            while at < len(data) and not data[at : at + 1].isdigit():
                at += 1
            return data[:at] + str(number).encode() + data[at + 1 :]
        case _:
            flipped = bytes(a ^ b for a, b in zip(data[at : at + len(some)], some, strict=False))
            return data[:at] + flipped + data[at + len(flipped) :]


def replaced(tree: Json, place: float, value: Json) -> Json:
    """Returns a JSON value in which the value at one place is replaced or removed."""
    spots: list[tuple[dict | list, str | int]] = []
    todo = [tree]
    while todo:
        node = todo.pop()
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, inside in list(pairs):
            spots.append((node, key))
            if isinstance(inside, dict | list):
                todo.append(inside)
    if not spots:
        return value
    node, key = spots[int(place * len(spots))]
    if value is None and isinstance(node, dict):
        del node[key]
    else:
        node[key] = value
    return tree
