"""Reads state dicts that `torch.save` wrote before PyTorch 1.6, without torch or executing code.

The file is a sequence of pickles: a magic number, the protocol, the machine's byte order and sizes,
the state dict (tensors refer to storages by key), and the list of keys. For each key, in this
order, an int64 count and the numbers follow. pytorch-fid's published weights are such a file.
Source: PyTorch, `torch/serialization.py`, `_legacy_save`.
"""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.pickles import Refused
from jaxunet.runtime.untrusted import shown
from jaxunet.weights.torch_pickle import MAX_PICKLE, STATE_DICT, Storage, TorchPickle, check_views

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
START = b'\x80\x02'


def read_legacy(path: str, file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns the tensors of a state dict by name, as float32.

    Args:
      path: the file's name, for messages.
      file: the open file, read from its start.

    Raises:
      UserError: the file is damaged, of another kind, or holds more than tensors.
    """
    size = file.seek(0, 2)
    file.seek(0)
    head = io.BytesIO(file.read(MAX_PICKLE))
    try:
        magic, protocol, machine, tree, keys = (_Legacy().load(head) for _ in range(5))
    except Refused as error:
        raise UserError(f'{path}, byte {error.byte}: {error}') from None
    _check_head(path, magic, protocol, machine)
    if not isinstance(tree, dict) or not tree:
        raise UserError(
            f'{path}: expected a dict of tensors (a state dict), found a {type(tree).__name__}; '
            f'{STATE_DICT}'
        )
    views = check_views(tree, path)
    storages = {view.storage.key: view.storage for view in views.values()}
    if (
        not isinstance(keys, list)
        or not all(type(key) is str for key in keys)
        or sorted(storages) != sorted(keys)
    ):
        raise UserError(
            f'{path}: the list of storages is not that of the tensors; the file is damaged'
        )
    file.seek(head.tell())
    numbers = {key: _read_storage(path, file, storages[key], size) for key in keys}
    with np.errstate(over='ignore', invalid='ignore'):  # `from_state` refuses infinities and NaN
        return {
            name: np.ascontiguousarray(view.of(numbers[view.storage.key]), np.float32)
            for name, view in views.items()
        }


def _check_head(path: str, magic: object, protocol: object, machine: object) -> None:
    """Checks by the first three pickles that a little-endian machine wrote this format.

    Raises:
      UserError: the file has another format or byte order.
    """
    if magic != MAGIC or protocol != PROTOCOL or not isinstance(machine, dict):
        raise UserError(
            f'{path}: expected a file of torch.save, found a pickle that does not start as one; '
            f'{STATE_DICT}'
        )
    if machine.get('little_endian') is not True:
        raise UserError(
            f'{path}: little_endian: expected True, found {shown(machine.get("little_endian"))}; '
            'save it on another machine'
        )


def _read_storage(path: str, file: BinaryIO, storage: Storage, size: int) -> np.ndarray:
    """Reads the numbers of the next storage, in its own type.

    Args:
      size: size of the file in bytes.

    Raises:
      UserError: the count differs from that of the tensors, or the numbers are bfloat16.
    """
    count = int.from_bytes(file.read(8), 'little')
    if count != storage.size or file.tell() + storage.bytes > size:
        raise UserError(
            f'{path}, byte {file.tell()}: storage {storage.key}: expected {storage.size:,} '
            'numbers; the file is truncated'
        )
    if storage.dtype == 'bf16':
        raise UserError(
            f'{path}: storage {storage.key}: expected plain numbers, found bfloat16; '
            'save them as float32'
        )
    return np.frombuffer(file.read(storage.bytes), f'<{storage.dtype}')


class _Legacy(TorchPickle):
    def persistent(self, reference: object) -> Storage:
        """Drops the sixth part of a storage reference, which must be None.

        In files of torch before 0.4 it may name a view of another storage.
        """
        if type(reference) is not tuple or len(reference) != 6 or reference[5] is not None:
            raise Refused('expected a reference to a storage that is not a view of another')
        return super().persistent(reference[:5])
