"""Labels of image files: from a file of labels, files beside the images, their names or folders."""

from __future__ import annotations

import json
import unicodedata

import numpy as np
import pytest
from support.data_errors import PNG
from support.data_files import SHAPE, encoded, everything, put, random_pixels, write_folder
from support.tiny import tiny_config

from jaxunet.data import classes
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError

FORMS = ('folder', 'zip', 'tar', 'tar.gz')
STORED = [f'{i // 1000:05d}/img{i:08d}.png' for i in (0, 1, 1000, 1001)]
UNCONDITIONAL = tiny_config(model={'num_classes': 0, 'label_dropout': 0.0})
CONDITIONAL = tiny_config(model={'num_classes': 2, 'label_dropout': 0.1}, parallel={'devices': 1})


def pngs(names):
    return {name: encoded(random_pixels(i)) for i, name in enumerate(names)}


def opened(path, labels=''):
    return open_source(str(path), image_shape=SHAPE, labels=labels)


def found(path, labels=''):
    source = opened(path, labels)
    return source.labels.tolist(), source.class_names, source.skipped


def nvlabs(labels):
    return {'dataset.json': json.dumps({'labels': labels}).encode()}


@pytest.mark.parametrize('form', FORMS)
def test_dataset_json_of_nvlabs(form, tmp_path, told):
    files = pngs(STORED)
    path = put(
        tmp_path, files | nvlabs([[name, 5 * (i % 2)] for i, name in enumerate(STORED)]), form
    )
    source = opened(path)
    assert (source.labels.tolist(), source.skipped) == ([0, 5, 0, 5], ())
    assert source.class_names == ('0', '1', '2', '3', '4', '5')
    np.testing.assert_array_equal(everything(source), [random_pixels(i) for i in range(4)])
    classes.check_classes(CONDITIONAL.replace(model={'num_classes': 6}), source)
    assert told[-1].endswith(': 4 images in 6 classes, labels from dataset.json')


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('labels', [{}, nvlabs(None), nvlabs([])])
def test_a_set_of_nvlabs_without_labels_has_no_classes_and_says_so(form, labels, tmp_path, told):
    source = opened(put(tmp_path, pngs(STORED) | labels, form))
    assert (source.class_names, source.skipped) == ((), ())
    with pytest.raises(UserError, match=r'has no class labels, as its .*(dataset\.json|NVlabs)'):
        classes.check_classes(CONDITIONAL, source)
    classes.check_classes(UNCONDITIONAL, source)
    assert len(told) == 1
    assert 'no class labels, as its ' in told[0]


def test_another_file_of_that_name_is_no_labels(tmp_path):
    files = pngs(['cat/1.png', 'dog/1.png']) | {'dataset.json': b'{"title": "my pets"}'}
    assert found(put(tmp_path, files, 'folder'))[:2] == ([0, 1], ('cat', 'dog'))


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize(
    ('name', 'text'),
    [
        ('metadata.csv', 'file_name,label\na.png,dog\nsub/b.png,"cat, tame"\n'),
        (
            'metadata.csv',
            '\ufeffcaption,file_name,label\r\nx,./a.png,dog\r\n"y\nz",sub/b.png,"cat, tame"',
        ),
        ('labels.csv', 'filename,kind\na.png,dog\nsub/b.png,"cat, tame"\n'),
        ('metadata.csv', 'file_name;label\r\na.png;dog\r\nsub/b.png;cat, tame\r\n'),
        ('Metadata.CSV', 'File_Name,Text,LABEL\na.png,x,dog\nsub/b.png,y,"cat, tame"\n'),
        (
            'metadata.jsonl',
            '{"file_name": "a.png", "label": "dog", "text": "x"}\n\n'
            '{"file_name": "sub/b.png", "label": "cat, tame"}',
        ),
    ],
)
def test_tables_beside_the_images(form, name, text, tmp_path):
    path = put(tmp_path, pngs(['a.png', 'sub/b.png']) | {name: text.encode()}, form)
    assert found(path) == ([1, 0], ('cat, tame', 'dog'), ())


def test_paths_of_a_table_begin_at_its_folder(tmp_path):
    files = pngs(['set/a.png', 'set/b.png']) | {'set/labels.csv': b'path,x\na.png,1\nb.png,0'}
    assert found(put(tmp_path, files, 'zip')) == ([1, 0], ('0', '1'), ())


@pytest.mark.parametrize('form', FORMS)
def test_tables_of_other_systems(form, tmp_path):
    """Windows separates folders by backslashes, and macOS has letters for accents."""
    table = 'file_name,label\nb\\1.png,dog\ncafé.png,cat'.encode()
    names = ['b/1.png', unicodedata.normalize('NFD', 'café.png')]
    path = put(tmp_path, pngs(names) | {'metadata.csv': table}, form)
    assert found(path) == ([1, 0], ('cat', 'dog'), ())


def test_one_of_several_columns(tmp_path):
    table = b'file_name,fine,coarse\n00/a.png,10,x\n01/b.png,2,y\n'
    path = put(tmp_path, pngs(['00/a.png', '01/b.png']) | {'metadata.csv': table}, 'folder')
    assert found(path, 'coarse')[:2] == ([0, 1], ('x', 'y'))
    assert found(path, 'fine')[0] == found(path, 'Fine')[0] == [10, 2]
    assert found(path)[1] == found(path, 'folders')[1] == ('00', '01')
    with pytest.raises(UserError, match=r'no labels named \'coars\'; did you mean "coarse"\?'):
        found(path, 'coars')
    flat = put(tmp_path, pngs(['a.png']) | {'metadata.csv': b'file_name,text,k\na.png,x,y'}, 'zip')
    with pytest.raises(UserError, match=r'as no column is named label: .* one of text, k'):
        classes.check_classes(CONDITIONAL, opened(flat))


def test_names_of_files_as_guided_diffusion_reads_them(tmp_path):
    names = ['n02_5.png', 'n01_0000_1.png', 'x/n02_1.png']
    assert found(put(tmp_path, pngs(names), 'folder'), 'names') == ([0, 1, 1], ('n01', 'n02'), ())
    path = put(tmp_path, pngs(['cat_1.png', 'dog1.png']), 'zip')
    with pytest.raises(UserError, match=r'dog1\.png: expected a class before an underscore'):
        opened(path, 'names')


@pytest.mark.parametrize('form', FORMS)
def test_files_beside_each_image(form, tmp_path):
    files = {
        'a/1.png': PNG,
        'a/1.cls': b'3\n',
        'a/1.json': b'{"kind": "dog", "label": 1}',
        'a/1.txt': b'a dog',
        'a/2.png': PNG,
        'a/2.cls': b'0',
        'a/2.json': b'{"kind": "cat", "label": 0}',
        'a/2.txt': b'a cat',
    }
    path = put(tmp_path, files, form)
    assert found(path) == ([3, 0], ('0', '1', '2', '3'), ())
    assert found(path, 'kind') == found(path, 'Kind') == ([1, 0], ('cat', 'dog'), ())
    assert found(path, 'txt')[1] == found(path, 'TXT')[1] == ('a cat', 'a dog')
    del files['a/1.cls'], files['a/2.cls']
    (tmp_path / 'b').mkdir()
    assert found(put(tmp_path / 'b', files, form)) == ([1, 0], ('0', '1'), ())


@pytest.mark.parametrize(
    ('files', 'message'),
    [
        (nvlabs([['a.png', 0]]), r'dataset\.json: no label for b\.png;'),
        (
            nvlabs([['a.png', 0], ['b.png', 1], ['c.png', 1], ['d.png', 1]]),
            r'labels\[2\]: c\.png: no such image in the set \(2 are like that\)',
        ),
        (nvlabs([['a.png', 0], ['a.png', 1]]), r'labels\[1\]: a\.png: has a label already, in lab'),
        (
            nvlabs([['a.png', 0], ['b.png', [0, 1]]]),
            r'labels\[1\]: b\.png: expected a whole number',
        ),
        (nvlabs([['a.png', 0], ['b.png', 1.5]]), r'as the label, found 1\.5'),
        (nvlabs([['a.png', -1], ['b.png', 1]]), r'dataset\.json: labels: expected 0 to .*found -1'),
        (nvlabs([['a.png', 0], ['b.png']]), r'labels\[1\]: expected \["PATH", LABEL\]'),
        (nvlabs({'a.png': 0}), r'labels: expected a list or null'),
        ({'dataset.json': b'{"labels": [["a.png", 0'}, r'dataset\.json: expected a JSON object'),
        ({'metadata.csv': b'file_name,label\na.png,\nb.png,x'}, r'line 2: a\.png: .*found nothing'),
        ({'metadata.csv': b'id,label\na.png,x'}, r'expected a column file_name, found id, label'),
        (
            {'labels.csv': b'file_name,label\na.png,%s\nb.png,1' % (b'9' * 5000)},
            r'labels\.csv: labels: found a number of more than 64 bits',
        ),
        ({'labels.csv': b'id,breed\na,x\nb,y'}, r'expected a column file_name, found id, breed;'),
        ({'labels.csv': b'a.png,cat\nb.png,dog'}, r'column file_name, found a\.png, cat; mend'),
        ({'Labels.csv': b'file_name,label\n'}, r'Labels\.csv: expected rows, found none;'),
        (
            {'labels.csv': b'image,label\na,x\nb,y'},
            r'a: no such image in the set \(2 are like that\); did you mean "a\.png"\?',
        ),
        ({'labels.csv': b'file_name,label\na.png,"x'}, r'labels\.csv: not a readable CSV file'),
        ({'labels.csv': b'file_name,label\na.png,\xff'}, r'labels\.csv: not a readable CSV file'),
        ({'metadata.jsonl': b'{"file_name": "a.png", "label": 0}\n{'}, r'jsonl: line 2: expected'),
        ({'metadata.jsonl': b'{"file_name": 3, "label": 0}'}, r'line 1: expected a path in file_n'),
        (
            {'metadata.jsonl': b'{"file_name": "a.png", "label": true}'},
            r'line 1: a\.png: expected a label, a whole number or the name of a class, found True',
        ),
        ({'a.cls': b'1'}, r'b\.png: expected a \.cls beside it, as other images have'),
        ({'a.cls': b'1', 'b.cls': b' \n'}, r'b\.cls: expected a label.* found nothing'),
        ({'a.cls': b'1', 'b.cls': b'1', 'c.cls': b'1'}, r'c\.cls: the label of an image that'),
    ],
)
def test_mistakes_in_labels_end_a_conditional_run_alone(files, message, tmp_path):
    source = opened(write_folder(tmp_path, {'a.png': PNG, 'b.png': PNG} | files))
    assert source.labels.tolist() == [-1, -1]
    classes.check_classes(UNCONDITIONAL, source)
    with pytest.raises(UserError, match=message) as caught:
        classes.check_classes(CONDITIONAL, source)
    assert '\n' not in str(caught.value)


def test_mistakes_in_labels_that_are_named_end_every_run(tmp_path):
    path = write_folder(tmp_path, {'a.png': PNG, 'metadata.csv': b'file_name,kind\nb.png,x'})
    with pytest.raises(UserError, match=r'metadata\.csv: line 2: b\.png: no such image in the set'):
        opened(path, 'kind')


def test_a_table_of_something_else_leaves_the_folders_their_labels(tmp_path):
    table = {'labels.csv': b'ClassId,Name\n0,cat\n1,dog'}
    path = put(tmp_path, pngs(['cat/1.png', 'dog/1.png']) | table, 'folder')
    assert found(path)[:2] == ([0, 1], ('cat', 'dog'))
    with pytest.raises(UserError, match=r'csv: expected a column file_name, found ClassId, Name'):
        opened(path, 'Name')


def test_two_tables_are_two_sets(tmp_path):
    table = b'file_name,label\n1.png,0'
    files = pngs(['train/1.png', 'test/1.png'])
    files |= {'train/metadata.csv': table, 'test/metadata.csv': table}
    source = opened(write_folder(tmp_path, files))
    assert source.class_names == ()
    assert 'expected one file of labels, found' in source.unlabelled_by


def test_arrays_have_no_other_labels(tmp_path):
    np.savez(tmp_path / 'x.npz', images=np.zeros((2, *SHAPE), np.uint8))
    for path in (tmp_path / 'x.npz', 'digits:'):
        with pytest.raises(UserError, match=r'data\.labels: kind chooses .*arrays'):
            opened(path, 'kind')
