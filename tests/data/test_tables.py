"""Images in the rows of parquet and Arrow files, written by pyarrow and by `datasets`."""

from __future__ import annotations

import importlib
import json
import pickle

import numpy as np
import pytest
from support.data_errors import PNG, cut, fails
from support.data_files import SHAPE, encoded, everything, random_pixels, write_folder
from support.tiny import tiny_config

from jaxunet.data import classes, parquet
from jaxunet.data.pipeline import stream
from jaxunet.data.pixels import BadImage
from jaxunet.data.sources import open_source
from jaxunet.metrics import image_sets
from jaxunet.runtime.errors import UserError

pa = pytest.importorskip('pyarrow')
pq = importlib.import_module('pyarrow.parquet')
CONDITIONAL = tiny_config(model={'num_classes': 3, 'label_dropout': 0.1}, parallel={'devices': 1})
NUMBER = 10
PNGS = [encoded(random_pixels(i)) for i in range(NUMBER)]
LABELS = [i % 3 for i in range(NUMBER)]


def opened(path, labels=''):
    return open_source(str(path), image_shape=SHAPE, labels=labels)


def structs(values):
    return pa.array([value and {'bytes': value, 'path': None} for value in values])


def write(path, columns, **how):
    """A parquet or Arrow file, in row groups or record batches of 3."""
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    if path.suffix == '.parquet':
        pq.write_table(table, path, **{'row_group_size': 3} | how)
        return path
    with pa.OSFile(str(path), 'wb') as file, pa.ipc.new_stream(file, table.schema, **how) as out:
        out.write_table(table, 3)
    return path


@pytest.fixture(params=['parquet', 'arrow'])
def file(request, tmp_path):
    return tmp_path / f'x.{request.param}'


@pytest.mark.parametrize(
    'images',
    [structs(PNGS), pa.array(PNGS), pa.array(PNGS, pa.large_binary())],
    ids=['structs', 'bytes', 'large bytes'],
)
def test_the_forms_of_images(file, images):
    source = opened(write(file, {'id': LABELS, 'image': images, 'label': LABELS}))
    np.testing.assert_array_equal(everything(source), [random_pixels(i) for i in range(NUMBER)])
    assert (source.labels.tolist(), source.class_names) == (LABELS, ('0', '1', '2'))
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.load(np.array([7, 2])), [random_pixels(i) for i in (7, 2)])
    with image_sets.open_images(str(file)) as same:
        np.testing.assert_array_equal(everything(same), everything(source))


def test_several_files_are_one_set(file):
    for i, name in enumerate(('a', 'b')):
        half = slice(5 * i, 5 * i + 5)
        path = file.with_stem(f'{name}-0000{i}-of-00002')
        write(path, {'image': structs(PNGS[half]), 'kind': [f'k{x}' for x in LABELS[half]]})
    for path in (file.parent, file.with_stem('*'), file.with_stem('{a,b}-0000?-of-00002')):
        source = opened(path, 'kind')
        np.testing.assert_array_equal(everything(source), [random_pixels(i) for i in range(NUMBER)])
        assert (source.labels.tolist(), source.class_names) == (LABELS, ('k0', 'k1', 'k2'))
    file.with_stem('a-00000-of-00002').rename(file.with_stem('train-00000-of-00001'))
    file.with_stem('b-00001-of-00002').rename(file.with_stem('test-00000-of-00001'))
    fails(file.parent, rf'several parts of a set, test, train; .*train-\*{file.suffix}')


@pytest.mark.parametrize('form', ['parquet', 'save_to_disk', 'shards'])
def test_sets_written_by_the_library_datasets(tmp_path, form, monkeypatch):
    monkeypatch.setenv('HF_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    datasets = pytest.importorskip('datasets')
    features = datasets.Features(
        {'image': datasets.Image(), 'kind': datasets.ClassLabel(names=['cat', 'dog', 'ant'])}
    )
    images = [random_pixels(i) for i in range(NUMBER)]
    data = datasets.Dataset.from_dict({'image': images, 'kind': LABELS}, features=features)
    folder = tmp_path / 'set'
    if form == 'parquet':
        folder.mkdir()
        data.to_parquet(str(folder / 'train-00000-of-00001.parquet'))
    else:
        data.save_to_disk(str(folder), num_shards=2 if form == 'shards' else 1)
    source = opened(folder)
    np.testing.assert_array_equal(everything(source), images)
    assert (source.labels.tolist(), source.class_names) == (LABELS, ('cat', 'dog', 'ant'))
    assert source.labelled_by == 'the column kind'


def test_row_groups_beyond_the_memory(tmp_path, monkeypatch, told):
    path = write(tmp_path / 'x.parquet', {'image': PNGS})
    monkeypatch.setattr(parquet, 'KEPT', 3 * len(PNGS[0]))
    source = opened(path)
    assert 'a stream mixes the images of 1 groups at a time' in told[0]
    for i in (9, 0, 5, 0, 9):
        np.testing.assert_array_equal(source.load(np.array([i]))[0], random_pixels(i))
    assert len(source._container._cache._groups) == 1
    monkeypatch.setattr(parquet, 'MAX_GROUP', len(PNGS[0]))
    fails(path, r'row group 0 has .* GiB of images, more than')


def test_a_stream_resumes_exactly(file):
    write(file, {'image': structs(PNGS), 'label': LABELS})
    config = tiny_config(
        data={'batch_size': 4, 'image_size': SHAPE[:1]}, train={'steps': 9}, parallel={'devices': 1}
    )
    with stream(opened(file), config, 0, slice(0, 4)) as batches:
        expected = list(batches)[5:]
    with stream(opened(file), config, 5, slice(0, 4)) as batches:
        for batch, before in zip(batches, expected, strict=True):
            np.testing.assert_array_equal(batch['image'], before['image'])
            np.testing.assert_array_equal(batch['label'], before['label'])


@pytest.mark.parametrize(
    ('columns', 'message'),
    [
        ({'text': ['a'], 'n': [1]}, r'no column of images .* found text \(string\), n \(int64\)'),
        ({'image': [[PNG]]}, r'found nested lists in the column image'),
        ({'image': [[[[1, 2, 3]]]]}, r'found nested lists in the column image'),
        ({'a': [PNG], 'b': [PNG]}, r'expected one column of images, found a, b'),
        ({'image': [b'text'] * 4}, r'row 0: expected an image file, found: not an image'),
        ({'image': structs([None])}, r'no column of images'),
        (
            {'image': pa.array([None], pa.binary())},
            r'row 0: expected an image file, found: no bytes of an image',
        ),
        ({'image': pa.array([], pa.binary())}, r'expected at least one image, found no rows'),
    ],
)
def test_tables_without_images(file, columns, message):
    fails(write(file, columns), message)


@pytest.mark.parametrize(
    ('label', 'message'),
    [
        ([0.5] * 3, r'label: expected whole numbers or text as labels, found double'),
        ([0, None, 1], r'label: row 1: expected a label.* found nothing'),
        ([[1]] * 3, r'found list<'),
        ([0, -1, 1], r'label: labels: expected 0 to'),
        ([-1] * 3, r'all labels in the column label are -1'),
        (None, r'no column is named label: data\.labels=NAME takes one of text'),
    ],
)
def test_columns_that_are_no_labels(file, label, message):
    columns = {'image': [PNG] * 3, 'text': list('abc')} | (
        {} if label is None else {'label': label}
    )
    source = opened(write(file, columns))
    with pytest.raises(UserError, match=message):
        classes.check_classes(CONDITIONAL, source)
    assert opened(file, 'text').labels.tolist() == opened(file, 'TEXT').labels.tolist() == [0, 1, 2]
    for how in ('tex', 'folders'):
        with pytest.raises(UserError, match=rf"data\.labels: .*has no column '{how}'"):
            opened(file, how)


def test_a_row_without_an_image(file):
    source = opened(write(file, {'image': structs([PNG, None, PNG])}))
    with pytest.raises(BadImage, match=r'row 1: no bytes of an image'):
        source.load(np.array([1]))


def test_files_of_unequal_columns(tmp_path):
    write(tmp_path / 'a.parquet', {'image': [PNG], 'kind': ['x']})
    write(tmp_path / 'b.parquet', {'img': [PNG]})
    fails(tmp_path, r'files of unequal columns: the images are in image of a\.parquet, and in img')
    write(tmp_path / 'b.parquet', {'image': [PNG]})
    with pytest.raises(UserError, match=r'b\.parquet: files of unequal columns: has no kind'):
        opened(tmp_path, 'kind')


def test_files_whose_classes_have_other_names(file):
    """Label 0 is a cat in one and a dog in the other."""
    for stem, names in (('a', ['cat', 'dog']), ('b', ['dog', 'cat'])):
        features = {'label': {'_type': 'ClassLabel', 'names': names}}
        metadata = {'huggingface': json.dumps({'info': {'features': features}})}
        table = pa.table({'image': [PNG], 'label': [0]}).replace_schema_metadata(metadata)
        write(file.with_stem(stem), table)
    message = r'/b\..*: label: expected the classes of the first file, cat, dog, found dog, cat;'
    fails(file.parent, message)


def test_damaged_files(file):
    write(file, {'image': PNGS})
    cut(file, file.stat().st_size // 2)
    fails(file, r'not readable as (a parquet|an Arrow) file')
    write_folder(file.parent, {file.name: b'PAR1 but not quite'})
    fails(file, r'not readable as (a parquet|an Arrow) file')


def test_compressed_arrow(tmp_path):
    options = pa.ipc.IpcWriteOptions(compression='zstd')
    path = write(tmp_path / 'x.arrow', {'image': PNGS}, options=options)
    fails(path, r'its record batches are compressed')


def test_without_pyarrow(file, monkeypatch):
    write(file, {'image': PNGS})
    real = importlib.import_module

    def missing(name, *rest):
        if name.startswith('pyarrow'):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, 'import_module', missing)
    fails(file, r'need pyarrow, which is not installed; pip install "jaxunet\[parquet\]"')
