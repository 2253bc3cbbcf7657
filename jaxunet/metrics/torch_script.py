"""Reads the tensors of a TorchScript archive (`torch.jit.save`), without torch or executing code.

The zip archive holds `NAME/data.pkl`, `NAME/data/<key>` and `NAME/constants.pkl`; its code is never
read. The pickle builds one object per module, of a class under `__torch__`. Its attributes are
tensors, modules and constants; the constants are ignored.
Source: PyTorch, `torch/csrc/jit/serialization/export_module.cpp` and `pickler.cpp`.
"""

from __future__ import annotations

import pickletools
import zipfile
from typing import BinaryIO

import numpy as np

from jaxunet.runtime.errors import UserError
from jaxunet.weights.torch_pickle import ITEM_SIZES, OPCODES, Memo, Refused, Stack, TensorView

MAX_PICKLE = 64 * 2**20  # bytes
MAX_DEPTH = 32  # nesting of modules
ADVICE = (
    'it was not written by torch.jit.save, or is damaged; '
    "give a state dict or an .npz of pytorch-fid's tensors"
)


class _Named(str):
    """A class of the archive, or a function that builds a typed list: only its name is kept."""


class _Module(dict[str, object]):
    """The attributes of one object of the archive."""


def is_torch_script(file: BinaryIO) -> bool:
    """Returns True if a file is an archive of torch.jit.save; leaves it at its start."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.partition('/')[2] for name in archive.namelist()}
        return {'data.pkl', 'constants.pkl'} <= names
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
    finally:
        file.seek(0)


def read_torch_script(path: str, file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns all tensors by the dotted names of the module's `state_dict()`, as float32.

    Buffers that `state_dict()` leaves out are included.

    Args:
      path: the file's name, for messages.

    Raises:
      UserError: another kind of file, a damaged one, or one with data that a module does not need.
    """
    size = file.seek(0, 2)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {info.filename.partition('/')[2]: info for info in archive.infolist()}
            module = _load(path, _stored(path, archive, entries, 'data.pkl', MAX_PICKLE))
            order = (
                '>'
                if 'byteorder' in entries and archive.read(entries['byteorder']).strip() == b'big'
                else '<'
            )
            views: dict[str, TensorView] = {}
            _collect(path, module, '', views, MAX_DEPTH)
            total = sum(
                int(np.prod(v.shape, dtype=np.float64)) * ITEM_SIZES[v.storage.dtype]
                for v in views.values()
            )
            if total > 4 * size:
                raise UserError(f'{path}: the tensors are much larger than the file; {ADVICE}')
            return {
                name: _tensor(path, archive, entries, view, order) for name, view in views.items()
            }
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise UserError(f'{path}: {error}; {ADVICE}') from None


def _stored(
    path: str, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo], name: str, limit: int
) -> bytes:
    if name not in entries:
        raise UserError(f'{path}: entry {name} is missing; {ADVICE}')
    info = entries[name]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
        raise UserError(
            f'{path}: entry {name}: expected at most {limit:,} bytes, not compressed, '
            f'found {info.file_size:,}; {ADVICE}'
        )
    return archive.read(info)


def _tensor(
    path: str,
    archive: zipfile.ZipFile,
    entries: dict[str, zipfile.ZipInfo],
    view: TensorView,
    order: str,
) -> np.ndarray:
    kind = view.storage.dtype
    wanted = view.storage.size * ITEM_SIZES[kind]
    data = _stored(path, archive, entries, f'data/{view.storage.key}', wanted)
    if len(data) != wanted or kind == 'bf16':
        raise UserError(
            f'{path}: entry data/{view.storage.key}: expected {wanted:,} bytes of plain numbers, '
            f'found {len(data):,} of {kind}'
        )
    values = np.frombuffer(data, order + kind)
    strides = tuple(step * values.itemsize for step in view.stride)
    return np.ascontiguousarray(
        np.lib.stride_tricks.as_strided(
            values[view.offset :], view.shape, strides, writeable=False
        ),
        np.float32,
    )


def _collect(
    path: str, module: _Module, prefix: str, views: dict[str, TensorView], depth: int
) -> None:
    if depth == 0:
        raise UserError(f'{path}: {prefix}: modules more than {MAX_DEPTH} deep; {ADVICE}')
    for name, value in module.items():
        if isinstance(value, TensorView):
            views[prefix + name] = value
        elif isinstance(value, _Module):
            _collect(path, value, f'{prefix}{name}.', views, depth - 1)


def _load(path: str, data: bytes) -> _Module:
    stack: Stack = []
    memo: Memo = {}
    position = 0
    try:
        for opcode, argument, at in pickletools.genops(data):
            position = at or 0
            if opcode.name == 'STOP':
                break
            _step(opcode.name, argument, stack, memo)
        (module,) = stack
    except Refused as error:
        raise UserError(f'{path}: data.pkl, byte {position}: {error}') from None
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
            f'{path}: data.pkl, byte {position}: damaged ({type(error).__name__}: {error}); '
            f'{ADVICE}'
        ) from None
    if not isinstance(module, _Module):
        raise UserError(
            f'{path}: data.pkl: expected a module, found {type(module).__name__}; {ADVICE}'
        )
    return module


def _step(name: str, argument: object, stack: Stack, memo: Memo) -> None:
    """Executes one opcode: those of a state dict, and those that build the archive's objects."""
    if name == 'GLOBAL' and str(argument).startswith(('__torch__', 'torch.jit._pickle ')):
        stack.append(_Named(argument))
    elif name == 'NEWOBJ':
        arguments, kind = stack.pop(), stack.pop()
        if not isinstance(kind, _Named) or arguments != ():
            raise Refused(f'found an object of a class that is not in the archive; {ADVICE}')
        stack.append(_Module())
    elif name == 'BUILD' and isinstance(stack[-2], _Module):
        attributes = stack.pop()
        if type(attributes) is not dict or not all(type(key) is str for key in attributes):
            raise Refused(f'expected the attributes of a module, found {type(attributes).__name__}')
        stack[-1].update(attributes)
    elif name == 'REDUCE' and isinstance(stack[-2], _Named):  # a typed list, which holds no weights
        del stack[-2:]
        stack.append(None)
    elif name in OPCODES:
        OPCODES[name](stack, memo, argument)
    else:
        raise Refused(f'opcode {name} is not allowed: a module does not need it')
