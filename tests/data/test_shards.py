"""Sets of several files: webdataset's shards, named by braces, by * or by their folder."""

from __future__ import annotations

import gc
import io
import pathlib
import tarfile
import tracemalloc

import numpy as np
import pytest
from support.data_errors import PNG, fails
from support.data_files import SHAPE, encoded, everything, random_pixels, write_folder, write_tar
from support.tiny import tiny_config

from jaxunet.data import classes, read_at, tar
from jaxunet.data.pipeline import stream
from jaxunet.data.shards import named_files
from jaxunet.data.sources import check_path, open_source
from jaxunet.metrics import image_sets
from jaxunet.runtime.errors import UserError

CONDITIONAL = tiny_config(model={'num_classes': 9, 'label_dropout': 0.1}, parallel={'devices': 1})


def opened(path, **how):
    return open_source(str(path), image_shape=SHAPE, **how)


def written(folder: pathlib.Path, count=10, shards=3, shape=SHAPE, suffixes=('cls', 'txt')):
    """Shards of `count` images, the label of image i being i % 4."""
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        files = {}
        for i in range(shard, count, shards):
            texts = {'cls': b'%d' % (i % 4), 'txt': b'image %d' % i, 'json': b'{"kind": "k%d"}' % i}
            files |= {f'{i:05d}.{suffix}': texts[suffix] for suffix in suffixes}
            files[f'{i:05d}.png'] = encoded(random_pixels(i, shape))
        write_tar(folder / f'x-{shard:03d}.tar', files)
    return folder


ORDER = [0, 3, 6, 9, 1, 4, 7, 2, 5, 8]  # of `written`, by shard


@pytest.mark.parametrize(
    'name',
    ['', 'x-{000..002}.tar', 'x-{000,001,002}.tar', 'x-*.tar', 'x-00?.tar', 'x-00{0..2}.tar'],
)
def test_shards_are_one_set(tmp_path, name, monkeypatch):
    monkeypatch.setattr(read_at, 'MOST_OPEN', 2)
    path = written(tmp_path / 'set') / name
    check_path(str(path))
    source = opened(path)
    assert (source.labels % 4).tolist() == [i % 4 for i in ORDER]
    assert (source.class_names, source.skipped) == (('0', '1', '2', '3'), ())
    np.testing.assert_array_equal(everything(source), [random_pixels(i) for i in ORDER])
    assert opened(path, labels='txt').class_names[1] == 'image 1'
    with image_sets.open_images(str(path)) as same:
        np.testing.assert_array_equal(everything(same), everything(source))
        assert same.class_names == source.class_names


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_shards_written_by_webdataset(tmp_path):
    wds = pytest.importorskip('webdataset')
    for shard in range(2):
        with wds.TarWriter(str(tmp_path / f'x-{shard}.tar')) as writer:
            for i in range(3):
                pixels = random_pixels(3 * shard + i)
                label = (5 * i + shard) % 7
                writer.write(
                    {'__key__': f'{i:03d}', 'png': pixels / 255, 'cls': label, 'json': {'n': label}}
                )
    path = str(tmp_path / 'x-{0..1}.tar')
    samples = list(wds.WebDataset(path, shardshuffle=False).decode('rgb8'))
    gc.collect()  # the library leaves its files open
    source = opened(path)
    np.testing.assert_array_equal(everything(source), [sample['png'] for sample in samples])
    assert source.labels.tolist() == [sample['cls'] for sample in samples]
    assert opened(path, labels='n').labels.tolist() == source.labels.tolist()


def test_the_names_that_labels_could_have(tmp_path):
    written(tmp_path, suffixes=('cls', 'txt'))
    with pytest.raises(UserError, match=r"no labels named 'txy'; did you mean .*one of cls, txt$"):
        opened(tmp_path, labels='txy')


def test_folders_inside_shards_are_classes(tmp_path):
    for shard in 'ab':
        write_tar(tmp_path / f'{shard}.tar', {'cat/1.png': PNG, 'dog/1.png': PNG})
    source = opened(tmp_path)
    assert (source.labels.tolist(), source.class_names) == ([0, 1, 0, 1], ('cat', 'dog'))


def test_shards_of_unequal_keys(tmp_path):
    written(tmp_path, shards=2)
    write_tar(tmp_path / 'x-002.tar', {'77.png': PNG})
    source = opened(tmp_path)
    with pytest.raises(UserError, match=r'shards of unequal keys: x-000\.tar has \.cls .*x-002'):
        classes.check_classes(CONDITIONAL, source)


@pytest.mark.parametrize(
    ('files', 'name', 'message'),
    [
        (['x-0.tar'], 'x-{0..2}.tar', r'x-1\.tar: no such file'),
        (['x-0.tar'], 'y-*.tar', r'y-\*\.tar: no file has such a name'),
        (['x-0.tar'], 'x-{2..1}.tar', r'\{2\.\.1\}: expected 1 to 1,000,000 numbers, found 0'),
        (['x-0.tar'], 'x-{0..99999999}.tar', r'numbers, found 100,000,000'),
        (['x-0.tar', 'x-1.png'], 'x-*', r'expected files of one kind, \.tar.*found \.png, \.tar'),
        (['train-0001.tar', 'val-0001.tar'], '', r'parts of a set, train, val; .*val-\*\.tar'),
    ],
)
def test_names_that_do_not_fit(tmp_path, files, name, message):
    for file in files:
        write_tar(tmp_path / file, {'1.png': PNG})
    fails(tmp_path / name, message)


def test_compressed_and_empty_shards(tmp_path):
    write_tar(tmp_path / '1.tar', {'1.png': PNG}, 'gz')
    fails(tmp_path / '{1,1}.tar', r'1\.tar: a compressed tar among several')
    write_tar(tmp_path / '1.tar', {})
    fails(tmp_path / '{1,1}.tar', r'1\.tar: expected files in this tar, found none')


def test_a_tar_beside_images_is_no_shard(tmp_path):
    write_tar(write_folder(tmp_path, {'1.png': PNG}) / '1.tar', {'1.png': PNG})
    assert opened(tmp_path).skipped[0][0] == '1.tar'


def test_a_file_with_braces_in_its_name(tmp_path):
    write_tar(tmp_path / '{1..2}.tar', {'1.png': PNG})
    assert named_files(tmp_path / '{1..2}.tar') == [tmp_path / '{1..2}.tar']
    assert len(opened(tmp_path / '{1..2}.tar')) == 1


@pytest.mark.parametrize('form', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize('name', ['a', 'é', 'd/' * 60 + 'a', 'd/' * 20 + 90 * 'a'])
def test_the_quick_reader_of_tars_agrees_with_tarfile(tmp_path, form, name, monkeypatch):
    with tarfile.open(tmp_path / '1.tar', 'w', format=form) as archive:
        for i in range(3):
            info = tarfile.TarInfo(f'{name}{i}.png')
            info.mtime, info.size = 1.5, len(PNG)
            archive.addfile(info, io.BytesIO(PNG))
            archive.addfile(tarfile.TarInfo(f'{name}{i}.txt'))
    quick = tar.TarArchive(tmp_path / '1.tar')
    monkeypatch.setattr(tar, '_plain_members', lambda path: None)
    slow = tar.TarArchive(tmp_path / '1.tar')
    assert quick.names == slow.names
    np.testing.assert_array_equal(quick.spans, slow.spans)
    assert quick.read(0) == PNG


def test_a_stream_of_shards_resumes_exactly_and_keeps_memory_flat(tmp_path):
    path = written(tmp_path / 'set', 2000, 12, (8, 8, 3), ('cls',))
    source = open_source(str(path / 'x-{000..011}.tar'), image_shape=(8, 8, 3))
    config = tiny_config(
        data={'batch_size': 100, 'image_size': (8,)}, train={'steps': 45}, parallel={'devices': 1}
    )
    rows = slice(0, 100)
    seen, sizes, later = set(), [], []
    with stream(source, config, 0, rows) as batches:
        for step, batch in enumerate(batches):
            seen |= {image.tobytes() for image in batch['image']} if step < 20 else set()
            if step == 30:
                tracemalloc.start()
            if step >= 30:
                later.append(batch)
                sizes.append(tracemalloc.get_traced_memory()[0] if step in (31, 44) else 0)
        tracemalloc.stop()
    assert len(seen) == 2000  # an epoch shows every image
    assert sizes[-1] - sizes[1] < 2**20
    again = open_source(str(path), image_shape=(8, 8, 3))
    with stream(again, config, 30, rows) as batches:
        for batch, expected in zip(batches, later, strict=True):
            np.testing.assert_array_equal(batch['image'], expected['image'])
            np.testing.assert_array_equal(batch['label'], expected['label'])
