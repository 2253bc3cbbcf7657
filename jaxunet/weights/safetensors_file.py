"""Reads and writes `.safetensors` with the safetensors library; adds checks and clear messages."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import BinaryIO, TypedDict

import numpy as np
import safetensors

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import check_fields, one_line, parse_json, shown
from jaxunet.weights.names import check_finite
from jaxunet.weights.torch_pickle import MAX_NAME

# Type in the header -> numpy type.
DTYPES = {
    'F64': '<f8',
    'F32': '<f4',
    'F16': '<f2',
    'BF16': '<u2',
    'I64': '<i8',
    'I32': '<i4',
    'I16': '<i2',
    'I8': '<i1',
    'U8': '<u1',
}
RESAVE = 'write the file again with the safetensors library'
LENGTH = 8  # bytes of the JSON header's length


class _TensorEntry(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # bytes after the header


class SafetensorsFile:
    """The tensors of a file: shapes and metadata are read at once, tensors on demand.

    Args:
      path: the file's name, which messages show and the library opens.
      file: the open file.

    Attributes:
      shapes: name -> shape.
      metadata: the texts stored beside the tensors.
      note: always '', because a file holds one set of weights.

    Raises:
      UserError: the file is damaged, of another kind, or has tensors that are not numbers; the
        message names field and byte. Methods raise it too.
    """

    note = ''

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._start, self.metadata, self._entries = _check(path, file)
        for name, entry in self._entries.items():
            if entry['dtype'] not in DTYPES:
                raise UserError(
                    f'{path}: {name}: dtype: expected one of {", ".join(DTYPES)}, '
                    f'found {entry["dtype"]}'
                )
            if 0 in entry['shape']:
                raise UserError(
                    f'{path}: {name}: expected a tensor with elements, '
                    f'found shape {tuple(entry["shape"])}'
                )
        self.shapes = {name: tuple(entry['shape']) for name, entry in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32.

        Raises:
          UserError: a number that is not finite.
        """
        entry = self._entries[name]
        begin, end = entry['data_offsets']
        self._file.seek(self._start + begin)
        data = self._file.read(end - begin)
        if len(data) != end - begin:
            raise UserError(f'{self.path}: {name}: the file became shorter while it was read')
        values = np.frombuffer(data, DTYPES[entry['dtype']])
        if entry['dtype'] == 'BF16':  # bfloat16 is the upper half of a float32
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(over='ignore'):
            result = np.ascontiguousarray(values, np.float32).reshape(entry['shape'])
        size = np.dtype(DTYPES[entry['dtype']]).itemsize

        def where(index: int) -> str:
            byte = self._start + begin + size * index
            return f'{name}, flat index {index} (byte {byte:,}), as float32'

        check_finite(result, self.path, where)
        return result


def _check(path: str, file: BinaryIO) -> tuple[int, dict[str, str], dict[str, _TensorEntry]]:
    """Returns the byte at which the tensors begin, the metadata, and the tensors' entries.

    The library has checked that the header is valid and fits the file exactly.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(LENGTH), 'little')
    if size < LENGTH or length > size - LENGTH:
        raise UserError(
            f'{path}: bytes 0 to 7 (length of the header): found {length:,}, but the file has '
            f'{size:,} bytes; it is truncated or not a safetensors file'
        )
    try:
        with safetensors.safe_open(path, framework='numpy'):
            pass
    except (safetensors.SafetensorError, ValueError, OSError) as error:
        end = LENGTH + length
        raise UserError(
            f'{path}: the header (bytes 8 to {end:,}) does not describe the {size - end:,} bytes '
            f'that follow it: {one_line(error)}'
        ) from None
    header = parse_json(file.read(length), f'{path}: the header', advice=RESAVE)
    metadata = header.pop('__metadata__', None) or {}  # the library accepts null
    check_fields(metadata, dict.fromkeys(metadata, str), f'{path}: __metadata__', advice=RESAVE)
    for name in header:
        if len(name) > MAX_NAME or not name.isprintable():
            raise UserError(
                f'{path}: expected names of at most {MAX_NAME} printable characters, '
                f'found {shown(name)}'
            )
    return LENGTH + length, metadata, header


def write_safetensors(
    file: BinaryIO, state: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes tensors and metadata to an open, empty file.

    The bytes are those of the library, which however writes them to `.tmpXXXXXX` beside the file,
    and leaves that there if the process is killed.

    Args:
      state: arrays of types in `DTYPES` except BF16.

    Raises:
      OSError: the file cannot be written.
    """
    kinds = {np.dtype(kind): name for name, kind in DTYPES.items() if name != 'BF16'}
    header: dict[str, object] = {'__metadata__': dict(metadata)} if metadata else {}
    begin, names = 0, sorted(state, key=lambda name: (-state[name].itemsize, name))
    for name in names:
        array = state[name]
        header[name] = {
            'dtype': kinds[array.dtype],
            'shape': list(array.shape),
            'data_offsets': [begin, begin + array.nbytes],
        }
        begin += array.nbytes
    text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % LENGTH)
    file.write(len(text).to_bytes(LENGTH, 'little') + text)
    for name in names:
        file.write(np.ascontiguousarray(state[name]).reshape(-1).view(np.uint8).data)
