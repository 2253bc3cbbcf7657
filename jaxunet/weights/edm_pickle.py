"""Reads the pickled networks of NVlabs/edm without Python's unpickler.

Such a file holds the source text of the network's module, which NVlabs' code executes when it loads
the file. Here that text is skipped: only the names of the classes, numbers and arrays are read
(`jaxunet.runtime.pickles`), and any other class or function is refused.

Every array lies in a pickle of its own inside the pickle: `torch.save`'s format before 1.6, which
holds a magic number, a version, the machine's sizes, a reference to the storage, the keys of all
storages, and the numbers.

Source: NVlabs/edm, `torch_utils/persistence.py`; PyTorch, `torch/serialization.py`
(`_legacy_save`).
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np

from jaxunet.config import Config
from jaxunet.config.network_relations import FILTERS
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.pickles import Global, Refused, Step
from jaxunet.runtime.untrusted import shown
from jaxunet.weights.edm import DHARIWAL, FILTER, PROGRAM, SONG, config_of, infer
from jaxunet.weights.names import Shape, check_finite
from jaxunet.weights.torch_pickle import Storage, TensorView, TorchPickle, check_views

AVERAGE = 'ema'  # key of the network in the file
PRECONDITIONED = 'EDMPrecond'
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001  # of torch.save's old format
ADVICE = f'expected the network snapshot of {PROGRAM}'
PERSISTENT = 'torch_utils.persistence._reconstruct_persistent_obj'
LOAD_BYTES = 'torch.storage._load_from_bytes'
EASY_DICT = 'dnnlib.util.EasyDict'
CONTAINERS = ('torch.nn.modules.container.ModuleDict', 'torch.nn.modules.container.ModuleList')
NUMPY = ('numpy.core.multiarray', 'numpy._core.multiarray')
SCALARS, DTYPE = tuple(f'{module}.scalar' for module in NUMPY), 'numpy.dtype'
SETS = ('builtins.set', '__builtin__.set')
KNOWN = (PERSISTENT, LOAD_BYTES, EASY_DICT, *CONTAINERS, *SCALARS, DTYPE, *SETS)
LABELS = 'map_label.weight'  # the table of classes
MAX_NESTING = 16  # modules inside modules


@dataclass(eq=False)
class Instance:
    """An object of the file: the name of its class and its attributes."""

    kind: str
    state: dict[Any, Any]


class _StoragePickle(TorchPickle):
    """Reads one of the pickles around a storage."""

    def persistent(self, reference: object) -> Storage:
        """Returns the storage of ("storage", type, key, location, size, view)."""
        if type(reference) is tuple and len(reference) == 6 and reference[5] is None:
            reference = reference[:5]
        return super().persistent(reference)


class _NetworkPickle(TorchPickle):
    """Reads a whole file.

    Attributes:
      numbers: the bytes of each storage by its key.
    """

    MORE_OPCODES: ClassVar[Mapping[str, Step]] = {
        'EMPTY_SET': lambda reader, stack, memo, value: stack.append(frozenset())
    }

    def __init__(self) -> None:
        super().__init__('a network snapshot', ADVICE)
        self.numbers: dict[str, memoryview] = {}

    def find(self, module: str, name: str) -> object:
        """Returns a `Global` for what a network snapshot needs."""
        full = f'{module}.{name}'
        return Global(full) if full in KNOWN else super().find(module, name)

    def call(self, function: object, arguments: tuple[object, ...]) -> object:
        """Returns an `Instance`, a storage, a number, or what a state dict may have."""
        name = function.name if type(function) is Global else ''
        if name == PERSISTENT:
            return _instance(*arguments)
        if name == LOAD_BYTES:
            return self._storage(*arguments)
        if name in SCALARS:
            return _scalar(*arguments)
        if name == DTYPE:
            return Global(f'{DTYPE} {shown(arguments[0])}')
        if name in SETS:
            return frozenset()
        return super().call(function, arguments)

    def create(self, kind: object) -> object:
        """Returns an empty dict, or an `Instance` of a container of modules."""
        if type(kind) is Global and kind.name == EASY_DICT:
            return {}
        if type(kind) is Global and kind.name in CONTAINERS:
            return Instance(kind.name.rpartition('.')[2], {})
        return super().create(kind)

    def build(self, target: object, state: object) -> None:
        """Sets the attributes of a container; ignores those of numpy's types."""
        if type(target) is Instance and not target.state and type(state) is dict:
            target.state = state
        elif type(target) is not Global:
            super().build(target, state)

    def _storage(self, *arguments: object) -> Storage:
        if len(arguments) != 1 or type(arguments[0]) is not bytes:
            raise Refused('expected the bytes of a storage')
        data = io.BytesIO(arguments[0])
        magic, version, system, storage, keys = (_StoragePickle().load(data) for _ in range(5))
        if magic != MAGIC or version != VERSION or type(storage) is not Storage:
            raise Refused("expected a storage in torch.save's format before version 1.6")
        if type(system) is not dict or system.get('little_endian') is not True:
            raise Refused('expected the numbers of a little-endian machine')
        if type(keys) is not list or keys != [storage.key]:
            raise Refused('expected one storage')
        start = data.tell() + 8
        rest = memoryview(arguments[0])[start:]
        (count,) = struct.unpack('<q', arguments[0][start - 8 : start])
        if count != storage.size or len(rest) != storage.bytes:
            raise Refused(
                f'expected {storage.size:,} numbers of {storage.dtype} in a storage, '
                f'found {len(rest):,} bytes for {count:,}'
            )
        key = str(len(self.numbers))
        self.numbers[key] = rest
        return Storage(storage.dtype, key, storage.size)


def _instance(*arguments: object) -> Instance:
    meta = arguments[0] if len(arguments) == 1 else None
    kind = meta.get('class_name') if type(meta) is dict else None
    state = meta.get('state') if type(meta) is dict else None
    if type(kind) is not str or type(state) is not dict:
        raise Refused('expected a persistent object as a dict of class_name and state')
    return Instance(kind, state)


def _scalar(*arguments: object) -> float:
    if len(arguments) != 2 or arguments[0] != Global(f"{DTYPE} 'f8'"):
        raise Refused('expected a number of type float64')
    data = arguments[1]
    if type(data) is not bytes or len(data) != 8:
        raise Refused('expected the 8 bytes of a float64')
    return float(struct.unpack('<d', data)[0])


class NetworkPickle:
    """A network of NVlabs/edm: shapes are read at once; arrays are converted on demand.

    The tables of classes have one row a class, and qkv's rows are all q, all k, all v, unlike in
    the file.

    Args:
      path: the file's name, for messages.
      file: the open file.

    Attributes:
      shapes: name -> shape, without filters.
      sigma_data: standard deviation of the pixels.
      kind: the network's class.
      note: says which weights these are.

    Raises:
      UserError: the file is damaged or of another kind, or holds a network that is not supported.
    """

    metadata: dict[str, str]

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path, self.metadata = path, {}
        pickle = _NetworkPickle()
        try:
            tree = pickle.load(file)
        except Refused as error:
            raise UserError(f'{path}, byte {error.byte}: {error}') from None
        self._numbers = pickle.numbers
        whole = tree.get(AVERAGE) if type(tree) is dict else None
        if type(whole) is not Instance:
            raise UserError(f'{path}: {AVERAGE} is missing; {ADVICE}')
        if whole.kind != PRECONDITIONED:
            raise UserError(
                f'{path}: expected a network of the class {PRECONDITIONED}, found '
                f'{shown(whole.kind)}, whose preconditioning is not supported'
            )
        network = _children(whole).get('model')
        self.kind = network.kind if isinstance(network, Instance) else ''
        if not isinstance(network, Instance) or self.kind not in (SONG, DHARIWAL):
            raise UserError(f'{path}: expected a {SONG} or {DHARIWAL}, found {shown(self.kind)}')
        self.sigma_data = self._number(whole.state.get('sigma_data'), 'sigma_data')
        self.note = f'a {self.kind}, its averages'
        try:
            self._views = check_views(dict(_tensors(network, '', set(), 0)), path)
        except Refused as error:
            raise UserError(f'{path}: {error}') from None
        self._check_filters()
        self.shapes: dict[str, Shape] = {
            name: view.shape[::-1] if name == LABELS else view.shape
            for name, view in self._views.items()
        }

    @property
    def config(self) -> Config:
        """The config of the model; raises `UserError` if the network cannot be run here."""
        return config_of(infer(self.shapes, self.path), self.shapes, self.sigma_data, self.path)

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32.

        Raises:
          UserError: a number is not finite.
        """
        view = self._views[name]
        if view.storage.dtype == 'bf16':
            raise UserError(f'{self.path}: {name}: expected float32, found bfloat16')
        numbers = np.frombuffer(self._numbers[view.storage.key], f'<{view.storage.dtype}')
        with np.errstate(over='ignore', invalid='ignore'):
            value = np.ascontiguousarray(view.of(numbers), np.float32)
        check_finite(value, self.path, lambda index: f'{name}, flat index {index},')
        if name == LABELS:
            return np.ascontiguousarray(value.T)
        if '.qkv.' in name:
            rows = value.shape[0] // 3
            value = value.reshape(rows, 3, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)
        return value

    def _number(self, value: object, name: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
            raise UserError(f'{self.path}: {name}: expected a number above 0, found {shown(value)}')
        return float(value)  # type: ignore[arg-type]

    def _check_filters(self) -> None:
        """Checks the numbers of all filters."""
        for name in [name for name in self._views if name.endswith(FILTER)]:
            value = self.read(name)
            known = [np.outer(f, f) / sum(f) ** 2 for f in map(np.array, FILTERS)]
            if not any(f.shape == value.shape[-2:] and np.allclose(f, value) for f in known):
                raise UserError(
                    f'{self.path}: {name}: expected the filter [1, 1] or [1, 3, 3, 1], '
                    'found another one'
                )


def _children(instance: Instance) -> dict[Any, Any]:
    children = instance.state.get('_modules')
    return children if type(children) is dict else {}


def _tensors(
    instance: Instance, prefix: str, seen: set[int], depth: int
) -> Iterator[tuple[str, TensorView]]:
    """Yields parameters and buffers of a module and those inside it, with their names."""
    if id(instance) in seen or depth > MAX_NESTING:
        raise Refused(f'{prefix.rstrip(".") or "the network"} occurs twice, or is nested too deep')
    seen.add(id(instance))
    for group in ('_parameters', '_buffers'):
        tensors = instance.state.get(group)
        if type(tensors) is not dict:
            raise Refused(f'{prefix}{group}: expected a dict of tensors')
        yield from ((prefix + str(name), v) for name, v in tensors.items() if v is not None)
    for name, child in _children(instance).items():
        if type(child) is Instance:
            yield from _tensors(child, f'{prefix}{name}.', seen, depth + 1)
        elif child is not None:
            raise Refused(f'{prefix}{name}: expected a module')
