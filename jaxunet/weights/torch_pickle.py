"""Reads the pickle in a torch file without Python's unpickler, and writes it without torch.

A state dict needs about forty of pickle's opcodes and a few globals. The interpreter here knows
only those: it never imports, calls or looks up anything that the file names, and its errors name
the byte.

Source: PyTorch, `torch/serialization.py` and `torch/_utils.py` (format of `torch.save`, version 3);
Python, `pickletools`.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxunet.runtime.errors import UserError

# torch's storage type -> numpy type; 'bf16' has none.
DTYPES = {
    'FloatStorage': 'f4',
    'DoubleStorage': 'f8',
    'HalfStorage': 'f2',
    'BFloat16Storage': 'bf16',
    'LongStorage': 'i8',
    'IntStorage': 'i4',
    'ShortStorage': 'i2',
    'CharStorage': 'i1',
    'ByteStorage': 'u1',
}
ITEM_SIZES = {name: 2 if name == 'bf16' else int(name[1:]) for name in DTYPES.values()}
STATE_DICT = 'save only the tensors: torch.save(model.state_dict(), path)'
MAX_DIMENSIONS = 8

Stack = list[Any]
Memo = dict[int, object]  # number -> object that later opcodes refer to


@dataclass(frozen=True)
class Storage:
    """`size` numbers of type `dtype` (see DTYPES) in the archive's entry `data/<key>`."""

    dtype: str
    key: str
    size: int


@dataclass(frozen=True)
class TensorView:
    """A tensor inside a storage; offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True)
class _Mark:
    pass


MARK = _Mark()


class Refused(Exception):
    """An opcode that is not accepted; the caller adds where it is."""


def load(data: bytes, source: str) -> object:
    """Returns a pickle's object, of dicts, lists, tuples, text, numbers and `TensorView`s.

    Args:
      source: begins every message.

    Raises:
      UserError: a damaged pickle, or an opcode or global that a state dict does not need; the
        message names it and its byte.
    """
    stack: Stack = []
    memo: Memo = {}
    position = 0
    try:
        for opcode, argument, at in pickletools.genops(data):
            position = at or 0
            if opcode.name == 'STOP':
                if len(stack) != 1:
                    raise Refused(f'expected one object at the end, found {len(stack)}')
                return stack[0]
            step = OPCODES.get(opcode.name)
            if step is None:
                raise Refused(
                    f'opcode {opcode.name} is not allowed: a state dict does not need it; '
                    f'{STATE_DICT}'
                )
            step(stack, memo, argument)
    except Refused as error:
        raise UserError(f'{source}, byte {position}: {error}') from None
    except (
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        UnicodeError,
        RecursionError,
    ) as error:
        raise UserError(
            f'{source}, byte {position}: the pickle is damaged or truncated '
            f'({type(error).__name__}: {error})'
        ) from None
    raise UserError(f'{source}, byte {len(data)}: the pickle is truncated: it has no STOP')


def _popped_to_mark(stack: Stack) -> Stack:
    items: Stack = []
    while True:
        item = stack.pop()
        if item is MARK:
            return items[::-1]
        items.append(item)


def _update(target: object, items: Stack) -> None:
    if type(target) is not dict or len(items) % 2:
        raise Refused('items are set on something that is not a dict')
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Only plain keys, because hashing a deeply nested tuple can take forever.
        if type(key) not in (str, int):
            raise Refused(
                f'expected text or a number as the key of a dict, found {type(key).__name__}'
            )
        if key in target:
            raise Refused(f'the key {key!r} occurs twice')
        target[key] = value


def _on_marked(change: Callable[[object, Stack], None], stack: Stack) -> None:
    """Applies `change` to the object below the last mark, with the items above it."""
    items = _popped_to_mark(stack)
    change(stack[-1], items)


def _extend(target: object, items: Stack) -> None:
    if type(target) is not list:
        raise Refused('an item is appended to something that is not a list')
    target.extend(items)


def _find(name: object) -> _Global:
    module, _, attribute = str(name).rpartition(' ')
    if f'{module}.{attribute}' in CALLS or (module == 'torch' and attribute in DTYPES):
        return _Global(f'{module}.{attribute}')
    raise Refused(
        f'the global "{module}.{attribute}" is not allowed: such a file could run code when it is '
        f'loaded; {STATE_DICT}'
    )


def _find_on_stack(stack: Stack) -> _Global:
    attribute, module = stack.pop(), stack.pop()
    if type(attribute) is not str or type(module) is not str:
        raise Refused('the name of a global is not text')
    return _find(f'{module} {attribute}')


def _persistent(value: object) -> Storage:
    if type(value) is not tuple or len(value) != 5 or value[0] != 'storage':
        raise Refused('expected a reference to a storage: ("storage", type, key, location, size)')
    kind, key, size = value[1], value[2], value[4]
    if type(kind) is not _Global or not kind.name.endswith('Storage'):
        raise Refused('unknown type of storage')
    if type(key) is not str or type(size) is not int or size < 0:
        raise Refused(
            f'expected a storage with a name and a size of 0 or more, found {key!r} and {size!r}'
        )
    return Storage(DTYPES[kind.name.removeprefix('torch.')], key, size)


def _call(function: object, arguments: object) -> object:
    if type(function) is not _Global or function.name not in CALLS or type(arguments) is not tuple:
        raise Refused('found a call of something that is not a function of the format')
    return CALLS[function.name](*arguments)


def _ordered_dict(items: Iterable[Iterable[object]] = ()) -> dict[object, object]:
    result: dict[object, object] = {}
    for pair in items:
        _update(result, list(pair))
    return result


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, *_ignored: object
) -> TensorView:
    numbers = (offset, *shape, *stride)
    if (
        type(storage) is not Storage
        or type(shape) is not tuple
        or type(stride) is not tuple
        or len(shape) != len(stride)
    ):
        raise Refused('expected a tensor as (storage, offset, shape, stride)')
    if len(shape) > MAX_DIMENSIONS or any(
        type(n) is not int or not 0 <= n < 2**62 for n in numbers
    ):
        raise Refused(f'tensor with impossible offset {offset}, shape {shape} or stride {stride}')
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and last >= storage.size:
        raise Refused(
            f'tensor with offset {offset}, shape {shape} and stride {stride} ends at element '
            f'{last} of a storage of {storage.size} elements'
        )
    return TensorView(storage, offset, shape, stride)


def _rebuild_parameter(data: object, *_ignored: object) -> TensorView:
    if type(data) is not TensorView:
        raise Refused('expected a tensor in a parameter')
    return data


CALLS: dict[str, Callable[..., object]] = {
    'collections.OrderedDict': _ordered_dict,
    'torch._utils._rebuild_tensor_v2': _rebuild_tensor,
    'torch._utils._rebuild_parameter': _rebuild_parameter,
}


def _build(stack: Stack) -> None:
    # torch adds the modules' versions (`_metadata`) to a state dict; they are not needed.
    stack.pop()
    if type(stack[-1]) is not dict:
        raise Refused('attributes are set on something that is not a dict')


# (stack, memo, argument of the opcode) -> ignored
Step = Callable[[Stack, Memo, Any], object]
PUSH: Step = lambda stack, memo, value: stack.append(value)  # noqa: E731
STORE: Step = lambda stack, memo, key: memo.__setitem__(key, stack[-1])  # noqa: E731
FETCH: Step = lambda stack, memo, key: stack.append(memo[key])  # noqa: E731
SKIP: Step = lambda stack, memo, value: None  # noqa: E731


def _tuple_of(n: int) -> Step:
    return lambda stack, memo, value: stack.append(tuple(stack.pop() for _ in range(n))[::-1])


OPCODES: dict[str, Step] = {
    **dict.fromkeys(('PROTO', 'FRAME'), SKIP),
    **dict.fromkeys(
        ('BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT', 'BINUNICODE', 'SHORT_BINUNICODE'),
        PUSH,
    ),
    **dict.fromkeys(('BINPUT', 'LONG_BINPUT'), STORE),
    **dict.fromkeys(('BINGET', 'LONG_BINGET'), FETCH),
    'MEMOIZE': lambda stack, memo, value: memo.__setitem__(len(memo), stack[-1]),
    'NONE': lambda stack, memo, value: stack.append(None),
    'NEWTRUE': lambda stack, memo, value: stack.append(True),
    'NEWFALSE': lambda stack, memo, value: stack.append(False),
    'MARK': lambda stack, memo, value: stack.append(MARK),
    'EMPTY_DICT': lambda stack, memo, value: stack.append({}),
    'EMPTY_LIST': lambda stack, memo, value: stack.append([]),
    'EMPTY_TUPLE': lambda stack, memo, value: stack.append(()),
    'TUPLE1': _tuple_of(1),
    'TUPLE2': _tuple_of(2),
    'TUPLE3': _tuple_of(3),
    'TUPLE': lambda stack, memo, value: stack.append(tuple(_popped_to_mark(stack))),
    'SETITEM': lambda stack, memo, value: _update(stack[-3], [stack.pop(-2), stack.pop()]),
    'SETITEMS': lambda stack, memo, value: _on_marked(_update, stack),
    'APPEND': lambda stack, memo, value: _extend(stack[-2], [stack.pop()]),
    'APPENDS': lambda stack, memo, value: _on_marked(_extend, stack),
    'GLOBAL': lambda stack, memo, value: stack.append(_find(value)),
    'STACK_GLOBAL': lambda stack, memo, value: stack.append(_find_on_stack(stack)),
    'BINPERSID': lambda stack, memo, value: stack.append(_persistent(stack.pop())),
    'REDUCE': lambda stack, memo, value: stack.append(_call(stack.pop(-2), stack.pop())),
    'BUILD': lambda stack, memo, value: _build(stack),
}


def dump(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Returns the pickle of a state dict of contiguous float32 tensors.

    Args:
      shapes: name -> shape; the i-th tensor's storage is `data/<i>`.
    """
    parts = [b'\x80\x02ccollections\nOrderedDict\n)R(']
    for key, (name, shape) in enumerate(shapes.items()):
        stride, size = [], 1
        for n in reversed(shape):
            stride.append(size)
            size *= n
        storage = (
            b'('
            + _text('storage')
            + b'ctorch\nFloatStorage\n'
            + _text(str(key))
            + _text('cpu')
            + _integer(size)
            + b'tQ'
        )
        layout = _integer(0) + _integers(shape) + _integers(reversed(stride))
        arguments = storage + layout + b'\x89' + b'ccollections\nOrderedDict\n)R'
        parts.append(_text(name) + b'ctorch._utils\n_rebuild_tensor_v2\n(' + arguments + b'tR')
    return b''.join([*parts, b'u.'])


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b'X' + struct.pack('<I', len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if value < 2**31:
        return b'J' + struct.pack('<i', value)
    encoded = value.to_bytes(8, 'little', signed=True)
    return b'\x8a' + bytes([len(encoded)]) + encoded


def _integers(values: Iterable[int]) -> bytes:
    return b'(' + b''.join(_integer(v) for v in values) + b't'
