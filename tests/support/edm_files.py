"""Snapshots of NVlabs/edm, made without PyTorch and its code."""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxunet.config import Config
from jaxunet.weights import edm
from jaxunet.weights.edm_pickle import MAGIC, VERSION


@dataclass(frozen=True)
class Name:
    """A global of the pickle."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A call of a global."""

    function: Name
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Reference:
    """An object outside the pickle."""

    value: tuple[Any, ...]


PICKLER: Any = pickle._Pickler


class Writer(PICKLER):
    """Python's pickler, and these objects."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if type(obj) is Name:
            self.write(f'c{obj.module}\n{obj.name}\n'.encode())
        elif type(obj) is Call:
            self.save(obj.function)
            self.save(obj.arguments)
            self.write(pickle.REDUCE)
        elif type(obj) is Reference:
            self.save(obj.value)
            self.write(pickle.BINPERSID)
        else:
            super().save(obj, save_persistent_id)


def pickled(obj: object, protocol: int = 3) -> bytes:
    file = io.BytesIO()
    Writer(file, protocol).dump(obj)
    return file.getvalue()


def storage(value: np.ndarray, size: int | None = None) -> bytes:
    """The bytes that `torch.save` wrote for a storage before 1.6."""
    system = {'protocol_version': VERSION, 'little_endian': True, 'type_sizes': {'int': 4}}
    size = value.size if size is None else size
    kind = Name('torch', 'FloatStorage')
    parts = [MAGIC, VERSION, system, Reference(('storage', kind, 'k', 'cpu', size, None)), ['k']]
    return b''.join(pickled(part, 2) for part in parts) + struct.pack('<q', size) + value.tobytes()


def tensor(value: np.ndarray) -> Call:
    """A parameter."""
    strides = tuple(step // value.itemsize for step in value.strides)
    data = Call(Name('torch.storage', '_load_from_bytes'), (storage(value),))
    hooks = Call(Name('collections', 'OrderedDict'), ())
    view = Call(
        Name('torch._utils', '_rebuild_tensor_v2'), (data, 0, value.shape, strides, False, hooks)
    )
    return Call(Name('torch._utils', '_rebuild_parameter'), (view, False, hooks))


def persistent(kind: str, **state: object) -> Call:
    """An object of a persistent class, with the source text that NVlabs' code would execute."""
    meta = {'type': 'class', 'version': 6, 'module_src': 'raise SystemExit', 'class_name': kind}
    where = Name('torch_utils.persistence', '_reconstruct_persistent_obj')
    return Call(where, (meta | {'state': state},))


def module(kind: str, state: dict[str, np.ndarray]) -> Call:
    """A module with the tensors of a state dict."""
    own = {name: tensor(value) for name, value in state.items() if '.' not in name}
    children: dict[str, dict[str, np.ndarray]] = {}
    for name, value in state.items():
        first, dot, rest = name.partition('.')
        if dot:
            children.setdefault(first, {})[rest] = value
    inner = {name: module('Layer', tensors) for name, tensors in children.items()}
    return persistent(kind, _parameters=own, _buffers={'absent': None}, _modules=inner)


def snapshot(
    state: dict[str, np.ndarray],
    kind: str = edm.SONG,
    outer: str = 'EDMPrecond',
    **attributes: object,
) -> bytes:
    """The file of a network with these tensors."""
    modules = {'model': module(kind, state)}
    fields: dict[str, object] = {'sigma_data': 0.5, '_parameters': {}, '_buffers': {}}
    net = persistent(outer, **fields | {'_modules': modules} | attributes)
    return pickled({'ema': net, 'loss_fn': persistent('EDMLoss', P_mean=-1.2)})


def with_filters(state: dict[str, np.ndarray], config: Config) -> dict[str, np.ndarray]:
    """A state dict and the filters that the blocks of such a network keep."""
    weights = np.array(config.model.resample_filter, np.float32)
    value = (np.outer(weights, weights) / weights.sum() ** 2)[None, None]
    blocks = [name.partition('.conv0.weight')[0] for name in state if 'conv0.weight' in name]
    names = [f'{b}.conv0.{edm.FILTER}' for b in blocks if b.endswith(('_down', '_up'))]
    return state | dict.fromkeys(names, value)
