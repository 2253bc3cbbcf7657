"""Damaged and hostile .bin and .pt files: every one gives a `UserError` that says what is wrong and
where.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.weight_cases import (
    SMALL,
    UNETCU_SMALL,
    archive,
    random_params,
    refuse,
    state,
    torch_bytes,
)

from jaxunet.weights import unetcu, write_weights
from jaxunet.weights.torch_pickle import dump


def test_archives_do_not_hold_the_time_that_would_change_the_names_of_tests():
    assert archive({'a': b''})[10:14] == struct.pack('<HH', 0, 1 << 5 | 1)  # 1980-01-01


# --- .bin


@pytest.fixture(scope='module')
def good_bin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp('bin') / 'good.bin'
    write_weights(path, random_params(UNETCU_SMALL), UNETCU_SMALL)
    return path.read_bytes()


def header(**words: int) -> bytes:
    values = np.zeros(256, '<i4')
    values[:10] = unetcu.Header(unetcu.MAGIC, 2, 3, 32, 3, 16, 16, 1000, 0, 0)._replace(**words)
    return values.tobytes()


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ({'magic': 20240620}, r'a file of images \(magic 20240620 at byte 0\)'),
        ({'magic': 12345679}, r'\[0\] \(magic, byte 0\): expected 12345678, found 12345679'),
        ({'magic': 1315026944}, r'expected 12345678'),
        ({'batch': 0}, r'\[1\] \(batch, byte 4\): expected 1 to 2147483647, found 0'),
        ({'channels_in': 0}, r'\[2\] \(channels_in, byte 8\)'),
        ({'channels_in': -3}, r'\[2\] \(channels_in, byte 8\).*found -3'),
        ({'channels_model': 0}, r'\[3\] \(channels_model, byte 12\)'),
        (
            {'channels_model': 48},
            r'\[3\] \(channels_model, byte 12\): expected a multiple of 32, found 48',
        ),
        ({'channels_model': 2**31 - 32}, r'\[3\] \(channels_model, byte 12\): 2147483616 channels'),
        ({'channels_model': -32}, r'\[3\].*found -32'),
        (
            {'channels_out': 4},
            r'\[4\] \(channels_out, byte 16\): expected 3, or 6 with a learned variance, found 4',
        ),
        ({'height': 0}, r'\[5\] \(height, byte 20\)'),
        ({'height': 20}, r'\[5\] \(height, byte 20\): expected a multiple of 8, found 20'),
        ({'width': 65}, r'\[6\] \(width, byte 24\): expected a multiple of 8, found 65'),
        ({'max_period': 0}, r'\[7\] \(max_period, byte 28\)'),
        ({'has_adamw': 2}, r'\[8\] \(has_adamw, byte 32\): expected 0 or 1, found 2'),
        ({'has_rng': -1}, r'\[9\] \(has_rng, byte 36\): expected 0 or 1, found -1'),
    ],
)
def test_bin_header(tmp_path: pathlib.Path, words: dict[str, int], message: str) -> None:
    refuse(tmp_path / 'a.bin', header(**words) + bytes(4096), message)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda data: b'', 'expected a header of 1024 bytes, found a file of 0 bytes'),
        (lambda data: data[:1000], 'expected a header of 1024 bytes, found a file of 1000 bytes'),
        (lambda data: data[:1024], 'it is truncated or damaged'),
        (lambda data: data[:-1], r'found [\d,]+: truncated at byte'),
        (lambda data: data[: (1024 + len(data)) // 2], 'truncated at byte'),
        (lambda data: data + b'\0', '1 bytes too long, from byte'),
        (lambda data: data + data[1024:], 'bytes too long, from byte'),
        (
            lambda data: header(has_adamw=1) + data[1024:],
            r'first moments \+ .* second moments\) as its header says',
        ),
        (lambda data: header(has_adamw=1) + data[1024:] * 2, 'truncated at byte'),
        (
            lambda data: header(has_rng=1) + data[1024:],
            r'73,728 random states\) as its header says',
        ),
        (
            lambda data: header(has_rng=1, batch=2**22, height=2**14, width=2**14) + data[1024:],
            'truncated at byte',
        ),
        (lambda data: header(channels_in=1, channels_out=1) + data[1024:], 'bytes too long'),
        (
            lambda data: header(channels_in=2**30, channels_out=2**30) + data[1024:],
            r'\[2\] \(channels_in, byte 8\)',
        ),
        (
            lambda data: poke(data, 1024 + 4 * 7, np.nan),
            r'time_embed.0.weight, flat index 7 \(byte 1,052\), is nan',
        ),
        (
            lambda data: poke(data, len(data) - 4, np.inf),
            r'out.2.bias, flat index 2 \(byte [\d,]+\), is inf',
        ),
        (
            lambda data: poke(data, 1024 + 4 * 128 * 32, -np.inf),
            r'time_embed.0.bias, flat index 0 \(byte 17,408\), is -inf',
        ),
        (
            lambda data: header(has_adamw=1) + data[1024:] * 3,
            r'second moments: time_embed.0.weight, flat index \d+ .* expected 0 or more',
        ),
        (
            lambda data: poke(
                header(has_adamw=1) + data[1024:] + bytes(2 * len(data[1024:])), len(data), np.nan
            ),
            r'first moments: time_embed.0.weight, flat index 0 \(byte [\d,]+\), is nan',
        ),
        (
            lambda data: b'PK\x03\x04' + data[4:],
            'for PyTorch or safetensors files use the extension',
        ),
    ],
)
def test_bin_contents(
    tmp_path: pathlib.Path, good_bin: bytes, change: Callable[[bytes], bytes], message: str
) -> None:
    refuse(tmp_path / 'a.bin', change(good_bin), message)


def poke(data: bytes, byte: int, value: float) -> bytes:
    return data[:byte] + struct.pack('<f', value) + data[byte + 4 :]


def test_bin_takes_no_hints(tmp_path: pathlib.Path, good_bin: bytes) -> None:
    refuse(
        tmp_path / 'a.bin',
        good_bin,
        'num_heads, new_attention_order: a .bin of unet.cu states',
        num_heads=4,
        new_attention_order=True,
    )


# --- .pt


def with_pickle(data: bytes, **entries: bytes) -> bytes:
    return archive(
        {'a/data.pkl': data, 'a/version': b'3\n'}
        | {f'a/{name}': value for name, value in entries.items()}
    )


class Evil:
    """Creates a file when an ordinary unpickler loads it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def tensor_pickle(
    size: int,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    kind: bytes = b'FloatStorage',
) -> bytes:
    """A state dict {"w": tensor} with any numbers."""

    def number(n: int) -> bytes:
        encoded = n.to_bytes(10, 'little', signed=True)
        return b'\x8a' + bytes([len(encoded)]) + encoded

    def numbers(values: tuple[int, ...]) -> bytes:
        return b'(' + b''.join(number(n) for n in values) + b't'

    storage = (
        b'(X\x07\0\0\0storagectorch\n'
        + kind
        + b'\nX\x01\0\0\x000X\x03\0\0\0cpu'
        + number(size)
        + b'tQ'
    )
    tensor = (
        b'ctorch._utils\n_rebuild_tensor_v2\n('
        + storage
        + number(offset)
        + numbers(shape)
        + numbers(stride)
        + b'\x89}tR'
    )
    return b'\x80\x02}X\x01\0\0\0w' + tensor + b's.'


GOOD_PICKLE = dump({'w': (2, 2)})
FOUR = {'data/0': bytes(16)}  # the numbers of its tensor
LARGE = {'a/data.pkl': GOOD_PICKLE, 'a/data/0': bytes(10**6)}


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (b'', r"byte 0: expected a zip archive .* found b''"),
        (b'hello world', 'byte 0: expected a zip archive'),
        (
            b'\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.' + bytes(100),
            "byte 0: this is PyTorch's old format",
        ),
        (pickle.dumps({'a': 1}, protocol=2), "byte 0: this is PyTorch's old format"),
        (b'PK\x03\x04', 'truncated or damaged: its directory'),
        (b'PK\x03\x04' + bytes(500), 'truncated or damaged: its directory'),
        (archive({'a/b.txt': b'x'}), 'data.pkl is missing'),
        (archive({'a/data.pkl': GOOD_PICKLE, 'b/data/0': bytes(16)}), 'data.pkl is missing'),
        (
            with_pickle(GOOD_PICKLE, **{'constants.pkl': b''}),
            'TorchScript archive, which holds code',
        ),
        (archive(LARGE, zipfile.ZIP_DEFLATED), r'entry .data.* is compressed \('),
        (archive(LARGE, zipfile.ZIP_BZIP2), 'is compressed'),
        (with_pickle(GOOD_PICKLE), 'w: its entry data/0 is missing'),
        (
            with_pickle(GOOD_PICKLE, **{'data/0': bytes(15)}),
            'w: expected 16 bytes in entry data/0, found 15',
        ),
        (
            with_pickle(GOOD_PICKLE, **FOUR, byteorder=b'middle'),
            "byteorder: expected little or big, found 'middle'",
        ),
    ],
)
def test_pt_archives(tmp_path: pathlib.Path, data: bytes, message: str) -> None:
    refuse(tmp_path / 'a.pt', data, message)


DAMAGED = 'the pickle is damaged or truncated'


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'', f'data.pkl, byte 0: {DAMAGED}'),
        (GOOD_PICKLE[:-1], rf'data.pkl, byte \d+: {DAMAGED}'),
        (GOOD_PICKLE[: len(GOOD_PICKLE) // 2], rf'data.pkl, byte \d+: {DAMAGED}'),
        (b'\x80\x02\xff.', r'data.pkl, byte \d+: the pickle is damaged'),
        (b'\x80\x02}}.', 'expected one object at the end, found 2'),
        (b'\x80\x02}.', 'expected a dict of tensors .* found an empty dict'),
        (b'\x80\x02K\x05.', 'expected a dict of tensors .* found a int'),
        (b'\x80\x02N.', 'expected a dict of tensors .* found nothing'),
        (b'\x80\x02h\x05.', f'byte 2: {DAMAGED}'),
        (b'\x80\x02s.', f'byte 2: {DAMAGED}'),
        (b'\x80\x02' + b'\x85' * 3 + b'.', f'byte 2: {DAMAGED}'),
        ({'w': 'text'}, "'w': expected a tensor, found a str"),
        ({('a',): 1}, 'expected text or a number as the key of a dict, found tuple'),
        (b'\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.', "the key 'a' occurs twice"),
        ({'w': pathlib.PurePosixPath('x')}, 'the global "pathlib.* is not allowed'),
        ({'w': np.zeros(2)}, 'the global "numpy.*reconstruct" is not allowed'),
        (pickle.dumps({'w': len}, protocol=4), 'the global "builtins.len" is not allowed'),
        (pickle.dumps({'w': {1, 2}}, protocol=4), 'opcode EMPTY_SET is not allowed'),
        (
            b'cos\nsystem\n(S"echo"\ntR.',
            'byte 0: the global "os.system" is not allowed: such a file could run code',
        ),
        (
            b'ctorch.storage\n_load_from_bytes\n.',
            'global "torch.storage._load_from_bytes" is not allowed',
        ),
        (b'(icollections\nOrderedDict\n.', 'opcode INST is not allowed'),
        (b'ctorch\nFloatStorage\n)R.', 'a call of something that is not a function of the format'),
        (b'\x80\x02K\x01Q.', 'expected a reference to a storage'),
        (b'ccollections\nOrderedDict\n}b.', 'attributes are set on something that is not a dict'),
    ],
)
def test_pt_pickles(tmp_path: pathlib.Path, content: object, message: str) -> None:
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
    refuse(tmp_path / 'a.pt', with_pickle(data), message)


@pytest.mark.parametrize(
    ('tensor', 'message'),
    [
        ((4, 0, (2, 3), (3, 1)), r'ends at element 5 of a storage of 4 elements'),
        ((4, 1, (4,), (1,)), r'ends at element 4 of a storage of 4 elements'),
        ((4, -1, (2,), (1,)), 'impossible offset'),
        ((4, 0, (-2,), (1,)), 'impossible offset'),
        ((4, 0, (2,), (-1,)), 'impossible offset'),
        ((4, 0, (2**63,), (0,)), 'impossible offset'),
        ((4, 0, (1,) * 40, (1,) * 40), 'impossible offset'),
        ((4, 0, (10**9, 10**6), (0, 0)), r'has 1(,000){5} elements, but only 4 are stored'),
        ((4, 0, (2, 2), (2,)), r'expected a tensor as \(storage, offset, shape, stride\)'),
        ((4, 0, (0, 10**12), (1, 1)), 'expected a tensor with elements'),
        ((10**15, 0, (2,), (1,)), r'expected 4(,000){5} bytes in entry data/0, found 16'),
        ((-4, 0, (2,), (1,)), 'size of 0 or more'),
        (
            (4, 0, (2,), (1,), b'ComplexFloatStorage'),
            'global "torch.ComplexFloatStorage" is not allowed',
        ),
        (
            (4, 0, (2,), (1,)),
            "time_embed.0.weight is missing: this is not a UNet with guided-diffusion's names",
        ),
    ],
)
def test_pt_tensors(tmp_path: pathlib.Path, tensor: tuple[Any, ...], message: str) -> None:
    refuse(tmp_path / 'a.pt', with_pickle(tensor_pickle(*tensor), **FOUR), message)


def test_pt_never_runs_code(tmp_path: pathlib.Path) -> None:
    """The file that an ordinary unpickler obeys is refused, and nothing has happened."""
    data = pickle.dumps({'w': Evil(tmp_path / 'pwned')}, protocol=2)
    refuse(tmp_path / 'a.pt', with_pickle(data), r'global "(posix|nt).mkdir" is not allowed')
    assert not (tmp_path / 'pwned').exists()
    pickle.loads(data)
    assert (tmp_path / 'pwned').exists()


def test_pt_truncated_anywhere(tmp_path: pathlib.Path) -> None:
    data = torch_bytes(state())
    for share in (0.1, 0.5, 0.9, 0.999):
        refuse(tmp_path / 'a.pt', data[: int(share * len(data))], 'truncated or damaged')
    refuse(tmp_path / 'a.pt', data[:-1], 'truncated or damaged')


def test_pt_damaged_byte(tmp_path: pathlib.Path) -> None:
    """The archive's checksums find a flipped bit in a tensor."""
    data = bytearray(torch_bytes(state()))
    at = data.find(next(iter(state().values())).tobytes())
    data[at + 5] ^= 1
    refuse(
        tmp_path / 'a.pt',
        bytes(data),
        r'entry \'data/0\' \(byte [\d,]+\) is damaged: .*CRC',
        config=SMALL,
    )


def test_pt_claims_more_than_the_file_has(tmp_path: pathlib.Path) -> None:
    """Entries that overlap (a zip bomb without compression) are refused before anything is read."""
    data = bytearray(
        archive({'a/data.pkl': GOOD_PICKLE, 'a/data/0': bytes(16), 'a/version': b'3\n'})
    )
    for _ in range(2):
        start = data.rfind(b'PK\x01\x02', 0, data.rfind(b'a/data/0'))
        data[start + 20 : start + 28] = struct.pack('<II', 10**8, 10**8)
    refuse(tmp_path / 'a.pt', bytes(data), r'the entries claim 100,000,\d+ bytes, but the file has')


def test_pt_many_views_of_one_storage(tmp_path: pathlib.Path) -> None:
    """A small file cannot ask for a lot of memory by naming one storage a hundred times."""
    one = tensor_pickle(4, 0, (4,), (1,))
    tensor = one[one.index(b'ctorch._utils') : -2]
    data = (
        b'\x80\x02}'
        + b''.join(b'X\x01\0\0\0' + bytes([65 + i]) + tensor + b's' for i in range(40))
        + b'.'
    )
    refuse(
        tmp_path / 'a.pt',
        with_pickle(data, **{'data/0': bytes(16)}),
        'the tensors have 160 elements, but only 4 are stored',
    )


def test_pt_deep_nesting(tmp_path: pathlib.Path) -> None:
    """A million nested tuples neither crash nor take for ever."""
    refuse(
        tmp_path / 'a.pt',
        with_pickle(b'\x80\x02)' + b'\x85' * 10**5 + b'.'),
        'expected a dict of tensors .* found a tuple',
    )
    doubling = b'\x80\x02)' + b'q\0h\0\x86' * 100 + b'}X\x01\0\0\0a0.'
    refuse(tmp_path / 'a.pt', with_pickle(doubling), 'opcode POP is not allowed')
