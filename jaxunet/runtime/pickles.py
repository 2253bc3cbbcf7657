"""Reads pickles without Python's unpickler: nothing that a file names is imported or called.

A format needs about forty of pickle's opcodes and a few names; `PickleReader` interprets those
opcodes, and a subclass for each format knows its names. The work is bounded by the pickle's length.
A pickle may refer to one object from many places, so that a tuple of 60 levels has 2^60 leaves.
Therefore nothing here walks over such an object, and only text and numbers may be keys of a dict.

Source: Python, `pickletools`.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from jaxunet.runtime.untrusted import plain, shown

MAX_OPCODES = 2**21  # a state dict needs about 40 for each tensor
MAX_ARGUMENTS = 16  # per call

Stack = list[object]
Memo = dict[int, object]  # number -> object that later opcodes refer to


@dataclass(frozen=True)
class Global:
    """A name that the format knows; it stands for no Python object."""

    name: str


class Refused(Exception):
    """Raised for a pickle that is damaged, or uses something that its format does not have.

    Fields:
      byte: place of the error in the pickle; -1 until `PickleReader.load` sets it.
    """

    def __init__(self, reason: str, byte: int = -1) -> None:
        super().__init__(reason)
        self.byte = byte


class _Mark:
    pass


MARK = _Mark()


class PickleReader:
    """Interprets pickles. A method that a format does not override raises `Refused`.

    Args:
      format: the format's name in messages, such as "a state dict".
      advice: what to do; ends the messages about refused opcodes and names.

    Attributes:
      MORE_OPCODES: opcodes that only this format needs, as `OPCODES`.
    """

    MORE_OPCODES: ClassVar[Mapping[str, Step]] = {}

    def __init__(self, format: str, advice: str) -> None:
        self.format, self.advice = format, advice

    def find(self, module: str, name: str) -> object:
        """Returns the object for a global. Raises Refused: the format does not have this global."""
        raise self.unknown_global(module, name)

    def unknown_global(self, module: str, name: str) -> Refused:
        """Returns the error for a global that the format does not have."""
        return Refused(
            f'the global "{plain(f"{module}.{name}")}" is not allowed: such a file could run code '
            f'when it is loaded; {self.advice}'
        )

    def call(self, function: object, arguments: tuple[object, ...]) -> object:
        """Returns the result of a call of what `find` returned. Raises Refused: no such call."""
        raise Refused('found a call of something that is not a function of the format')

    def create(self, kind: object) -> object:
        """Returns a new object of a class that `find` returned. Raises Refused: no such class."""
        raise Refused(f'found an object of a class that {self.format} does not have')

    def build(self, target: object, state: object) -> None:
        """Sets the attributes of an object. Raises Refused: it has none."""
        raise Refused(f'attributes are set on something that {self.format} does not have')

    def persistent(self, reference: object) -> object:
        """Returns the object for a reference outside the pickle. Raises Refused: it is unknown."""
        raise Refused(f'refers to objects outside the file, which {self.format} does not')

    def load(self, pickle: bytes | BinaryIO) -> object:
        """Returns the object of a pickle; leaves a file's position just after the pickle.

        Raises:
          Refused: the pickle is refused; `byte` counts from the start of `pickle`.
        """
        file = io.BytesIO(pickle) if isinstance(pickle, bytes) else pickle
        stack: Stack = []
        memo: Memo = {}
        start = position = file.tell()
        try:
            for count, (opcode, argument, at) in enumerate(pickletools.genops(file)):
                position = start if at is None else at
                if opcode.name == 'STOP':
                    if len(stack) != 1:
                        raise Refused(f'expected one object at the end, found {len(stack)}')
                    return stack[0]
                if count == MAX_OPCODES:
                    raise Refused(f'more than {MAX_OPCODES:,} opcodes; {self.advice}')
                step = OPCODES.get(opcode.name) or self.MORE_OPCODES.get(opcode.name)
                if step is None:
                    raise Refused(
                        f'opcode {opcode.name} is not allowed: {self.format} does not need it; '
                        f'{self.advice}'
                    )
                step(self, stack, memo, argument)
        except Refused as error:
            raise Refused(str(error), position) from None
        except (LookupError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
            # pickletools and the steps raise these exceptions for a damaged pickle.
            reason = str(error)
            raise Refused(
                'the pickle is damaged or truncated '
                f'({type(error).__name__}: {reason[:200]}{"..." * (len(reason) > 200)})',
                position,
            ) from None
        raise Refused('the pickle is truncated: it has no STOP', file.tell())


def _popped_to_mark(stack: Stack) -> Stack:
    items: Stack = []
    while True:
        item = stack.pop()
        if item is MARK:
            return items[::-1]
        items.append(item)


def update(target: object, items: Stack) -> None:
    """Sets items (key, value, key, value, ...) of a dict.

    Raises:
      Refused: the target is not a dict, or a key is neither text nor a whole number, or occurs
        twice.
    """
    if type(target) is not dict or len(items) % 2:
        raise Refused('items are set on something that is not a dict')
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Only text and numbers, because hashing a deeply nested tuple can take forever.
        if type(key) not in (str, int, bytes):
            raise Refused(
                f'expected text or a number as the key of a dict, found {type(key).__name__}'
            )
        if key in target:
            raise Refused(f'the key {shown(key)} occurs twice')
        target[key] = value


def _extend(target: object, items: Stack) -> None:
    if type(target) is not list:
        raise Refused('an item is appended to something that is not a list')
    target.extend(items)


def _on_marked(change: Callable[[object, Stack], None], stack: Stack) -> None:
    """Applies `change` to the object below the last mark, with the items above it."""
    items = _popped_to_mark(stack)
    change(stack[-1], items)


def _find_on_stack(reader: PickleReader, stack: Stack) -> object:
    name, module = stack.pop(), stack.pop()
    if type(name) is not str or type(module) is not str:
        raise Refused('the name of a global is not text')
    return reader.find(module, name)


def _call(reader: PickleReader, stack: Stack) -> object:
    arguments, function = stack.pop(), stack.pop()
    if type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
        raise Refused(f'expected a call with at most {MAX_ARGUMENTS} arguments')
    return reader.call(function, arguments)


def _create(reader: PickleReader, stack: Stack) -> object:
    arguments, kind = stack.pop(), stack.pop()
    if type(arguments) is not tuple or arguments:
        raise Refused('expected an object without arguments')
    return reader.create(kind)


def _build(reader: PickleReader, stack: Stack) -> None:
    state = stack.pop()
    reader.build(stack[-1], state)


def _tuple_of(n: int) -> Step:
    return lambda reader, stack, memo, value: stack.append(
        tuple(stack.pop() for _ in range(n))[::-1]
    )


# (reader, stack, memo, argument of the opcode) -> ignored
Step = Callable[[PickleReader, Stack, Memo, Any], object]
PUSH: Step = lambda reader, stack, memo, value: stack.append(value)  # noqa: E731
PUSH_BYTES: Step = lambda reader, stack, memo, value: stack.append(value.encode('latin-1'))  # noqa: E731
STORE: Step = lambda reader, stack, memo, key: memo.__setitem__(key, stack[-1])  # noqa: E731
FETCH: Step = lambda reader, stack, memo, key: stack.append(memo[key])  # noqa: E731
SKIP: Step = lambda reader, stack, memo, value: None  # noqa: E731

OPCODES: dict[str, Step] = {
    **dict.fromkeys(('PROTO', 'FRAME'), SKIP),
    **dict.fromkeys(
        ('BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT', 'BINUNICODE', 'SHORT_BINUNICODE'),
        PUSH,
    ),
    **dict.fromkeys(('BINBYTES', 'SHORT_BINBYTES'), PUSH),
    **dict.fromkeys(('BINSTRING', 'SHORT_BINSTRING'), PUSH_BYTES),  # Python 2's bytes
    **dict.fromkeys(('BINPUT', 'LONG_BINPUT'), STORE),
    **dict.fromkeys(('BINGET', 'LONG_BINGET'), FETCH),
    'MEMOIZE': lambda reader, stack, memo, value: memo.__setitem__(len(memo), stack[-1]),
    'NONE': lambda reader, stack, memo, value: stack.append(None),
    'NEWTRUE': lambda reader, stack, memo, value: stack.append(True),
    'NEWFALSE': lambda reader, stack, memo, value: stack.append(False),
    'MARK': lambda reader, stack, memo, value: stack.append(MARK),
    'EMPTY_DICT': lambda reader, stack, memo, value: stack.append({}),
    'EMPTY_LIST': lambda reader, stack, memo, value: stack.append([]),
    'EMPTY_TUPLE': lambda reader, stack, memo, value: stack.append(()),
    'TUPLE1': _tuple_of(1),
    'TUPLE2': _tuple_of(2),
    'TUPLE3': _tuple_of(3),
    'TUPLE': lambda reader, stack, memo, value: stack.append(tuple(_popped_to_mark(stack))),
    'SETITEM': lambda reader, stack, memo, value: update(stack[-3], [stack.pop(-2), stack.pop()]),
    'SETITEMS': lambda reader, stack, memo, value: _on_marked(update, stack),
    'APPEND': lambda reader, stack, memo, value: _extend(stack[-2], [stack.pop()]),
    'APPENDS': lambda reader, stack, memo, value: _on_marked(_extend, stack),
    'GLOBAL': lambda reader, stack, memo, value: stack.append(
        reader.find(*str(value).rpartition(' ')[::2])
    ),
    'STACK_GLOBAL': lambda reader, stack, memo, value: stack.append(_find_on_stack(reader, stack)),
    'BINPERSID': lambda reader, stack, memo, value: stack.append(reader.persistent(stack.pop())),
    'REDUCE': lambda reader, stack, memo, value: stack.append(_call(reader, stack)),
    'NEWOBJ': lambda reader, stack, memo, value: stack.append(_create(reader, stack)),
    'BUILD': lambda reader, stack, memo, value: _build(reader, stack),
}
