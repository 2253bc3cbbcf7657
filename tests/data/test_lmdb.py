"""LMDB databases of image files, as LSUN is published."""

from __future__ import annotations

import importlib
import pickle

import numpy as np
import pytest
from support.data_errors import PNG, cut, fails
from support.data_files import SHAPE, encoded, everything, random_pixels
from support.tiny import tiny_config

from jaxunet.data import classes
from jaxunet.data.pipeline import stream
from jaxunet.data.pixels import BadImage
from jaxunet.data.sources import open_source
from jaxunet.metrics import image_sets
from jaxunet.runtime.errors import UserError

KEYS = [b'0a', b'1\0', b'b\xff', b'c/d', b'e'] + [b'f%03d' % i for i in range(40)]


@pytest.fixture
def lmdb():
    return pytest.importorskip('lmdb')


def write(library, path, values):
    with (
        library.open(str(path), map_size=2**24) as environment,
        environment.begin(write=True) as to,
    ):
        for key, value in values.items():
            to.put(key, value)
    return path


def images(kind='WEBP'):
    options = {'lossless': True} if kind == 'WEBP' else {}
    return {key: encoded(random_pixels(i), kind, **options) for i, key in enumerate(KEYS)}


def test_images_by_key(lmdb, tmp_path, told):
    path = write(lmdb, tmp_path / 'bedroom_lmdb', images() | {b'length': b'45'})
    expected = [random_pixels(i) for i in range(len(KEYS))]
    for each in (path, path / 'data.mdb'):
        source = open_source(str(each), image_shape=SHAPE)
        np.testing.assert_array_equal(everything(source), expected)
        assert source.class_names == ()
    assert '45 keys, listed in ' in told[0]
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.load(np.array([7, 2])), [expected[i] for i in (7, 2)])
    with image_sets.open_images(str(path)) as same:
        np.testing.assert_array_equal(everything(same), expected)


def test_a_stream_resumes_exactly(lmdb, tmp_path):
    path = write(lmdb, tmp_path / 'set', images('PNG'))
    config = tiny_config(
        data={'batch_size': 9, 'image_size': SHAPE[:1]}, train={'steps': 8}, parallel={'devices': 1}
    )
    source = open_source(str(path), image_shape=SHAPE)
    with stream(source, config, 0, slice(0, 9)) as batches:
        expected = list(batches)[4:]
    with stream(source, config, 4, slice(0, 9)) as batches:
        for batch, before in zip(batches, expected, strict=True):
            np.testing.assert_array_equal(batch['image'], before['image'])


def test_a_value_that_is_no_image(lmdb, tmp_path):
    path = write(lmdb, tmp_path / 'set', {b'a': PNG, b'b\n': b'text', b'c': PNG})
    source = open_source(str(path), image_shape=SHAPE)
    with pytest.raises(BadImage, match=r'key b\\n: '):
        source.load(np.array([1]))


def test_databases_that_do_not_fit(lmdb, tmp_path):
    fails(write(lmdb, tmp_path / 'texts', {b'a': b'text'}), r'key a: expected an image file')
    fails(write(lmdb, tmp_path / 'none', {}), r'expected at least one image, found no rows')
    path = write(lmdb, tmp_path / 'set', images())
    source = open_source(str(path), image_shape=SHAPE)
    config = tiny_config(model={'num_classes': 2, 'label_dropout': 0.1}, parallel={'devices': 1})
    with pytest.raises(UserError, match=r'has no class labels'):
        classes.check_classes(config, source)
    with pytest.raises(UserError, match=r"data\.labels: .*an LMDB has no labels, found 'kind'"):
        open_source(str(path), image_shape=SHAPE, labels='kind')


@pytest.mark.parametrize('size', [0, 100, 4096, 3 * 4096])
def test_truncated_databases(lmdb, tmp_path, size):
    path = write(lmdb, tmp_path / 'set', images())
    cut(path / 'data.mdb', size)
    fails(path, r'not a readable LMDB database')


def test_without_lmdb(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    (tmp_path / 'data.mdb').write_bytes(b'x')
    monkeypatch.setattr(importlib, 'import_module', missing)
    fails(tmp_path, r'needs lmdb, which is not installed; pip install "jaxunet\[lmdb\]"')
