"""Small files that could take endless time or memory, or end a reader with a traceback."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np

from support.data_files import encoded, python2_batch, random_pixels
from support.readers import (
    classifier_parts,
    npz,
)
from support.readers import lines as joined_lines
from support.result_files import profile_csv, results, sweep_parts
from support.weight_cases import archive, safetensors_bytes, with_header

DEEP = '[' * 100_000
PIXELS = random_pixels(0, (2, 8, 8, 3))


def tar_header(size: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a member, with 12 bytes that say its size."""
    block = bytearray(tarfile.TarInfo('a.png').tobuf(tarfile.GNU_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b' ' * 8
    block[148:156] = b'%06o\0 ' % sum(block)
    return bytes(block)


def binary(size: int) -> bytes:
    """A size in GNU tar's binary form, for sizes too large for its octal digits."""
    return (b'\x80' if size >= 0 else b'\xff') + (size % 2**88).to_bytes(11, 'big')


def members(*blocks: bytes) -> bytes:
    return b''.join(blocks) + bytes(2 * tarfile.BLOCKSIZE)


def zip_of(names: list[str]) -> bytes:
    """A zip of empty entries with names that zipfile would refuse to write or warn about."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w') as target:
        for name in names:
            target.NameToInfo.clear()
            info = zipfile.ZipInfo('x')
            info.filename = name
            target.open(info, 'w').close()
    return file.getvalue()


def nested(levels: int = 60) -> bytes:
    """Opcodes that push a tuple of tuples with 2 ** levels leaves."""
    keys = range(100, 100 + levels)
    return b')' + b''.join(b'q%ch%c\x86' % (key, key) for key in keys)


def torch_file(pickle: bytes) -> bytes:
    return archive({'a/data.pkl': pickle, 'a/version': b'3\n'})


def encrypted(data: bytes) -> bytes:
    """A zip whose entries claim to be encrypted."""
    changed = bytearray(data)
    for signature, offset in ((b'PK\3\4', 6), (b'PK\1\2', 8)):
        at = changed.find(signature)
        while at >= 0:
            changed[at + offset] |= 1
            at = changed.find(signature, at + 4)
    return bytes(changed)


def with_text(name: str, text: str) -> bytes:
    """The file of a classifier with the array `name` replaced by a text."""
    return archive(classifier_parts() | npz(**{name: np.array(text)}))


def sweep_with(**changes: object) -> bytes:
    """A sweep whose first row has changed fields; a field that is None is removed."""
    parts = sweep_parts()
    row = {k: v for k, v in (json.loads(parts['a.json']) | changes).items() if v is not None}
    return b'\n'.join([parts['sweep.json'], json.dumps(row).encode(), parts['b.json']])


def batch_with(key: bytes) -> bytes:
    """A batch of CIFAR-10 with a further key that these pickle opcodes make."""
    whole = python2_batch(random_pixels(0, (1, 32, 32, 3)), [1])
    assert whole[:3] == b'\x80\x02}'
    assert whole[-2:] == b'u.'
    return whole[:-1] + key + b'K\0s.'


def shape_with(shape: bytes) -> bytes:
    """A batch of CIFAR-10 whose array has a shape that these pickle opcodes make."""
    whole = python2_batch(random_pixels(0, (1, 32, 32, 3)), [1])
    usual = b'K\x01M\x00\x0c\x86'
    assert whole.count(usual) == 1
    return whole.replace(usual, shape)


ZEROS = np.zeros(2**23, np.uint8)  # 8 MiB, which deflate compresses a thousandfold
MU = {'mu': np.zeros(2), 'sigma': np.eye(2)}
TENSOR = {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}

# Reader, file, expected message. Files that are large or slow to make are made only when tried.
Hostile = tuple[str, Callable[[], bytes], str]
HOSTILE: dict[str, Hostile] = {
    'tar size of 2^70': ('tar', lambda: members(tar_header(binary(2**70))), 'impossible size'),
    'tar size of -512': ('tar', lambda: members(tar_header(binary(-512))), 'impossible size'),
    'tar name of 5 GiB': (
        'tar.gz',
        lambda: gzip.compress(
            tar_header(binary(5 * 2**30), tarfile.GNUTYPE_LONGNAME) + bytes(2**20)
        ),
        'a header of more than 262144 bytes',
    ),
    'zip entry without a name': (
        'zip',
        lambda: zip_of(['a.png', '']),
        'it has an entry without a name',
    ),
    'zip entries of one name': (
        'torch file',
        lambda: zip_of([f'a/{i}' for i in range(8000)] + ['a/0']),
        "two entries of one name, 'a/0'",
    ),
    'npz of LZMA': (
        'compared npz',
        lambda: archive(npz(images=PIXELS), zipfile.ZIP_LZMA),
        'compressed by method 14',
    ),
    'encrypted npz': ('npz', lambda: encrypted(archive(npz(images=PIXELS))), 'is encrypted'),
    'encrypted statistics': ('statistics', lambda: encrypted(archive(npz(**MU))), 'is encrypted'),
    'torch pickle of nested tuples': (
        'torch file',
        lambda: torch_file(b'\x80\x02' + nested() + b'Q.'),
        'expected a reference to a storage',
    ),
    'CIFAR key of nested tuples': (
        'cifar10',
        lambda: batch_with(nested()),
        'expected text or a number as the key of a dict, found tuple',
    ),
    'CIFAR shape of nested tuples': (
        'cifar10',
        lambda: shape_with(nested()),
        r'expected u1 of shape \(1, 3072\), found .* of shape \(tuple, tuple\)',
    ),
    'safetensors without metadata': (
        'safetensors',
        lambda: with_header({'__metadata__': None, 'a': TENSOR}, bytes(4)),
        'a',
    ),
    'empty statistics': (
        'statistics',
        lambda: archive(npz(mu=np.zeros(0), sigma=np.zeros((0, 0)))),
        'd of 1 or more',
    ),
    'statistics of text': (
        'statistics',
        lambda: archive(npz(mu=np.array(['a']), sigma=np.array([['b']]))),
        'mu: expected numbers',
    ),
    'deep statistics': (
        'statistics',
        lambda: archive(npz(**MU, jaxunet_protocol=np.array(DEEP))),
        'nested more than 32 deep',
    ),
    'classifier with an infinite size': (
        'classifier',
        lambda: with_text('architecture', '{"channels": 1e999}'),
        'the number 1e999 is out of range',
    ),
    'deep classifier': (
        'classifier',
        lambda: with_text('architecture', DEEP),
        'nested more than 32 deep',
    ),
    'deep rows': ('rows', DEEP.encode, 'line 1: .*nested more than 32 deep'),
    'deep choices': ('choices', DEEP.encode, 'choices.json: .*nested more than 32 deep'),
    'deep metadata': ('metadata', DEEP.encode, 'nested more than 32 deep'),
    'deep configs': ('step configs', DEEP.encode, 'nested more than 32 deep'),
    'config that is a number': (
        'step configs',
        lambda: b'{"a": 1}',
        'a: expected a JSON object, found 1; expected the name of each method and its config',
    ),
    'row without its batch': (
        'sweep',
        lambda: sweep_with(batch=None),
        'results.jsonl, line 1: expected a field batch',
    ),
    'row without its time': (
        'sweep',
        lambda: sweep_with(step_ms=None),
        'results.jsonl, line 1: expected a field step_ms',
    ),
    'row whose key is a list': (
        'sweep',
        lambda: sweep_with(key=['a']),
        'results.jsonl, line 1: key: expected text',
    ),
    'row with a path of its own': (
        'sweep',
        lambda: sweep_with(
            profile='/etc/passwd',
            phase_ms={},
            busy_ms=1.0,
            idle_share=0.0,
            launches=1,
        ),
        "profile: expected a file in the sweep's folder",
    ),
    'profile row with a value more': (
        'profile',
        lambda: joined_lines(profile_csv()) + b',9',
        'expected .* values, found more',
    ),
    'snapshot of infinitely many updates': (
        'snapshot',
        lambda: safetensors_bytes({'a': np.ones(1, '<f4')}, {'snapshot': '{"updates": 1e999}'}),
        'damaged|the number 1e999 is out of range',
    ),
    'benchmark row without its time': (
        'benchmark rows',
        lambda: results('step/rows.jsonl')()['first'].replace(b'"median_ms"', b'"median"'),
        'a benchmark row: expected a field median_ms',
    ),
    'kernel row whose time is text': (
        'kernel rows',
        lambda: json.dumps(
            json.loads(results('kernels/rows.jsonl')()['first']) | {'us_xla': 'a'}
        ).encode(),
        "us_xla: expected a number, found 'a'",
    ),
}
# Reader and file, for files that expand to more than a limit of 4 MiB.
EXPANDING: dict[str, tuple[str, Callable[[], bytes]]] = {
    'npz': ('compressed npz', lambda: archive(npz(images=ZEROS[None, None]), zipfile.ZIP_DEFLATED)),
    'labels': (
        'compressed npz',
        lambda: archive(npz(images=PIXELS, labels=ZEROS), zipfile.ZIP_DEFLATED),
    ),
    'statistics': ('statistics', lambda: archive(npz(**MU, jaxunet_protocol=ZEROS), 8)),
    'zip': ('deflated zip', lambda: archive({'a.png': ZEROS.tobytes()}, zipfile.ZIP_DEFLATED)),
    'tar.gz': ('tar.gz', lambda: gzip.compress(tar_of(ZEROS.tobytes()))),
    'prepare_data': ('prepare_data', lambda: gzip.compress(tar_of(ZEROS.tobytes()))),
}


def tar_of(content: bytes) -> bytes:
    info = tarfile.TarInfo('a/a.png')
    info.size = len(content)
    rest = -len(content) % tarfile.BLOCKSIZE
    image = encoded(PIXELS[0])
    second = tarfile.TarInfo('a/b.png')
    second.size = len(image)
    return members(
        info.tobuf(), content + bytes(rest), second.tobuf(), image + bytes(-len(image) % 512)
    )
