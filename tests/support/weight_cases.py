"""Small configs, deterministic weights and hand-made files, for the tests of weight files."""

from __future__ import annotations

import functools
import io
import json
import pathlib
import pickle
import struct
import zipfile
import zlib
from typing import Unpack

import jax
import numpy as np
import pytest

from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.schema import Fields
from jaxunet.runtime.errors import UserError
from jaxunet.weights import guided_diffusion, read_weights
from jaxunet.weights.inference import Stated
from jaxunet.weights.names import Tree, parameter_shapes, unflatten
from jaxunet.weights.torch_file import write_torch
from jaxunet.weights.torch_pickle import dump
from jaxunet.weights.unetcu import MAGIC, Header, config_of

NETWORK: Fields = {
    'image_channels': 3,
    'base_channels': 32,
    'channel_mult': (1, 2),
    'num_res_blocks': 1,
    'attention_resolutions': (8,),
    'num_classes': 0,
    'label_dropout': 0.0,
}
UNETCU_SMALL = config_of(Header(MAGIC, 2, 3, 32, 3, 16, 16, 1000, 0, 0))


def make(size: tuple[int, ...] = (16,), *, learn_sigma: bool = False, **model: object) -> Config:
    """A small unconditional ADM config with changes to its model."""
    changes = {
        'model': NETWORK | {'num_head_channels': 32} | model,
        'diffusion': {'learn_sigma': learn_sigma},
        'data': {'image_size': size},
    }
    return resolve(to_dict(Config().replace(**changes)))


# Every option of guided-diffusion's network.
ADM = {
    'pool': make(),
    'conv_resample': make(conv_resample=True),
    'resblock_updown': make(resblock_updown=True, scale_shift_norm=True),
    'scale_shift': make(scale_shift_norm=True, num_res_blocks=2, attention_resolutions=(16, 8)),
    'classes_and_sigma': make(num_classes=7, learn_sigma=True, conv_resample=True),
    'num_heads': make(num_heads=4, num_head_channels=0, num_heads_upsample=2),
    'fractional': make(
        base_channels=64, channel_mult=(0.5, 1, 1.5), attention_resolutions=(4,), conv_resample=True
    ),
    'non_square': make((8, 16), attention_resolutions=(4,), resblock_updown=True),
    'one_channel': make(image_channels=1, attention_resolutions=()),
    'one_level': make(channel_mult=(1,), attention_resolutions=(16,)),
}


# Settings of `make`'s models that a file of guided-diffusion leaves open.
STATED: Stated = {
    'num_head_channels': 32,
    'image_size': (16,),
    'schedule': 'linear',
    'diffusion_steps': 1000,
    'objective': 'epsilon',
}


def random_params(config: Config, seed: int = 0) -> Tree:
    """Returns random weights about the size of trained ones, with both signs.

    No two leaves or elements are alike, so that swapped ones are noticed.
    """
    leaves = {}
    for path, shape in parameter_shapes(config).items():
        rng = np.random.default_rng(zlib.crc32(f'{seed}/{"/".join(path)}'.encode()))
        fan_in = int(np.prod(shape[:-1])) if path[-1] == 'kernel' else 100
        leaf = rng.standard_normal(shape, np.float32) / np.float32(fan_in**0.5)
        leaves[path] = leaf + np.float32(1) if path[-1] == 'scale' else leaf
    return unflatten(leaves)


def moments_of(config: Config) -> tuple[Tree, Tree]:
    """Returns random first and second moments of Adam."""
    return random_params(config, 1), jax.tree.map(np.square, random_params(config, 2))


def same(found: object, expected: object) -> None:
    """Asserts that trees of arrays are equal."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


SMALL = ADM['one_level']


@functools.cache
def state() -> dict[str, np.ndarray]:
    return guided_diffusion.from_tree(random_params(SMALL), SMALL, new_attention_order=False)


def refuse(
    path: pathlib.Path,
    data: bytes,
    message: str,
    *,
    new_attention_order: bool | None = None,
    **stated: Unpack[Stated],
) -> None:
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        read_weights(path, new_attention_order=new_attention_order, **stated)
    assert str(path) in str(error.value)


def torch_bytes(tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    write_torch(file, tensors, metadata or {})
    return file.getvalue()


def nested_torch_bytes(tree: dict[str, object]) -> bytes:
    """The file that torch.save writes for dicts, lists, tuples, numbers, None and arrays."""
    arrays: list[np.ndarray] = []

    def pickled(value: object) -> bytes:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            # The tensor of a state dict of one, without the dict around it.
            data = dump({'': value.shape}).partition(b'X\0\0\0\0')[2].removesuffix(b'u.')
            key, number = b'X\1\0\0\x000', str(len(arrays) - 1).encode()
            return data.replace(key, b'X' + struct.pack('<I', len(number)) + number, 1)
        if isinstance(value, dict):
            items = (pickled(k) + pickled(v) for k, v in value.items())
            return b'}(' + b''.join(items) + b'u'
        return pickle.dumps(value, 2)[2:-1]

    data = {'data.pkl': b'\x80\x02' + pickled(tree) + b'.', 'version': b'3\n'}
    data |= {f'data/{i}': array.tobytes() for i, array in enumerate(arrays)}
    return archive({f'archive/{name}': content for name, content in data.items()})


def archive(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The same bytes at any time: they name tests, whose names all workers must share."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w') as target:
        for name, data in entries.items():
            target.writestr(zipfile.ZipInfo(name), data, compression)
    return file.getvalue()


def safetensors_bytes(
    tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> bytes:
    entries: dict[str, object] = {'__metadata__': metadata} if metadata else {}
    at = 0
    for name, value in tensors.items():
        entries[name] = {
            'dtype': 'F32',
            'shape': list(value.shape),
            'data_offsets': [at, at + value.nbytes],
        }
        at += value.nbytes
    return with_header(entries, b''.join(value.tobytes() for value in tensors.values()))


def with_header(entries: bytes | dict[str, object], data: bytes) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack('<Q', len(text)) + text + data
