"""Data: the order of images, and every kind of source."""

from __future__ import annotations

import gzip
import io
import pathlib
import pickle
import struct
import zipfile

import jax
import numpy as np
import pytest
from PIL import Image
from support.data_files import (
    SHAPE,
    encoded,
    everything,
    put,
    random_pixels,
    write_folder,
    write_tar,
    write_zip,
)

from jaxunet.data import unetcu_bin
from jaxunet.data.order import batch_indices, factors, permuted
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError

FORMS = ('folder', 'zip', 'deflated.zip', 'bzip2.zip', 'tar', 'tgz', 'tar.gz', 'tar.xz')


# ---- order


@pytest.mark.parametrize('n', [1, 2, 3, 5, 7, 10, 13, 37, 64, 157, 500, 1797, 50000])
def test_every_epoch_is_a_bijection_and_its_own_one(n):
    epochs = [
        permuted(np.arange(n, dtype=np.uint32), np.array([e], np.uint32), n, 3) for e in range(3)
    ]
    for order in epochs:
        np.testing.assert_array_equal(np.sort(order), np.arange(n))
    if n > 10:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(
            epochs[0], permuted(np.arange(n, dtype=np.uint32), np.array([0], np.uint32), n, 4)
        )


def test_every_small_size_is_a_bijection_after_few_extra_rounds():
    for n in range(1, 600):
        np.testing.assert_array_equal(
            np.sort(permuted(np.arange(n, dtype=np.uint32), np.array([9], np.uint32), n, 0)),
            np.arange(n),
        )
        a, b = factors(n)
        assert 0 <= a * b - n <= 12


@pytest.mark.parametrize('n', [3, 10, 37, 60])
def test_places_and_neighbours_are_uniform(n):
    epochs = 4000
    epoch, position = np.mgrid[:epochs, :n].astype(np.uint32)
    orders = permuted(position.ravel(), epoch.ravel(), n, 1).reshape(epochs, n).astype(int)
    counts = np.stack([np.bincount(orders[:, i], minlength=n) for i in range(n)])
    freedom = (n - 1) ** 2
    chi2 = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % n).ravel(), minlength=n)[1:]
    assert steps.min() / steps.mean() > 0.9
    assert steps.max() / steps.mean() < 1.1


@pytest.mark.parametrize(
    ('n', 'batch'), [(5, 3), (10, 64), (1797, 64), (1281167, 256), (2**31 - 1, 128), (96, 2**15)]
)
def test_numpy_jit_and_wide_integers_agree(n, batch):
    jitted = jax.jit(lambda step: batch_indices(step, batch, n, 7))
    for step in (0, 1, 12345, 2**31 - 1):
        host = batch_indices(step, batch, n, 7)
        assert isinstance(host, np.ndarray)
        assert host.dtype == np.int32
        assert host.shape == (batch,)
        positions = [step * batch + i for i in range(batch)]  # Python integers do not overflow
        epoch = np.array([p // n % 2**32 for p in positions], np.uint32)
        wide = permuted(np.array([p % n for p in positions], np.uint32), epoch, n, 7)
        np.testing.assert_array_equal(host, wide.astype(np.int32))
        np.testing.assert_array_equal(np.asarray(jitted(np.int32(step))), host)


def test_batches_run_through_the_positions():
    batches = np.concatenate([batch_indices(step, 7, 20, 5) for step in range(20)])
    epoch, place = np.divmod(np.arange(140, dtype=np.uint32), np.uint32(20))
    np.testing.assert_array_equal(batches, permuted(place, epoch, 20, 5))
    for epoch in range(7):
        np.testing.assert_array_equal(np.sort(batches[20 * epoch : 20 * epoch + 20]), np.arange(20))
    assert not np.array_equal(batch_indices(0, 7, 20, 5), batch_indices(0, 7, 20, 5 + 2**32))


# ---- sources


def test_digits_are_the_real_ones():
    source = open_source('digits:', image_shape=(8, 8, 1))
    images = everything(source)
    assert images.shape == (1797, 8, 8, 1)
    assert set(np.unique(images)) <= {round(v * 255 / 16) for v in range(17)}
    assert np.bincount(source.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert source.class_names == tuple('0123456789')
    # The first image of the set is a zero: dark in the middle.
    assert source.labels[0] == 0
    assert images[0, 3:5, 3:5].max() < 40
    assert everything(open_source('digits:', image_shape=(12, 12, 3))).shape == (1797, 12, 12, 3)


@pytest.mark.parametrize('form', FORMS)
def test_forms_agree(tmp_path, form, warned):
    """Order, labels and pixels are the same in a folder and in every archive; other files are
    counted and named.
    """
    names = ('b/1.png', 'a/2.png', 'a/10.png', 'b/deep/0.png')
    files = {f'train/{name}': encoded(random_pixels(i)) for i, name in enumerate(names)}
    files |= {'train/a/notes.txt': b'text', 'train/b/empty.png': b''}
    source = open_source(str(put(tmp_path, files, form)), image_shape=SHAPE)
    np.testing.assert_array_equal(
        everything(source), np.stack([random_pixels(i) for i in (2, 1, 0, 3)])
    )
    assert source.labels.dtype == np.int32
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.class_names == ('a', 'b')
    assert source.skipped == (
        ('train/a/notes.txt', 'not an image'),
        ('train/b/empty.png', 'empty file'),
    )
    (warning,) = warned
    assert '2 files' in warning
    assert 'train/a/notes.txt (not an image)' in warning
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(
        again.load(np.array([3, 0])), np.stack([random_pixels(3), random_pixels(2)])
    )


@pytest.mark.parametrize('form', FORMS)
def test_hidden_files_are_ignored(tmp_path, form):
    """They count neither as images or classes nor as other files, even if there are no others."""
    for name in ('some', 'all'):
        (tmp_path / name).mkdir()
    image = encoded(random_pixels(0))
    hidden = {
        '.DS_Store': b'not an image',
        '.thumbnails/1.png': image,
        '__MACOSX/a/._1.png': image,
        'a/._1.png': b'not an image',
        'a/.ipynb_checkpoints/1-checkpoint.png': image,
        'b/deep/.1.png': image,
    }
    shown = {'a/1.png': image, 'b/1.png': image, 'c/a__MACOSX/1.png': image}
    source = open_source(str(put(tmp_path / 'some', hidden | shown, form)), image_shape=SHAPE)
    assert (len(source), source.class_names, source.skipped) == (3, ('a', 'b', 'c'), ())
    with pytest.raises(UserError, match='found no files at all, or only hidden ones'):
        open_source(str(put(tmp_path / 'all', hidden, form)), image_shape=SHAPE)


def test_a_hidden_folder_can_be_opened_by_its_name(tmp_path):
    folder = write_folder(tmp_path / '.cache', {'./1.png': encoded(random_pixels(0))})
    assert len(open_source(str(folder), image_shape=SHAPE)) == 1


@pytest.mark.parametrize('kind', ['', 'gz'])
def test_a_dot_in_front_of_a_path_hides_nothing(tmp_path, kind):
    """`tar -C folder .` writes such paths."""
    archive = write_tar(tmp_path / 'x.tar', {'./a/1.png': encoded(random_pixels(0))}, kind)
    assert len(open_source(str(archive), image_shape=SHAPE)) == 1


MOVE = ': move such images into a class sub-folder or away'


@pytest.mark.parametrize(
    ('names', 'labels', 'classes', 'unlabelled_by'),
    [
        (('x.png', 'y.png'), [-1, -1], (), ''),
        (('a/x.png', 'y.png'), [-1, -1], (), f'y.png lies beside the sub-folders a{MOVE}'),
        (
            ('b/x.png', 'a/x.png', 'y.png', 'z.png'),
            [-1] * 4,
            (),
            f'y.png and 1 more images lie beside the sub-folders a, b{MOVE}',
        ),
        (('a/x.png', 'b/y.png'), [0, 1], ('a', 'b'), ''),
        (('only/x.png', 'only/y.png'), [0, 0], ('only',), ''),
        (('t/a/x.png', 't/b/y.png'), [0, 1], ('a', 'b'), ''),
    ],
)
def test_labels_of_a_folder(tmp_path, names, labels, classes, unlabelled_by):
    source = open_source(
        str(write_folder(tmp_path, {name: encoded(random_pixels(0)) for name in names})),
        image_shape=SHAPE,
    )
    assert (source.labels.tolist(), source.class_names, source.unlabelled_by) == (
        labels,
        classes,
        unlabelled_by,
    )


def test_an_archive_may_have_one_folder_around_its_images(tmp_path):
    path = write_zip(
        tmp_path / 'x.zip',
        {'train/x.png': encoded(random_pixels(0)), 'train/y.png': encoded(random_pixels(1))},
    )
    source = open_source(str(path), image_shape=SHAPE)
    assert (source.labels.tolist(), source.class_names) == ([-1, -1], ())


def test_classes_choose_and_order(tmp_path):
    files = {
        f'{name}/{i}.png': encoded(random_pixels(10 * k + i))
        for k, name in enumerate(('cat', 'dog', 'owl'))
        for i in range(2)
    }
    source = open_source(
        str(write_folder(tmp_path, files)), image_shape=SHAPE, classes=('owl', 'cat')
    )
    assert source.labels.tolist() == [1, 1, 0, 0]
    assert source.class_names == ('owl', 'cat')
    np.testing.assert_array_equal(source.load(np.array([3])), random_pixels(21)[None])


def test_links_are_followed_once(tmp_path):
    write_folder(tmp_path / 'set', {'a/1.png': encoded(random_pixels(1))})
    (tmp_path / 'set' / 'b').symlink_to(tmp_path / 'set' / 'a')
    (tmp_path / 'set' / 'a' / 'up').symlink_to(tmp_path / 'set')
    source = open_source(str(tmp_path / 'set'), image_shape=SHAPE)
    assert source.labels.tolist() == [0, 1]


def test_a_link_to_itself_is_left_out(tmp_path):
    write_folder(tmp_path, {'a.png': encoded(random_pixels(1))})
    (tmp_path / 'circle.png').symlink_to('circle.png')
    source = open_source(str(tmp_path), image_shape=SHAPE)
    np.testing.assert_array_equal(everything(source), random_pixels(1)[None])
    ((name, reason),) = source.skipped
    assert name == 'circle.png'
    assert reason.startswith('broken link: ')


def one(tmp_path: pathlib.Path, data: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    return everything(
        open_source(str(write_folder(tmp_path / 'one', {'image.png': data})), image_shape=shape)
    )[0]


def test_conversions(tmp_path):
    rgb = random_pixels(5)
    image = Image.fromarray(rgb)
    grey = np.asarray(image.convert('L'))[..., None]
    np.testing.assert_array_equal(one(tmp_path, encoded(rgb), (16, 16, 1)), grey)
    np.testing.assert_array_equal(
        one(tmp_path, encoded(grey[..., 0]), SHAPE), grey.repeat(3, axis=2)
    )
    cmyk = image.convert('CMYK')
    np.testing.assert_array_equal(
        one(tmp_path, encoded(cmyk, 'TIFF'), SHAPE), np.asarray(cmyk.convert('RGB'))
    )
    wide = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    np.testing.assert_array_equal(one(tmp_path, encoded(wide), (16, 16, 1))[..., 0], wide // 257)
    frames = [Image.fromarray(random_pixels(i, (16, 16))) for i in range(3)]
    movie = encoded(frames[0], 'GIF', save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(one(tmp_path, movie, (16, 16, 1))[..., 0], np.asarray(frames[0]))
    exif = Image.Exif()
    exif[0x112] = 6  # turn by 90 degrees clockwise to show
    turned = one(tmp_path, encoded(image, exif=exif), SHAPE)
    np.testing.assert_array_equal(turned, np.rot90(rgb, -1))


@pytest.mark.parametrize('orientation', [1, 5, 8, 0, 9])
def test_the_stored_size_is_that_of_the_upright_image(orientation, tmp_path):
    """Orientations are 1 to 8; others are ignored."""
    exif = Image.Exif()
    exif[0x112] = orientation
    data = encoded(random_pixels(0, (8, 16, 3)), exif=exif)
    size = (16, 8) if orientation in (5, 8) else (8, 16)
    source = open_source(str(write_folder(tmp_path, {'image.png': data})), image_shape=(*size, 3))
    assert source.stored_size(0) == size
    stored = Image.open(io.BytesIO(data)).convert('RGB')
    sides = {5: Image.Transpose.TRANSPOSE, 8: Image.Transpose.ROTATE_90}
    upright = stored.transpose(sides[orientation]) if orientation in sides else stored
    np.testing.assert_array_equal(everything(source)[0], np.asarray(upright))


@pytest.mark.parametrize('orientation', [1, 3, 6])
def test_a_tiff_is_turned_once(orientation, tmp_path):
    pixels = random_pixels(0, (8, 16, 3))
    data = encoded(pixels, 'TIFF', tiffinfo={0x112: orientation})
    upright = np.rot90(pixels, {1: 0, 3: 2, 6: -1}[orientation])
    path = str(write_folder(tmp_path, {'image.tif': data}))
    source = open_source(path, image_shape=upright.shape)
    assert source.stored_size(0) == upright.shape[:2]
    np.testing.assert_array_equal(everything(source)[0], upright)


def test_metadata_that_cannot_be_written_again_are_no_damage(tmp_path):
    """The width in this EXIF is -1; the image is turned, and nothing else of it is read."""
    pixels = random_pixels(0, (8, 16, 3))
    entries = struct.pack('<HHIi', 0x100, 9, 1, -1) + struct.pack('<HHII', 0x112, 3, 1, 6)
    exif = b'Exif\0\0II*\0' + struct.pack('<IH', 8, 2) + entries + bytes(4)
    data = encoded(pixels, exif=exif)
    np.testing.assert_array_equal(one(tmp_path, data, (16, 8, 3)), np.rot90(pixels, -1))


def test_resizing_crops_the_middle_and_does_not_alias(tmp_path):
    wide = np.zeros((64, 128, 3), np.uint8)
    wide[:, 32:96] = 200
    for image in (wide, wide.transpose(1, 0, 2)):
        middle = one(tmp_path, encoded(image), (16, 16, 3))
        assert abs(middle[4:-4, 4:-4].astype(int) - 200).max() <= 1
        assert middle.min() > 180  # the filter reaches a little over the edge of the crop
    stripes = np.zeros((128, 128), np.uint8)
    stripes[:, ::2] = 255
    shrunk = one(tmp_path, encoded(stripes), (16, 16, 1))
    assert abs(shrunk.astype(int) - 127).max() <= 2
    assert one(tmp_path, encoded(random_pixels(0, (3, 500, 3))), (10, 20, 3)).shape == (10, 20, 3)
    jpeg = one(tmp_path, encoded(np.full((500, 400, 3), 90, np.uint8), 'JPEG'), (32, 48, 3))
    assert abs(jpeg.astype(int) - 90).max() <= 2


@pytest.mark.parametrize('keys', [('images', 'labels'), ('arr_0', 'arr_1')])
@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_npz(tmp_path, keys, save):
    images, labels = random_pixels(0, (6, 16, 16, 3)), np.arange(6) % 3
    save(tmp_path / 'x.npz', **dict(zip(keys, (images, labels), strict=True)))
    source = open_source(str(tmp_path / 'x.npz'), image_shape=SHAPE)
    np.testing.assert_array_equal(source.load(np.array([5, 0])), images[[5, 0]])
    assert source.labels.tolist() == labels.tolist()
    assert source.class_names == ('0', '1', '2')
    assert source.in_memory == (save is np.savez_compressed)
    copy = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(everything(copy), images)


def test_npz_of_names_as_labels_in_any_spelling(tmp_path):
    named = {'Images': random_pixels(0, (3, 16, 16, 3)), 'Labels': np.array(['dog', '10', '2'])}
    np.savez(tmp_path / 'x.npz', **named)
    source = open_source(str(tmp_path / 'x.npz'), image_shape=SHAPE)
    assert (source.labels.tolist(), source.class_names) == ([2, 1, 0], ('2', '10', 'dog'))
    np.savez(tmp_path / 'x.npz', **named, class_names=np.array(['dog', '2', 'cat', '10']))
    source = open_source(str(tmp_path / 'x.npz'), image_shape=SHAPE)
    assert (source.labels.tolist(), source.class_names) == ([0, 3, 1], ('dog', '2', 'cat', '10'))


def test_npz_of_other_shapes(tmp_path):
    grey = random_pixels(0, (4, 16, 16))
    np.savez(tmp_path / 'grey.npz', images=np.asfortranarray(grey), labels=np.full(4, -1))
    source = open_source(str(tmp_path / 'grey.npz'), image_shape=SHAPE)
    np.testing.assert_array_equal(everything(source), grey[..., None].repeat(3, axis=3))
    assert source.class_names == ()
    five = random_pixels(0, (4, 16, 16, 5))
    np.savez(
        tmp_path / 'five.npz',
        images=five,
        labels=np.array([0, 1, 1, 0]),
        class_names=np.array(['x', 'y']),
    )
    source = open_source(str(tmp_path / 'five.npz'), image_shape=(16, 16, 5), classes=('y',))
    np.testing.assert_array_equal(everything(source), five[1:3])
    assert everything(open_source(str(tmp_path / 'five.npz'), image_shape=(8, 8, 5))).shape == (
        4,
        8,
        8,
        5,
    )


@pytest.mark.parametrize('name', ['x.bin', 'x.bin.gz'])
def test_bin(tmp_path, monkeypatch, name):
    monkeypatch.setattr(unetcu_bin, 'CHUNK', 2 * 8 * 12 * 3)  # values of two images
    images = random_pixels(0, (3, 8, 12, 3))
    header = np.zeros(256, '<i4')
    header[:5] = 20240620, 3, 3, 8, 12
    values = images.astype(np.float32).transpose(0, 3, 1, 2) / 127.5 - 1
    data = header.tobytes() + values.astype('<f4').tobytes()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
    source = open_source(str(tmp_path / name), image_shape=(8, 12, 3))
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(source)).load(np.array([2, 1])), images[[2, 1]]
    )
    assert source.labels.tolist() == [-1] * 3
    assert source.stored_size(0) == (8, 12)


def test_real_photos(shared_dir):
    path = shared_dir / 'data' / 'elephants64.zip'
    source = open_source(str(path), image_shape=(64, 64, 3))
    assert len(source) == 500
    with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        expected = np.asarray(Image.open(io.BytesIO(archive.read(names[7]))).convert('RGB'))
    np.testing.assert_array_equal(source.load(np.array([7]))[0], expected)
