"""Reads JSON that may be damaged or hostile; shortens untrusted text for messages.

Limits on the text's size, on nesting and on the digits of a number bound the work. A message shows
only a few characters of a value, because values of a pickle may share parts and print without end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import typing
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

from jaxunet.runtime.errors import UserError, listed, printable
from jaxunet.runtime.file_errors import check_regular
from jaxunet.runtime.paths import why_missing

MAX_JSON = 64 * 2**20  # bytes of one text
MAX_DEPTH = 32  # nesting of objects and lists
LONGEST = 60  # characters of a value in a message
LFS_POINTER = b'version https://git-lfs.github.com/spec/'
UNFETCHED = 'a pointer of Git LFS in place of the file: run `git lfs pull` where it was cloned'
FLAT = 8  # most elements of a tuple or list that a message shows
NUMBER = int | float
KINDS = {
    'dict': 'a JSON object',
    'list': 'a list',
    'str': 'text',
    'int': 'a whole number',
    'bool': 'true or false',
    'int | float': 'a number',
}


def shown(value: object) -> str:
    """Returns a short text of a value for a message, in a time independent of the value's size."""
    if isinstance(value, str | bytes):
        return repr(value[:LONGEST]) + '...' * (len(value) > LONGEST)
    if isinstance(value, int) and value.bit_length() > 128:
        return f'a number of {value.bit_length()} bits'
    if value is None or isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list) and len(value) <= FLAT:
        inside = ', '.join(
            shown(v) if v is None or isinstance(v, int | float | str | bytes) else type(v).__name__
            for v in value
        )
        comma = ',' if len(value) == 1 else ''
        return f'[{inside}]' if isinstance(value, list) else f'({inside}{comma})'
    if isinstance(value, tuple | list | dict):
        return f'a {type(value).__name__} of {len(value)}'
    return f'a {type(value).__name__}'


def plain(text: object) -> str:
    """Returns a short text of a name for a message, like `shown` but without quotes."""
    return shown(text).replace("'", '').replace('"', '')


def check_fetched(start: bytes, path: str | os.PathLike[str]) -> None:
    """Checks that a file is not the pointer that a clone without Git LFS holds in its place.

    Args:
      start: its first bytes.
      path: begins the message.

    Raises:
      UserError: it is.
    """
    if start.startswith(LFS_POINTER):
        raise UserError(f'{path}: {UNFETCHED}')


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a weight file; its errors are `UserError`."""
    try:
        check_regular(path)
        with open(path, 'rb') as file:
            check_fetched(file.read(len(LFS_POINTER)), path)
            file.seek(0)
            yield file
    except FileNotFoundError:
        raise UserError(f'{path}: no such file{why_missing(path)}') from None
    except OSError as error:
        raise UserError(f'{path}: cannot be read: {error.strerror or error}') from None


def one_line(error: object) -> str:
    """Returns a library's error as one short line; the error itself may quote much of the file."""
    text = printable(str(error)) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + '...'


def parse_json(
    text: str | bytes, source: str, *, advice: str, kind: type = dict, finite: bool = True
) -> Any:
    """Returns the value of a JSON text; its numbers have at most 64 bits.

    Args:
      source: file and field; the error message begins with it.
      advice: what to do; ends the message.
      kind: expected type.
      finite: True to refuse NaN and infinities, which Python writes but JSON does not have.

    Raises:
      UserError: the text is not JSON or has another type, a number or text is outside of JSON's
        standard, or the text exceeds `MAX_JSON` bytes or `MAX_DEPTH` levels.
    """
    wanted = KINDS[kind.__name__]
    if len(text) > MAX_JSON:
        raise UserError(
            f'{source}: expected {wanted} of at most {MAX_JSON:,} bytes, found {len(text):,}; '
            f'{advice}'
        )
    try:
        value = (
            json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
            if finite
            else json.loads(text)
        )
        check_values(value)
    except RecursionError:
        reason = f'nested more than {MAX_DEPTH} deep'
    except ValueError as error:  # including JSONDecodeError and UnicodeError
        reason = str(error)
    else:
        if isinstance(value, kind):
            return value
        reason = f'it is {shown(value)}'
    found = shown(text if isinstance(text, str) else text.decode(errors='backslashreplace'))
    raise UserError(f'{source}: expected {wanted}, found {found} ({reason}); {advice}')


def read_limited(path: str | os.PathLike[str], limit: int, *, advice: str) -> bytes:
    """Returns the content of a file; the limit also holds for an endless device file.

    Raises:
      UserError: the file cannot be read, is a pipe, which could keep a reader waiting for ever, or
        has more than `limit` bytes.
    """
    try:
        if pathlib.Path(path).is_fifo():
            raise UserError(f'{path}: expected a file, found a pipe; {advice}')
        with pathlib.Path(path).open('rb') as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f'{path}: cannot be read: {error.strerror or error}; {advice}') from None
    if len(data) > limit:
        raise UserError(f'{path}: expected at most {limit:,} bytes, found more; {advice}')
    return data


def read_json(
    path: str | os.PathLike[str], *, advice: str, kind: type = dict, finite: bool = True
) -> Any:
    """Returns the value of a JSON file; see `parse_json`.

    Raises:
      UserError: the file cannot be read, or `parse_json` refuses it.
    """
    text = read_limited(path, MAX_JSON, advice=advice)
    return parse_json(text, str(path), advice=advice, kind=kind, finite=finite)


def check_fields(
    values: Mapping[str, object], fields: Mapping[str, Any], source: str, *, advice: str
) -> None:
    """Checks that an object has fields of these types; it may have further fields.

    Args:
      fields: name -> dict, list, str, int, bool, NUMBER or object, or a dict of the fields
        inside it. A name that ends in ? may be missing or null; the name * is for every other.
      source: file and line; the error message begins with it.
      advice: what to do; ends the message.

    Raises:
      UserError: a field is missing or of another type.
    """
    others = dict.fromkeys(values, fields['*']) if '*' in fields else {}
    for name, kind in (others | {k: v for k, v in fields.items() if k != '*'}).items():
        if name.endswith('?') and name not in others:
            name, kind = name[:-1], fields[name]  # noqa: PLW2901
            if values.get(name) is None:
                continue
        if name not in values:
            raise UserError(
                f'{source}: expected a field {name}, found '
                f'{listed([shown(key) for key in values]) or "none"}; {advice}'
            )
        value = values[name]
        inside, kind = (kind, dict) if isinstance(kind, Mapping) else ({}, kind)  # noqa: PLW2901
        if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, NUMBER)):
            wanted = KINDS[str(kind) if kind is NUMBER else kind.__name__]
            raise UserError(f'{source}: {name}: expected {wanted}, found {shown(value)}; {advice}')
        if inside:
            check_fields(typing.cast(dict, value), inside, f'{source}: {name}', advice=advice)


def is_pair(value: object) -> bool:
    """Returns True for a list of two numbers, such as quartiles."""
    return isinstance(value, list) and [type(v) in (int, float) for v in value] == [True, True]


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f'the number {text[:20]} is out of range')
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not a number of JSON')


def check_values(value: object) -> None:
    """Checks what `parse_json` says of numbers, texts and nesting, for values of any parser.

    Deeply nested values would exhaust the stack of code that walks over them later.

    Raises:
      RecursionError: nested more than `MAX_DEPTH` deep.
      ValueError: a number has more than 64 bits, or a text is not UTF-8.
    """
    todo = [(value, 1)]
    while todo:
        value, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise RecursionError
        if isinstance(value, dict):
            todo += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            todo += [(part, depth + 1) for part in value]
        elif isinstance(value, str) and not value.isascii():
            value.encode()
        elif isinstance(value, int) and value.bit_length() > 64:
            raise ValueError(f'a number has {value.bit_length()} bits')
