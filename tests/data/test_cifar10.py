"""CIFAR-10: the official pickled batches, the download, and class folders in their place."""

from __future__ import annotations

import pathlib
import pickle
import warnings

import numpy as np
import pytest
from support.data_files import (
    everything,
    official_files,
    python2_batch,
    random_pixels,
    write_folder,
    write_tar,
)

from jaxunet.data import cifar10
from jaxunet.data.sources import open_source
from jaxunet.metrics.image_sets import open_images
from jaxunet.runtime.download import digest
from jaxunet.runtime.errors import UserError


def test_the_handmade_batch_is_a_pickle_that_numpy_reads():
    pixels = random_pixels(1, (2, 32, 32, 3))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # numpy's, of its module's old name
        content = pickle.loads(python2_batch(pixels, [3, 4]), encoding='bytes')
    np.testing.assert_array_equal(
        content[b'data'].reshape(-1, 3, 32, 32), pixels.transpose(0, 3, 1, 2)
    )
    assert content[b'labels'] == [3, 4]


FORMS = pytest.mark.parametrize('form', ['folder', 'folder inside', 'tar.gz'])


def official_copy(folder: pathlib.Path, form: str) -> pathlib.Path:
    if form == 'tar.gz':
        return write_tar(folder / 'cifar-10-python.tar.gz', official_files(), 'gz')
    write_folder(folder, official_files())
    return folder / 'cifar-10-batches-py' if form == 'folder' else folder


@FORMS
def test_official_cifar10_from_a_local_copy(tmp_path, form):
    path = official_copy(tmp_path, form)
    source = open_source(f'cifar10:{path}', image_shape=(32, 32, 3))
    np.testing.assert_array_equal(
        everything(source), np.concatenate([random_pixels(i, (4, 32, 32, 3)) for i in range(1, 6)])
    )
    assert source.labels.tolist() == [(i + j) % 10 for i in range(1, 6) for j in range(4)]
    assert source.class_names[0] == 'airplane'
    ships = open_source(f'cifar10:{path}', image_shape=(16, 16, 1), classes=('ship',))
    assert everything(ships).shape == (1, 16, 16, 1)


@FORMS
def test_the_test_images_of_the_official_archive(tmp_path, form):
    path = f'cifar10_test:{official_copy(tmp_path, form)}'
    source = open_source(path, image_shape=(32, 32, 3))
    np.testing.assert_array_equal(everything(source), random_pixels(6, (4, 32, 32, 3)))
    assert source.labels.tolist() == [6, 7, 8, 9]
    assert (source.name, source.class_names) == (path, cifar10.CLASSES)
    with open_images(path) as compared:
        np.testing.assert_array_equal(everything(compared), everything(source))


def test_the_test_batch_alone(tmp_path):
    (name, data), *_ = [f for f in official_files().items() if f[0].endswith('test_batch')]
    write_folder(tmp_path, {name: data})
    assert len(open_source(f'cifar10_test:{tmp_path}', image_shape=(32, 32, 3))) == 4


def test_the_official_archive_after_a_hidden_file(tmp_path):
    """macOS's tar writes one in front of each file."""
    files = {'cifar-10-batches-py/._batches.meta': b'attributes'} | official_files()
    archive = write_tar(tmp_path / 'cifar-10-python.tar.gz', files, 'gz')
    assert len(open_source(f'cifar10:{archive}', image_shape=(32, 32, 3))) == 20


def test_download_is_checked_cached_and_atomic(tmp_path, monkeypatch):
    archive = write_tar(tmp_path / 'made.tar.gz', official_files(), 'gz')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(cifar10, 'URL', archive.as_uri())
    with pytest.raises(UserError, match=r'MD5 \w+, expected c58f30108f718f92721af3b95e74349a'):
        open_source('cifar10:', image_shape=(32, 32, 3))
    assert list((tmp_path / 'cache' / 'jaxunet').iterdir()) == []
    monkeypatch.setattr(cifar10, 'MD5', digest(archive, 'md5'))
    assert len(open_source('cifar10:', image_shape=(32, 32, 3))) == 20
    archive.unlink()  # the second time needs no network
    assert len(open_source('cifar10:', image_shape=(32, 32, 3))) == 20
    assert len(open_source('cifar10_test:', image_shape=(32, 32, 3))) == 4
    (tmp_path / 'cache' / 'jaxunet' / cifar10.ARCHIVE).write_bytes(b'damaged')
    for path in ('cifar10:', 'cifar10_test:'):
        with pytest.raises(
            UserError, match=rf'cannot download .*data.path={path}/path/to/cifar-10-python.tar.gz'
        ):
            open_source(path, image_shape=(32, 32, 3))


def test_class_folders_as_cifar10(shared_dir):
    path = shared_dir / 'data' / 'cifar10_test.tar.xz'
    source = open_source(f'cifar10:{path}', image_shape=(32, 32, 3))
    assert np.bincount(source.labels).tolist() == [1000] * 10
    assert source.class_names == cifar10.CLASSES
