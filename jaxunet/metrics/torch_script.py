"""Reads the tensors of a TorchScript archive (`torch.jit.save`), without torch or executing code.

The zip archive holds `NAME/data.pkl`, `NAME/data/<key>` and `NAME/constants.pkl`; its code is never
read. The pickle builds one object per module, of a class under `__torch__`. Its attributes are
tensors, modules and constants; the constants are ignored.
Source: PyTorch, `torch/csrc/jit/serialization/export_module.cpp` and `pickler.cpp`.
"""

from __future__ import annotations

import zipfile
from typing import BinaryIO

import numpy as np

from jaxunet.runtime import archives
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.pickles import Refused
from jaxunet.runtime.untrusted import one_line, shown
from jaxunet.weights.torch_pickle import (
    MAX_NAME,
    MAX_PICKLE,
    TensorView,
    TorchPickle,
    check_views,
)

MAX_DEPTH = 32  # nesting of modules
MAX_ATTRIBUTES = 2**17  # in all modules; a shared module counts each time
ADVICE = (
    'it was not written by torch.jit.save, or is damaged; '
    "give a state dict or an .npz of pytorch-fid's tensors"
)


class _Named(str):
    """Name of a class of the archive, or of a function that builds a typed list."""


class _Module(dict[str, object]):
    """The attributes of one object of the archive."""


def is_torch_script(file: BinaryIO) -> bool:
    """Returns True if a file is an archive of torch.jit.save; leaves its position at the start."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.partition('/')[2] for name in archive.namelist()}
        return {'data.pkl', 'constants.pkl'} <= names
    except (*archives.ERRORS, OSError):
        return False
    finally:
        file.seek(0)


def read_torch_script(path: str, file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns all tensors by the dotted names of the module's `state_dict()`, as float32.

    Buffers that `state_dict()` leaves out are included.

    Args:
      path: the file's name, for messages.

    Raises:
      UserError: the file is damaged, of another kind, or has data that a module does not need.
    """

    def damaged(error: object) -> UserError:
        return UserError(f'{path}: {error}; {ADVICE}')

    try:
        with archives.open_zip(file, damaged) as archive:
            entries = {info.filename.partition('/')[2]: info for info in archive.infolist()}
            module = _load(path, _stored(path, archive, entries, 'data.pkl', MAX_PICKLE))
            order = (
                '>'
                if 'byteorder' in entries
                and _stored(path, archive, entries, 'byteorder', 16).strip() == b'big'
                else '<'
            )
            tensors: dict[str, TensorView] = {}
            _collect(path, module, '', tensors, MAX_DEPTH, [MAX_ATTRIBUTES])
            views = check_views(tensors, path)
            return {
                name: _tensor(path, archive, entries, view, order) for name, view in views.items()
            }
    except (*archives.ERRORS, OSError) as error:
        raise damaged(one_line(error)) from None


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
    kind, wanted = view.storage.dtype, view.storage.bytes
    data = _stored(path, archive, entries, f'data/{view.storage.key}', wanted)
    if len(data) != wanted or kind == 'bf16':
        raise UserError(
            f'{path}: entry data/{view.storage.key}: expected {wanted:,} bytes of plain numbers, '
            f'found {len(data):,} of {kind}'
        )
    with np.errstate(over='ignore', invalid='ignore'):  # `from_state` refuses infinities and NaN
        return np.ascontiguousarray(view.of(np.frombuffer(data, order + kind)), np.float32)


def _collect(
    path: str,
    module: _Module,
    prefix: str,
    views: dict[str, TensorView],
    depth: int,
    left: list[int],
) -> None:
    """Adds the tensors of a module and of those in it to `views`.

    Args:
      left: one number, the attributes that may still be visited; it bounds the work, because
        modules can share modules without end.
    """
    if depth == 0:
        raise UserError(f'{path}: {shown(prefix)}: modules more than {MAX_DEPTH} deep; {ADVICE}')
    for name, value in module.items():
        left[0] -= 1
        if left[0] < 0 or len(prefix) + len(name) > MAX_NAME:
            raise UserError(
                f'{path}: {shown(prefix)}: expected at most {MAX_ATTRIBUTES:,} attributes with '
                f'names of at most {MAX_NAME} characters, found more; {ADVICE}'
            )
        if isinstance(value, TensorView):
            views[prefix + name] = value
        elif isinstance(value, _Module):
            _collect(path, value, f'{prefix}{name}.', views, depth - 1, left)


def _load(path: str, data: bytes) -> _Module:
    try:
        module = _Script().load(data)
    except Refused as error:
        raise UserError(f'{path}: data.pkl, byte {error.byte}: {error}') from None
    if not isinstance(module, _Module):
        raise UserError(
            f'{path}: data.pkl: expected a module, found {type(module).__name__}; {ADVICE}'
        )
    return module


class _Script(TorchPickle):
    """Reads a state dict's pickles, and those that build the archive's objects."""

    def __init__(self) -> None:
        super().__init__('a module', ADVICE)

    def find(self, module: str, name: str) -> object:
        """Returns a class of the archive, or what `TorchPickle` returns for the name."""
        if module.startswith('__torch__') or module == 'torch.jit._pickle':
            return _Named(name)
        return super().find(module, name)

    def create(self, kind: object) -> object:
        """Returns a module without attributes."""
        if not isinstance(kind, _Named):
            raise Refused(f'found an object of a class that is not in the archive; {ADVICE}')
        return _Module()

    def build(self, target: object, state: object) -> None:
        """Sets a module's attributes, once."""
        if not isinstance(target, _Module):
            return super().build(target, state)
        if type(state) is not dict or not all(type(key) is str for key in state):
            raise Refused(f'expected the attributes of a module, found {type(state).__name__}')
        if target:
            raise Refused('expected the attributes of a module once, found them again')
        target.update(state)
        return None

    def call(self, function: object, arguments: tuple[object, ...]) -> object:
        """Returns None for a typed list, which holds no weights."""
        return None if isinstance(function, _Named) else super().call(function, arguments)
