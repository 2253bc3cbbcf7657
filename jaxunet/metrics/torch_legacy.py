"""Reads state dicts that `torch.save` wrote before PyTorch 1.6, without torch or executing code.

The file is a sequence of pickles: a magic number, the protocol, the machine's byte order and sizes,
the state dict (tensors refer to storages by key), and the list of keys. Then, for each key in that
order, follow an int64 count and the numbers. pytorch-fid's published weights are such a file.
Source: PyTorch, `torch/serialization.py`, `_legacy_save`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from jaxunet.runtime.errors import UserError
from jaxunet.weights.torch_pickle import (
    ITEM_SIZES,
    OPCODES,
    STATE_DICT,
    Memo,
    Refused,
    Stack,
    TensorView,
)

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
START = b'\x80\x02'


def read_legacy(path: str, file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns the tensors of a state dict by name, as float32.

    Args:
      path: the file's name, for messages.
      file: the open file, read from its start.

    Raises:
      UserError: another kind of file, a damaged one, or one that holds more than tensors.
    """
    size = file.seek(0, 2)
    file.seek(0)
    pickles = _pickles(path, file)
    magic, protocol, machine, tree, keys = (next(pickles) for _ in range(5))
    if magic != MAGIC or protocol != PROTOCOL or not isinstance(machine, dict):
        raise UserError(
            f'{path}: expected a file of torch.save, found a pickle that does not start as one; '
            f'{STATE_DICT}'
        )
    if machine.get('little_endian') is not True:
        raise UserError(
            f'{path}: little_endian: expected True, found {machine.get("little_endian")!r}; '
            'save it on another machine'
        )
    views = _state_dict(path, tree)
    storages = {view.storage.key: view.storage for view in views.values()}
    if not isinstance(keys, list) or sorted(storages) != sorted(map(str, keys)):
        raise UserError(
            f'{path}: the list of storages is not that of the tensors; the file is damaged'
        )
    numbers = {}
    for key in keys:
        storage = storages[key]
        count = int.from_bytes(file.read(8), 'little')
        wanted = storage.size * ITEM_SIZES[storage.dtype]
        if count != storage.size or file.tell() + wanted > size:
            raise UserError(
                f'{path}, byte {file.tell()}: storage {key}: expected {storage.size:,} numbers; '
                'the file is truncated'
            )
        if storage.dtype == 'bf16':
            raise UserError(
                f'{path}: storage {key}: expected plain numbers, found bfloat16; '
                'save them as float32'
            )
        numbers[key] = np.frombuffer(file.read(wanted), f'<{storage.dtype}')
    return {name: _tensor(view, numbers[view.storage.key]) for name, view in views.items()}


def _tensor(view: TensorView, values: np.ndarray) -> np.ndarray:
    # The pickle's reader checked that the view lies inside its storage.
    strides = tuple(step * values.itemsize for step in view.stride)
    return np.ascontiguousarray(
        np.lib.stride_tricks.as_strided(
            values[view.offset :], view.shape, strides, writeable=False
        ),
        np.float32,
    )


def _state_dict(path: str, tree: object) -> dict[str, TensorView]:
    if not isinstance(tree, dict) or not tree:
        raise UserError(
            f'{path}: expected a dict of tensors (a state dict), found a {type(tree).__name__}; '
            f'{STATE_DICT}'
        )
    for name, view in tree.items():
        if not isinstance(name, str) or not isinstance(view, TensorView):
            raise UserError(
                f'{path}: {name!r}: expected a tensor, found a {type(view).__name__}; {STATE_DICT}'
            )
        elements = int(np.prod(view.shape, dtype=np.float64))
        if elements == 0 or elements > view.storage.size:
            raise UserError(
                f'{path}: {name}: shape {view.shape} does not fit its '
                f'{view.storage.size:,} stored numbers'
            )
    return tree


def _pickles(path: str, file: BinaryIO) -> Iterator[Any]:
    """Yields the objects of consecutive pickles."""
    while True:
        stack: Stack = []
        memo: Memo = {}
        position = begin = file.tell()
        try:
            for opcode, argument, at in pickletools.genops(file):
                position = at if at is not None else begin
                if opcode.name == 'STOP':
                    break
                if opcode.name not in OPCODES:
                    raise Refused(
                        f'opcode {opcode.name} is not allowed: a state dict does not need it; '
                        f'{STATE_DICT}'
                    )
                if opcode.name == 'BINPERSID':
                    _plain_storage(stack)
                OPCODES[opcode.name](stack, memo, argument)
            (value,) = stack
        except Refused as error:
            raise UserError(f'{path}, byte {position}: {error}') from None
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
                f'{path}, byte {position}: the file is damaged or truncated '
                f'({type(error).__name__}: {error})'
            ) from None
        yield value


def _plain_storage(stack: Stack) -> None:
    """Drops the sixth part of a storage reference, which must be None.

    It named a view of another storage; torch has not written one since 0.4.
    """
    reference = stack[-1]
    if not isinstance(reference, tuple) or len(reference) != 6 or reference[5] is not None:
        raise Refused('expected a reference to a storage that is not a view of another')
    stack[-1] = reference[:5]
