"""Reads the pickle in a torch file without Python's unpickler, and writes it without torch.

Reading never imports, calls or looks up anything that the file names (`jaxunet.runtime.pickles`);
errors name the byte.

Source: PyTorch, `torch/serialization.py` and `torch/_utils.py` (format of `torch.save`, version 3).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.pickles import Global, PickleReader, Refused, update
from jaxunet.runtime.untrusted import shown

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
MAX_PICKLE = 16 * 2**20  # bytes; a state dict of a thousand tensors needs 0.1 MB
MAX_NAME = 500  # characters of a tensor's name
MAX_DIMENSIONS = 8
# Limit of the elements of all tensors, per stored element: it allows views of shared storage, and
# refuses a small file that would expand to a huge one.
MAX_EXPANSION = 4


@dataclass(frozen=True)
class Storage:
    """`size` numbers of type `dtype` (see DTYPES) in the archive's entry `data/<key>`."""

    dtype: str
    key: str
    size: int

    @property
    def bytes(self) -> int:
        """Bytes of the numbers."""
        return self.size * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class TensorView:
    """A tensor inside a storage; offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, values: np.ndarray) -> np.ndarray:
        """Returns the tensor as a view of the storage's numbers.

        Raises:
          ValueError: `values` are not the whole storage; the view was checked to lie inside it.
        """
        if values.shape != (self.storage.size,):
            raise ValueError(f'expected {self.storage.size:,} numbers, found {values.shape}')
        # The stride of an axis of length 1 is never used, and may be any number.
        strides = tuple(
            step * values.itemsize if n > 1 else values.itemsize
            for n, step in zip(self.shape, self.stride, strict=True)
        )
        return np.lib.stride_tricks.as_strided(
            values[self.offset :], self.shape, strides, writeable=False
        )


class TorchPickle(PickleReader):
    """Reads pickles of `torch.save`: dicts, lists, tuples, text, numbers and `TensorView`s."""

    def __init__(self, format: str = 'a state dict', advice: str = STATE_DICT) -> None:
        super().__init__(format, advice)
        self._used: dict[int, object] = {}  # lists of items by id; keeps them alive

    def find(self, module: str, name: str) -> object:
        """Returns a `Global` for a type of storage or a function that builds tensors."""
        if f'{module}.{name}' in CALLS or (module == 'torch' and name in DTYPES):
            return Global(f'{module}.{name}')
        raise self.unknown_global(module, name)

    def call(self, function: object, arguments: tuple[object, ...]) -> object:
        """Returns an empty or filled dict, or a `TensorView`."""
        if type(function) is not Global or function.name not in CALLS:
            return super().call(function, arguments)
        if function.name == ORDERED_DICT and arguments:
            # A dict copies its items, so many dicts of the same list would fill the memory.
            if type(arguments[0]) is not list or id(arguments[0]) in self._used:
                raise Refused('expected a list of items of its own for each dict')
            self._used[id(arguments[0])] = arguments[0]
        return CALLS[function.name](*arguments)

    def build(self, target: object, state: object) -> None:
        """Ignores the modules' versions (`_metadata`) that torch adds to a state dict."""
        if type(target) is not dict:
            raise Refused('attributes are set on something that is not a dict')

    def persistent(self, reference: object) -> Storage:
        """Returns the storage of ("storage", type, key, location, size)."""
        if type(reference) is not tuple or len(reference) != 5 or reference[0] != 'storage':
            raise Refused(
                'expected a reference to a storage: ("storage", type, key, location, size)'
            )
        kind, key, size = reference[1], reference[2], reference[4]
        if type(kind) is not Global or kind.name.removeprefix('torch.') not in DTYPES:
            raise Refused('unknown type of storage')
        if type(key) is not str or len(key) > MAX_NAME or type(size) is not int:
            raise Refused(f'expected a storage with a name and a size, found {shown(reference)}')
        if not 0 <= size < 2**62:
            raise Refused(f'expected a storage with a size of 0 or more, found {shown(size)}')
        return Storage(DTYPES[kind.name.removeprefix('torch.')], key, size)


def load(data: bytes, source: str) -> object:
    """Returns a pickle's object: dicts, lists, tuples, text, numbers and `TensorView`s.

    Raises:
      UserError: the pickle is damaged, or uses an opcode or global that a state dict does not need;
        the message names it and its byte.
    """
    try:
        return TorchPickle().load(data)
    except Refused as error:
        raise UserError(f'{source}, byte {error.byte}: {error}') from None


def check_views(views: Mapping[Any, object], source: str) -> dict[str, TensorView]:
    """Checks that a dict holds only tensors with elements, and that a small file stays small.

    Returns:
      The dict.

    Raises:
      UserError: a value is not such a tensor, a tensor is larger than its storage, one storage has
        two sizes, or all tensors together are far larger than the storages.
    """
    checked: dict[str, TensorView] = {}
    storages: dict[str, Storage] = {}
    total = 0
    for name, view in views.items():
        if type(name) is str and (len(name) > MAX_NAME or not name.isprintable()):
            raise UserError(
                f'{source}: expected names of at most {MAX_NAME} printable characters, '
                f'found {shown(name)}'
            )
        if type(name) is not str or type(view) is not TensorView:
            kind = 'nothing' if view is None else f'a {type(view).__name__}'
            raise UserError(
                f'{source}: {shown(name)}: expected a tensor, found {kind}; {STATE_DICT}'
            )
        elements, stored = math.prod(view.shape), view.storage
        if not elements:
            raise UserError(
                f'{source}: {name}: expected a tensor with elements, found shape {view.shape}'
            )
        if elements > stored.size:
            raise UserError(
                f'{source}: {name}: shape {view.shape} has {elements:,} elements, '
                f'but only {stored.size:,} are stored'
            )
        if storages.setdefault(stored.key, stored) != stored:
            raise UserError(
                f'{source}: {name}: storage {shown(stored.key)} has {stored.size:,} numbers of '
                f'{stored.dtype} here and {storages[stored.key].size:,} of '
                f'{storages[stored.key].dtype} before; the file is damaged or malicious'
            )
        checked[name], total = view, total + elements
    stored_numbers = sum(storage.size for storage in storages.values())
    if total > MAX_EXPANSION * stored_numbers:
        raise UserError(
            f'{source}: the tensors have {total:,} elements, but only {stored_numbers:,} are '
            'stored; it is damaged or malicious'
        )
    return checked


def _ordered_dict(items: Iterable[Any] = ()) -> dict[object, object]:
    result: dict[object, object] = {}
    for pair in items:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Refused('expected pairs of a key and a value as the items of a dict')
        update(result, list(pair))
    return result


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, *_ignored: object
) -> TensorView:
    if (
        type(storage) is not Storage
        or type(shape) is not tuple
        or type(stride) is not tuple
        or len(shape) != len(stride)
    ):
        raise Refused('expected a tensor as (storage, offset, shape, stride)')
    if len(shape) > MAX_DIMENSIONS or any(
        type(n) is not int or not 0 <= n < 2**62 for n in (offset, *shape, *stride)
    ):
        raise Refused(
            f'tensor with impossible offset {shown(offset)}, shape {shown(shape)} or stride '
            f'{shown(stride)}'
        )
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


ORDERED_DICT = 'collections.OrderedDict'
CALLS: dict[str, Any] = {  # functions that a pickle may call; each checks its arguments
    ORDERED_DICT: _ordered_dict,
    'torch._utils._rebuild_tensor_v2': _rebuild_tensor,
    'torch._utils._rebuild_parameter': _rebuild_parameter,
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
