"""Weight files whose tensors, metadata, path or caller are wrong: every one gives a `UserError`
that says what and where.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
from support.weight_cases import (
    SMALL,
    STATED,
    UNETCU_SMALL,
    archive,
    make,
    random_params,
    refuse,
    safetensors_bytes,
    state,
    torch_bytes,
    with_header,
)

from jaxunet.config import to_dict
from jaxunet.runtime.errors import UserError
from jaxunet.weights import read_weights, write_weights
from jaxunet.weights.files import METADATA

# --- names and shapes, in both formats


@pytest.mark.parametrize('extension', ['pt', 'safetensors'])
@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'out.2.bias': None}, r'out.2.bias: missing, expected shape \(3,\)'),
        (
            {'time_embed.0.weight': None},
            r'time_embed.0.weight is missing: this is not a UNet with .*names \(found \d+ tensors',
        ),
        ({'input_blocks.0.0.weight': None}, 'input_blocks.0.0.weight is missing'),
        ({'out.2.weight': None}, 'out.2.weight is missing'),
        ({'middle_block.1.qkv.bias': None}, 'middle_block.1.qkv.bias: missing'),
        ({'extra.weight': [1.0]}, r'extra.weight: unexpected, shape \(1,\)'),
        (
            {'output_blocks.9.0.in_layers.0.weight': [1.0]},
            'output_blocks.9.0.in_layers.0.weight: unexpected',
        ),
        (
            {'input_blocks.77777777.0.op.weight': [1.0]},
            'input_blocks.77777777: more blocks than the file has tensors',
        ),
        ({'out.2.bias': np.zeros(4)}, r'out.2.bias: expected shape \(3,\), found \(4,\)'),
        (
            {'out.2.weight': np.zeros((5, 32, 3, 3))},
            'out.2.weight: expected 3 output channels, or 6 .* found 5',
        ),
        (
            {'time_embed.0.weight': np.zeros((100, 32))},
            r'time_embed.0.weight: expected shape \(4 base, base\)',
        ),
        (
            {'time_embed.0.weight': np.zeros(32)},
            r'time_embed.0.weight: expected 2 axes, found shape \(32,\)',
        ),
        (
            {'input_blocks.0.0.weight': np.zeros((32, 3, 3))},
            'input_blocks.0.0.weight: expected 4 axes',
        ),
        ({'out.2.weight': (17, np.nan)}, 'out.2.weight, flat index 17 .*byte .* is nan'),
        (
            {'middle_block.1.qkv.bias': (3, np.inf)},
            'middle_block.1.qkv.bias, flat index 3 .*byte .* is inf',
        ),
        ({'optimizer.mu.out.2.bias': np.ones(3)}, r'\(moments\): .*time_embed.0.weight: missing'),
    ],
)
def test_state_dicts(
    tmp_path: pathlib.Path, extension: str, changes: dict[str, Any], message: str
) -> None:
    """None in place of a tensor: it is missing; a pair: one number of it is another."""
    tensors = state() | changes
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        elif isinstance(value, tuple):
            tensors[name] = state()[name].copy()
            tensors[name].flat[value[0]] = value[1]
        else:
            tensors[name] = np.asarray(value, np.float32)
    data = torch_bytes(tensors) if extension == 'pt' else safetensors_bytes(tensors)
    refuse(tmp_path / f'a.{extension}', data, f'(?s){message}', new_attention_order=False, **STATED)


@pytest.mark.parametrize('extension', ['pt', 'safetensors'])
def test_other_prefixes_are_kept(tmp_path: pathlib.Path, extension: str) -> None:
    tensors = {f'model.{name}': value for name, value in state().items()}
    data = torch_bytes(tensors) if extension == 'pt' else safetensors_bytes(tensors)
    message = r"time_embed.0.weight .*not a UNet with guided-diffusion's names \(found \d+ tensors"
    refuse(tmp_path / f'a.{extension}', data, message, new_attention_order=False, **STATED)


# --- .safetensors


def one_entry(**changes: Any) -> dict[str, Any]:
    return {'w': {'dtype': 'F32', 'shape': [2, 2], 'data_offsets': [0, 16]} | changes}


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (b'', 'bytes 0 to 7 .length of the header.: found 0, but the file has 0 bytes'),
        (b'abc', 'but the file has 3 bytes'),
        (
            struct.pack('<Q', 2**63) + b'{}',
            'found 9,223,372,036,854,775,808, but the file has 10 bytes',
        ),
        (struct.pack('<Q', 100) + b'{}', 'found 100, but the file has 10 bytes; it is truncated'),
        (with_header(b'not json', b''), r'the header \(bytes 8 to 16\) does not describe'),
        (with_header(b'[' * 50000, b''), 'does not describe'),
        (with_header(one_entry(), bytes(15)), 'does not describe the 15 bytes that follow it'),
        (with_header(one_entry(), bytes(17)), 'does not describe the 17 bytes that follow it'),
        (with_header(one_entry(shape=[2, 3]), bytes(16)), 'does not describe'),
        (with_header(one_entry(shape=[2**62, 2**62]), bytes(16)), 'does not describe'),
        (with_header(one_entry(data_offsets=[4, 20]), bytes(20)), 'does not describe'),
        (with_header(one_entry(data_offsets=[16, 0]), bytes(16)), 'does not describe'),
        (with_header(one_entry(dtype='F31'), bytes(16)), 'does not describe'),
        (
            with_header(one_entry(dtype='BOOL', data_offsets=[0, 4]), bytes(4)),
            'w: dtype: expected one of .*, found BOOL',
        ),
        (
            with_header(one_entry(shape=[0, 2**40], data_offsets=[0, 0]), b''),
            'w: expected a tensor with elements',
        ),
        (with_header(one_entry(), bytes(16)), 'time_embed.0.weight is missing'),
        (with_header({}, b''), 'time_embed.0.weight is missing'),
        (archive({'a': b'x'}), 'it is truncated or not a safetensors file'),
    ],
)
def test_safetensors_structure(tmp_path: pathlib.Path, data: bytes, message: str) -> None:
    refuse(tmp_path / 'a.safetensors', data, message)


def good_metadata(**changes: Any) -> dict[str, Any]:
    values = to_dict(SMALL) | {'new_attention_order': False}
    values['model'] = values['model'] | changes.pop('model', {})
    return values | changes


@pytest.mark.parametrize('extension', ['pt', 'safetensors'])
@pytest.mark.parametrize(
    ('metadata', 'message'),
    [
        ('{', 'metadata jaxunet_config'),
        ('[]', r'metadata jaxunet_config: expected a JSON object, found .* \(it is \[\]\)'),
        ('{}', 'new_attention_order: expected true or false, found None'),
        ('[' * 100_000, 'metadata jaxunet_config'),
        ({'new_attention_order': 'no'}, "new_attention_order: expected true or false, found 'no'"),
        (
            {'class_names': ['cat']},
            r"class_names: expected the names of at most 0 classes, found \['cat'\]",
        ),
        ({'class_names': 3}, 'class_names: expected the names of at most 0 classes, found 3'),
        ({'bogus': 1}, 'bogus: unknown field'),
        ({'model': {'base_channels': 'x'}}, 'model.base_channels: expected int'),
        ({'model': {'base_channels': 64}}, 'model.base_channels: expected 32, found 64'),
        ({'model': {'base_channels': 2**16}}, 'model.base_channels: expected 32, found 65536'),
        ({'model': {'base_channels': 2**40}}, 'model.base_channels: expected at most 65536'),
        ({'model': {'num_res_blocks': 10**9}}, 'model.num_res_blocks: expected at most 64'),
        ({'model': {'channel_mult': [float('inf')]}}, 'metadata jaxunet_config'),
        ({'model': {'num_classes': 10}}, 'model.num_classes: expected 0, found 10'),
        ({'model': {'num_head_channels': 24}}, 'model.num_head_channels: 24 does not divide'),
        ({'model': {'scale_shift_norm': True}}, r'emb_layers.1.weight: expected shape \(64, 128\)'),
    ],
)
def test_metadata(
    tmp_path: pathlib.Path, extension: str, metadata: str | dict[str, Any], message: str
) -> None:
    """Text in place of the metadata, or changes of good ones."""
    text = metadata if isinstance(metadata, str) else json.dumps(good_metadata(**metadata))
    build = torch_bytes if extension == 'pt' else safetensors_bytes
    refuse(tmp_path / f'a.{extension}', build(state(), {METADATA: text}), message)


# --- the path, the caller, the disk


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        (
            'a.pth',
            r"extension: expected one of .bin, .pt, .safetensors, .pkl, found '.pth'; did you mean "
            r'\".pt\"',
        ),
        ('a.safetensor', r'did you mean ".safetensors"'),
        ('a.npz', "found '.npz'"),
        ('a', 'found none'),
        ('missing.pt', 'no such file'),
        ('missing.bin', 'no such file'),
        ('folder.bin', 'cannot be read: Is a directory'),
        ('folder.safetensors', 'cannot be read: Is a directory'),
    ],
)
def test_paths(tmp_path: pathlib.Path, name: str, message: str) -> None:
    (tmp_path / 'folder.bin').mkdir()
    (tmp_path / 'folder.safetensors').mkdir()
    with pytest.raises(UserError, match=message):
        read_weights(tmp_path / name)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'image_size': (16,)}, 'image_size: the config of this file is known; leave this out'),
        (
            {'num_heads': 2, 'num_head_channels': 0},
            'num_heads, num_head_channels: the config of this file is known',
        ),
        (
            {'new_attention_order': True},
            'new_attention_order: the file says False, True was asked for',
        ),
        (
            {'config': SMALL.replace(model={'norm_eps': 1e-6})},
            r'model.norm_eps: expected 1e-06, found 1e-05',
        ),
        (
            {'config': make(channel_mult=(1, 2))},
            r'model.channel_mult: expected \(1.0, 2.0\), found \(1.0,\)',
        ),
        (
            {'config': SMALL.replace(diffusion={'learn_sigma': True})},
            'diffusion.learn_sigma: expected True, found False',
        ),
    ],
)
def test_callers_mistakes(tmp_path: pathlib.Path, options: dict[str, Any], message: str) -> None:
    write_weights(tmp_path / 'a.safetensors', random_params(SMALL), SMALL)
    with pytest.raises(UserError, match=message):
        read_weights(tmp_path / 'a.safetensors', **options)


def test_heads_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    stated = {name: value for name, value in STATED.items() if name != 'num_head_channels'}
    refuse(
        tmp_path / 'a.pt',
        torch_bytes(state()),
        r'num_heads: 5 does not divide',
        num_heads=5,
        new_attention_order=True,
        **stated,
    )


@pytest.mark.parametrize('extension', ['bin', 'pt', 'safetensors'])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: pathlib.Path, extension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, here at the very end, costs nothing but the new file."""
    config = UNETCU_SMALL if extension == 'bin' else SMALL
    path = tmp_path / f'a.{extension}'
    path.write_bytes(b'the old one')

    def full(descriptor: int) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(UserError, match='cannot be written: No space left on device'):
        write_weights(path, random_params(config), config)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b'the old one'


def test_an_interrupted_write_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'fsync', interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_weights(tmp_path / 'a.pt', random_params(SMALL), SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ('path', 'changes', 'message'),
    [
        ('/dev/null/a.pt', {}, 'cannot be written: File exists'),
        ('a.pth', {}, 'did you mean ".pt"'),
        ('a.pt', {'moments': ({}, {})}, 'holds no optimizer moments'),
        ('a.safetensors', {'moments': ({}, {})}, r'(?s)first moments: .*missing'),
        ('a.bin', {'new_attention_order': True}, 'unet.cu has one order only'),
        ('a.safetensors', {'params': {}}, r'(?s)parameters: .*missing'),
    ],
)
def test_writing_mistakes(
    tmp_path: pathlib.Path, path: str, changes: dict[str, Any], message: str
) -> None:
    arguments = {'params': random_params(SMALL)} | changes
    with pytest.raises(UserError, match=message):
        write_weights(tmp_path / path, config=SMALL, **arguments)
    assert list(tmp_path.iterdir()) == []
