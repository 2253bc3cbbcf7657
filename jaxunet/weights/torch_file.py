"""Reads and writes PyTorch's zip files of tensors (`torch.save`) without torch.

Reading executes nothing in the file. The archive holds uncompressed entries `<name>/data.pkl`,
`<name>/data/<key>`, `<name>/byteorder` and `<name>/version`; torch ignores our entries under
`<name>/extra/`. Source: PyTorch, `torch/serialization.py`.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from jaxunet.runtime import archives
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import shown
from jaxunet.weights.names import check_finite
from jaxunet.weights.torch_checkpoint import choose
from jaxunet.weights.torch_pickle import (
    ITEM_SIZES,
    MAX_PICKLE,
    STATE_DICT,
    TensorView,
    check_views,
    dump,
    load,
)

MAX_EXTRA = 2**20  # bytes of one entry under extra/
RESAVE = (
    'load it with torch and save it again: '
    'torch.save(torch.load(path, weights_only=True), new_path), with torch 1.6 or later'
)


class TorchFile:
    """A state dict in a torch file: shapes and metadata are read at once, tensors on demand.

    Use it as a context manager.

    Args:
      path: the file's name, for messages.
      file: the open file.
      ema, trained: choose among weights and averages (`jaxunet.weights.torch_checkpoint.choose`).

    Attributes:
      shapes: name -> shape, in the order of the file.
      note: says which weights these are, if there are several.
      optimizer: the state of the optimizer that trained them; None if there is none.

    Raises:
      UserError: the file is damaged, of another kind, or holds more than tensors; the message names
        entry, field and byte. Methods raise it too.
    """

    def __init__(self, path: str, file: BinaryIO, ema: str = '', *, trained: bool = False) -> None:
        self.path, self.note = path, ''
        self.optimizer: dict[Any, Any] | None = None
        self._archive = self._open(file)
        self._entries = self._check_entries(file)
        tree = load(self._read('data.pkl', MAX_PICKLE), f'{path}: data.pkl')
        self._views = self._state_dict(tree, ema, trained=trained)
        self.shapes = {name: view.shape for name, view in self._views.items()}
        order = (
            self._read('byteorder', MAX_EXTRA).decode('latin-1').strip()
            if 'byteorder' in self._entries
            else 'little'
        )
        if order not in ('little', 'big'):
            raise UserError(f'{path}: byteorder: expected little or big, found {order[:20]!r}')
        self._order = '<' if order == 'little' else '>'
        self._check_sizes(self._views)
        self._cached: tuple[str | None, np.ndarray] = (None, np.zeros(0, np.float32))

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    @property
    def metadata(self) -> dict[str, str]:
        """Texts that our writer stored beside the tensors, by name."""
        names = [name for name in self._entries if name.startswith('extra/')]
        return {
            name.removeprefix('extra/'): self._read(name, MAX_EXTRA).decode('utf-8', 'replace')
            for name in names
        }

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32.

        Raises:
          UserError: a damaged entry, or a number that is not finite.
        """
        return self.read_view(self._views[name], name)

    def read_view(self, view: TensorView, name: str) -> np.ndarray:
        """Returns a tensor of the file as float32; `name` is for messages.

        Raises:
          UserError: a damaged entry, or a number that is not finite.
        """
        with np.errstate(over='ignore', invalid='ignore'):
            result = np.ascontiguousarray(view.of(self._storage(view)), np.float32)

        def where(index: int) -> str:
            at = np.unravel_index(index, view.shape)
            element = view.offset + sum(
                int(i) * step for i, step in zip(at, view.stride, strict=True)
            )
            byte = element * ITEM_SIZES[view.storage.dtype]
            entry = f'data/{view.storage.key}'
            return f'{name}, flat index {index} (byte {byte:,} of entry {entry}), as float32'

        check_finite(result, self.path, where)
        return result

    def check(self, views: Mapping[str, TensorView]) -> None:
        """Checks the storages and sizes of further tensors, as for the weights.

        Raises:
          UserError: the file is damaged or malicious.
        """
        self._check_sizes(check_views(views, self.path))

    def number(self, value: object, name: str) -> float:
        """Returns a number that the file holds beside the weights; torch may store it as a tensor.

        Args:
          name: name of the number, for messages.

        Raises:
          UserError: the value is not one finite number.
        """
        if type(value) is TensorView and value.shape == ():
            self.check({name: value})
            return float(self.read_view(value, name).item())
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise UserError(f'{self.path}: {name}: expected a number, found {shown(value)}')
        return float(value)  # type: ignore[arg-type]

    def _open(self, file: BinaryIO) -> zipfile.ZipFile:
        start = file.read(4)
        file.seek(0)
        if start[:2] == b'\x80\x02' or start == b'././':
            raise UserError(
                f"{self.path}: byte 0: this is PyTorch's old format (a bare pickle), "
                f'which can run code when loaded; {RESAVE}'
            )
        if start != b'PK\x03\x04':
            raise UserError(
                f'{self.path}: byte 0: expected a zip archive (PK\\x03\\x04) as torch.save writes '
                f'it, found {start!r}'
            )
        return archives.open_zip(
            file,
            lambda error: UserError(
                f'{self.path}: the archive is truncated or damaged: '
                f'its directory, at the end of the file, fails ({error})'
            ),
        )

    def _check_entries(self, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
        infos = self._archive.infolist()
        size = file.seek(0, 2)
        roots = {info.filename.partition('/')[0] for info in infos}
        names = [info.filename.partition('/')[2] for info in infos]
        if 'constants.pkl' in names:
            raise UserError(
                f'{self.path}: this is a TorchScript archive, which holds code; {STATE_DICT}'
            )
        if len(roots) != 1 or 'data.pkl' not in names:
            raise UserError(
                f'{self.path}: entry data.pkl is missing; '
                'this zip archive was not written by torch.save'
            )
        for name, info in zip(names, infos, strict=True):
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                sizes = f'{info.compress_size:,} -> {info.file_size:,} bytes'
                raise UserError(
                    f'{self.path}: entry {shown(name)} is compressed ({sizes}), '
                    'which torch.save never does'
                )
            if info.flag_bits & 0x1:
                raise UserError(f'{self.path}: entry {shown(name)} is encrypted')
        if (total := sum(info.file_size for info in infos)) > size:
            raise UserError(
                f'{self.path}: the entries claim {total:,} bytes, but the file has {size:,}; '
                'it is damaged or malicious'
            )
        return dict(zip(names, infos, strict=True))

    def _read(self, name: str, limit: int) -> bytes:
        info = self._entries[name]
        if info.file_size > limit:
            raise UserError(
                f'{self.path}: entry {name} has {info.file_size:,} bytes, '
                f'expected at most {limit:,}'
            )
        try:
            return self._archive.read(info)
        except (*archives.ERRORS, OSError) as error:
            raise UserError(
                f'{self.path}: entry {shown(name)} (byte {info.header_offset:,}) is damaged: '
                f'{shown(str(error))}'
            ) from None

    def _state_dict(self, tree: object, ema: str, *, trained: bool) -> dict[str, TensorView]:
        if type(tree) is dict:
            tree, self.note, self.optimizer = choose(tree, ema, self.path, trained=trained)
        if type(tree) is not dict or not tree:
            raise UserError(
                f'{self.path}: expected a dict of tensors (a state dict), found {_kind(tree)}; '
                f'{STATE_DICT}'
            )
        return check_views(tree, self.path)

    def _check_sizes(self, views: Mapping[str, TensorView]) -> None:
        """Checks that every storage has its entry, of the right number of bytes."""
        for name, view in views.items():
            entry = f'data/{view.storage.key}'
            if entry not in self._entries:
                raise UserError(f'{self.path}: {name}: its entry {entry} is missing')
            if (found := self._entries[entry].file_size) != view.storage.bytes:
                raise UserError(
                    f'{self.path}: {name}: expected {view.storage.bytes:,} bytes in entry {entry}, '
                    f'found {found:,}'
                )

    def _storage(self, view: TensorView) -> np.ndarray:
        key, dtype = view.storage.key, view.storage.dtype
        if self._cached[0] != key:
            data = self._read(f'data/{key}', view.storage.bytes)
            if dtype == 'bf16':  # bfloat16 is the upper half of a float32
                values = (
                    np.frombuffer(data, self._order + 'u2').astype(np.uint32) << np.uint32(16)
                ).view(np.float32)
            else:
                values = np.frombuffer(data, self._order + dtype)
            self._cached = (key, values)
        return self._cached[1]


def _kind(value: object) -> str:
    if value is None:
        return 'nothing'
    return 'an empty dict' if value == {} else f'a {type(value).__name__}'


def write_torch(
    file: BinaryIO, state: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a state dict of float32 tensors that `torch.load(weights_only=True)` reads.

    Equal contents give equal files: no times, no names of machines.

    Args:
      metadata: texts by name, stored under `extra/`.
    """
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_STORED) as archive:
        archive.writestr(
            zipfile.ZipInfo('archive/data.pkl'),
            dump({name: value.shape for name, value in state.items()}),
        )
        archive.writestr(zipfile.ZipInfo('archive/byteorder'), b'little')
        for key, value in enumerate(state.values()):
            archive.writestr(
                zipfile.ZipInfo(f'archive/data/{key}'), np.ascontiguousarray(value, '<f4').tobytes()
            )
        archive.writestr(zipfile.ZipInfo('archive/version'), b'3\n')
        for name, text in metadata.items():
            archive.writestr(zipfile.ZipInfo(f'archive/extra/{name}'), text.encode())
