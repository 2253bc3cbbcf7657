"""Damaged, wrong and hostile batches of CIFAR-10, which are pickles."""

from __future__ import annotations

import os
import pickle

import pytest
from support.data_errors import PNG, fails
from support.data_files import (
    official_files,
    put,
    python2_batch,
    random_pixels,
    write_folder,
    write_tar,
)


class Evil:
    """A pickle that would run a command."""

    def __reduce__(self):
        return os.system, ('touch evil',)


def without(name: str) -> bytes:
    return python2_batch(random_pixels(0, (2, 32, 32, 3)), [1, 2]).replace(
        name.encode(), b'x' * len(name)
    )


def pickled(value: object) -> bytes:
    return pickle.dumps(value, 2)


GOOD = python2_batch(random_pixels(0, (2, 32, 32, 3)), [1, 2])
BATCHES: dict[str, tuple[bytes, str]] = {
    'runs a command': (
        pickled(Evil()),
        r'global "posix.system" is not allowed.*; the file is not safe and was not run',
    ),
    'evaluates': (
        b'cbuiltins\neval\n(S"1"\ntR.',
        r'byte 0: .*global "builtins.eval" is not allowed',
    ),
    'other numpy': (b'cnumpy\nload\n(S"x"\ntR.', r'global "numpy.load" is not allowed'),
    'cut off': (GOOD[:500], r'not a batch of CIFAR-10: .*copy or download it again'),
    'text': (b'hello', r'not a batch of CIFAR-10'),
    'empty': (b'', r'not a batch of CIFAR-10'),
    'a list': (pickled([1]), r'expected a dict, found list'),
    'no data': (without('data'), r'no entry "data"'),
    'no labels': (without('labels'), r'no entry "labels"'),
    'label': (
        python2_batch(random_pixels(0, (2, 32, 32, 3)), [1, 12]),
        r'labels: expected a list of integers 0 to 9',
    ),
    'counts': (
        GOOD.replace(b'K\x02M\x00\x0c', b'K\x03M\x00\x0c'),
        r'data: expected u1 of shape \(2, 3072\), found .*\(3, 3072\)',
    ),
    'dtype': (GOOD.replace(b'U\x02u1', b'U\x02f8'), r'data: expected u1 of shape'),
    'persistent': (b'\x80\x02X\x01\0\0\0aQ.', r'refers to objects outside the file'),
}


@pytest.mark.parametrize('case', BATCHES)
def test_cifar10_batches(tmp_path, case, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, match = BATCHES[case]
    files = official_files()
    files['cifar-10-batches-py/data_batch_1'] = data
    write_folder(tmp_path, files)
    fails(f'cifar10:{tmp_path}', rf'data_batch_1: .*{match}', shape=(32, 32, 3))
    assert not (tmp_path / 'evil').exists()


@pytest.mark.parametrize(
    ('prefix', 'batch', 'expected'),
    [
        ('cifar10:', 'data_batch_3', 'the five training batches'),
        ('cifar10_test:', 'test_batch', 'the test batch of CIFAR-10'),
    ],
)
def test_cifar10_with_a_batch_missing(tmp_path, prefix, batch, expected):
    files = official_files()
    del files[f'cifar-10-batches-py/{batch}']
    fails(
        f'{prefix}{write_folder(tmp_path, files)}',
        rf'no {batch}; expected {expected}',
        shape=(32, 32, 3),
    )


@pytest.mark.parametrize('form', ['folder', 'tar.gz'])
def test_test_images_of_other_files_than_the_official_ones(tmp_path, form):
    path = put(tmp_path, {'train/cat/a.png': PNG, 'test/cat/b.png': PNG}, form)
    fails(
        f'cifar10_test:{path}',
        r'not the official archive .* give the test images alone, without cifar10_test:',
        shape=(32, 32, 3),
    )


def test_cifar10_without_its_prefix(tmp_path):
    path = write_tar(tmp_path / 'cifar-10-python.tar.gz', official_files(), 'gz')
    fails(
        path,
        r'holds CIFAR-10\'s official batches, not image files; write data.path as '
        rf'"cifar10:{path}", or "cifar10_test:{path}" for the test images',
        shape=(32, 32, 3),
    )
