"""`.safetensors` through the safetensors library, with the checks and messages of the other formats."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import safetensors
import safetensors.numpy

from jaxunet.runtime.errors import UserError
from jaxunet.weights.names import check_finite

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
LENGTH = 8  # bytes that say how long the JSON header is


class SafetensorsFile:
    """The tensors of a file: shapes and metadata at once, tensors when asked for.

    Raises:
      UserError: from any method: not such a file, damaged, or of a type that is no number; naming field and byte.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._start, header = _check(path, file)
        self.metadata: dict[str, str] = header.pop('__metadata__', {})
        self._entries = header
        for name, entry in header.items():
            if entry['dtype'] not in DTYPES:
                raise UserError(
                    f'{path}: {name}: dtype: expected one of {", ".join(DTYPES)}, found {entry["dtype"]}'
                )
            if 0 in entry['shape']:
                raise UserError(
                    f'{path}: {name}: expected a tensor with elements, found shape {tuple(entry["shape"])}'
                )
        self.shapes = {name: tuple(entry['shape']) for name, entry in header.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32; all its numbers are finite."""
        entry = self._entries[name]
        begin, end = entry['data_offsets']
        self._file.seek(self._start + begin)
        values = np.frombuffer(self._file.read(end - begin), DTYPES[entry['dtype']])
        if entry['dtype'] == 'BF16':  # the upper half of a float32
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(over='ignore'):
            result = np.ascontiguousarray(values, np.float32).reshape(entry['shape'])
        size = np.dtype(DTYPES[entry['dtype']]).itemsize

        def where(index: int) -> str:
            return f'{name}, flat index {index} (byte {self._start + begin + size * index:,}), as float32'

        check_finite(result, self.path, where)
        return result


def _check(path: str, file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Where the tensors start, and the header, which the library has found valid and to fit the file exactly."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(LENGTH), 'little')
    if size < LENGTH or length > size - LENGTH:
        raise UserError(
            f'{path}: bytes 0 to 7 (length of the header): found {length:,}, but the file has {size:,} bytes; '
            'it is truncated or no safetensors file'
        )
    try:
        with safetensors.safe_open(path, framework='numpy'):
            pass
        header = json.loads(file.read(length))
    except (safetensors.SafetensorError, ValueError, RecursionError, OSError) as error:
        end = LENGTH + length
        raise UserError(
            f'{path}: the header (bytes 8 to {end:,}) does not describe the {size - end:,} bytes that follow it: {error}'
        ) from None
    return LENGTH + length, header


def write_safetensors(
    path: str, state: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes float32 tensors with metadata over the file at `path`."""
    try:
        safetensors.numpy.save_file(dict(state), path, dict(metadata))
    except safetensors.SafetensorError as error:  # its way of saying that the disk is full
        raise OSError(str(error)) from None
