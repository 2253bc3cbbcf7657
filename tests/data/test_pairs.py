"""Images and the pictures of the same names in another set (data.condition=folder:PATH)."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data_files import encoded, everything, write_folder, write_tar, write_zip
from support.tiny import tiny_config

from jaxunet.config import resolve, to_dict
from jaxunet.data import pipeline
from jaxunet.data.automatic import complete
from jaxunet.data.pairs import with_pictures
from jaxunet.data.sources import open_images
from jaxunet.model.low_res import images_of, low_res_of
from jaxunet.runtime.errors import UserError
from jaxunet.training.batch import augmented_images, split_keys

NAMES = ('a/1', 'a/2.x', 'b/1', 'b/3', 'b/4')
RANDOM = np.random.default_rng(0)
# The picture of an image is its negative, so that each shows if the other is cut alike.
PHOTOS = RANDOM.integers(0, 256, (len(NAMES), 8, 8, 3), np.uint8)


def write(path, pixels, names=NAMES, prefix='', suffix='png'):
    files = {f'{prefix}{name}.{suffix}': encoded(x) for name, x in zip(names, pixels, strict=True)}
    if path.suffix == '.zip':
        return write_zip(path, files)
    if path.suffix in ('.tar', '.gz'):
        return write_tar(path, files, path.suffix[1:].removeprefix('tar'))
    return write_folder(path, files)


def config(photos, edges, **data):
    data = {'path': str(photos), 'condition': f'folder:{edges}', 'image_size': (8,)} | data
    model = {'image_channels': 3, 'low_res_size': (8,), 'condition_channels': 3, 'num_classes': 0}
    return tiny_config(model=model | {'label_dropout': 0.0}, data=data)


@pytest.mark.parametrize('form', ['folder', 'x.zip', 'x.tar', 'x.tar.gz', 'x-{0..1}.tar'])
def test_pictures_are_paired_by_their_paths_without_suffixes(form, tmp_path):
    photos = write(tmp_path / 'photos', PHOTOS)
    order = [3, 0, 4, 2, 1]
    names, edges = [NAMES[i] for i in order], 255 - PHOTOS[order]
    if '{' in form:
        for part in (0, 1):
            write(tmp_path / f'x-{part}.tar', edges[part::2], names[part::2], suffix='webp')
    else:
        write(tmp_path / form, edges, names, prefix='' if form == 'folder' else 'edges/')
    source = open_images(config(photos, tmp_path / form, holdout=2))
    for part in (source, source.held_out):
        np.testing.assert_array_equal(everything(part.pictures), 255 - everything(part))
        both = everything(with_pictures(part))
        np.testing.assert_array_equal(both[..., 3:], 255 - both[..., :3])
    assert len(source) == 3
    both = pickle.loads(pickle.dumps(with_pictures(source)))
    np.testing.assert_array_equal(everything(both), everything(with_pictures(source)))
    np.testing.assert_array_equal(everything(both.held_out)[..., :3], everything(source.held_out))


def test_chosen_classes_keep_their_pictures(tmp_path):
    sets = [write(tmp_path / name, x) for name, x in (('photos', PHOTOS), ('edges', 255 - PHOTOS))]
    source = open_images(config(*sets, classes=('b',)))
    np.testing.assert_array_equal(everything(source), PHOTOS[2:])
    np.testing.assert_array_equal(everything(source.pictures), 255 - PHOTOS[2:])


def test_arrays_are_paired_by_their_order(tmp_path):
    np.savez(tmp_path / 'photos.npz', images=PHOTOS)
    np.save(tmp_path / 'depth.npy', PHOTOS[..., :2])
    raw = to_dict(config(tmp_path / 'photos.npz', tmp_path / 'depth.npy'))
    raw['model'] |= {'low_res_size': (), 'condition_channels': 0}
    found = complete(raw)
    assert (found.model.low_res_size, found.model.condition_channels) == ((8,), 2)
    np.testing.assert_array_equal(everything(open_images(found).pictures), PHOTOS[..., :2])
    np.save(tmp_path / 'depth.npy', PHOTOS[1:])
    with pytest.raises(UserError, match=r'depth.npy: neither set .* expected 5, found 4$'):
        open_images(config(tmp_path / 'photos.npz', tmp_path / 'depth.npy'))
    photos = write(tmp_path / 'photos', PHOTOS)
    with pytest.raises(UserError, match=r'by their names, which \S*depth.npy has not, but \S*pho'):
        open_images(config(photos, tmp_path / 'depth.npy'))


@pytest.mark.parametrize(
    ('names', 'message'),
    [
        (
            ('a/1', 'A/2', 'B/1', 'c/3', 'b/5'),
            r'edges: expected a picture of the same name, .* each of the 5 images of \S*photos, '
            r'found none for 4: a/2.x, b/1, b/3, ...; and 4 pictures without an image: A/2, B/1, '
            r'b/5, ...$',
        ),
        ((*NAMES[:4], 'b/.5'), r'found none for 1: b/4$'),
    ],
)
def test_images_without_a_picture_are_counted_and_named(names, message, tmp_path):
    photos, edges = write(tmp_path / 'photos', PHOTOS), write(tmp_path / 'edges', PHOTOS, names)
    with pytest.raises(UserError, match=f'^data.condition: .*{message}'):
        open_images(config(photos, edges))


def test_pictures_without_an_image_are_left_out(tmp_path, caplog):
    photos = write(tmp_path / 'photos', PHOTOS[1:], NAMES[1:])
    edges = write(tmp_path / 'edges', 255 - PHOTOS)
    source = open_images(config(photos, edges))
    np.testing.assert_array_equal(everything(source.pictures), 255 - PHOTOS[1:])
    assert 'edges: left out 1 picture without an image: a/1' in caplog.text


def test_names_that_say_too_little(tmp_path):
    photos = write(tmp_path / 'photos', PHOTOS)
    write(photos, PHOTOS[:1], suffix='bmp', names=NAMES[:1])
    edges = write(tmp_path / 'edges', PHOTOS)
    with pytest.raises(UserError, match=r'photos: expected names .* 1 name several times: a/1$'):
        open_images(config(photos, edges))


def test_pictures_of_other_proportions(tmp_path):
    photos, edges = tmp_path / 'photos', write(tmp_path / 'edges', PHOTOS)
    write(photos, PHOTOS.repeat(2, axis=1))
    with pytest.raises(UserError, match=r'found one of 8x8 pixels .* for an image of 16x8'):
        open_images(config(photos, edges))


def test_proportions_that_no_longer_show(tmp_path):
    wide = PHOTOS.repeat(2, axis=2)
    photos, edges = write(tmp_path / 'x.tar.gz', wide), write(tmp_path / 'edges', wide)
    source = open_images(config(photos, edges))
    np.testing.assert_array_equal(everything(source), everything(source.pictures))


def test_a_missing_set(tmp_path):
    photos = write(tmp_path / 'photos', PHOTOS)
    with pytest.raises(UserError, match=r'^data.condition: \S*edgs: no such file .*"edges"'):
        open_images(config(photos, write(tmp_path / 'edges', PHOTOS).with_name('edgs')))


@pytest.mark.parametrize('augment', ['flip', 'edm'])
def test_images_and_pictures_are_cut_and_moved_alike(augment, tmp_path):
    """Random crops of streamed batches, and the augmentation of the step."""
    photos = np.kron(PHOTOS, np.ones((1, 3, 3, 1), np.uint8))
    paths = [write(tmp_path / f'{i}', x) for i, x in enumerate((photos, 255 - photos))]
    found = config(*paths, crop='random', crop_least=0.4, augment=augment, batch_size=16)
    source = with_pictures(open_images(found))
    with pipeline.stream(source, found, 3, slice(0, 16)) as stream:
        image = next(stream)['image']
    assert np.abs(image[..., 3:].astype(int) - (255 - image[..., :3].astype(int))).max() <= 1
    assert len(np.unique(image, axis=0)) > 5  # other parts of the five images
    row = jnp.arange(16, dtype=jnp.int32)
    keys = split_keys(jax.random.key(1), row, False)
    loaded, _ = augmented_images(found, keys, {'image': jnp.asarray(image), 'row': row})
    x0, pictures = images_of(found, loaded), low_res_of(found, loaded)
    assert x0.shape == pictures.shape == (16, 8, 8, 3)
    np.testing.assert_allclose(pictures, -x0, atol=0.01)
    moved = np.abs(np.asarray(x0) - (image[..., :3] / 127.5 - 1)).max(axis=(1, 2, 3)) > 0.1
    assert moved.any()
    small = found.replace(model={'low_res_size': (4, 2)})
    blocks = np.asarray(pictures).reshape(16, 4, 2, 2, 4, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(low_res_of(small, loaded), blocks, atol=1e-6)


@pytest.mark.parametrize(('grey', 'channels'), [(True, 1), (False, 3)])
def test_size_and_channels_follow_from_the_images(grey, channels, tmp_path):
    edges = PHOTOS[..., :1].repeat(3, axis=3) if grey else PHOTOS
    raw = to_dict(config(write(tmp_path / 'a', PHOTOS), write(tmp_path / 'b', edges)))
    raw['model'] |= {'low_res_size': (), 'condition_channels': 0}
    found = complete(raw)
    assert found.low_res_shape == (8, 8, channels)
    assert found.loaded_shape == (8, 8, 3 + channels)
    raw['data']['condition'] = 'folder:elsewhere'  # a run that goes on does not look again
    assert complete(raw, found).low_res_shape == (8, 8, channels)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'data': {'condition': 'folder:'}}, 'data.condition: expected image, grey or folder:PATH'),
        ({'model': {'condition_channels': 1}}, 'condition_channels: 1 needs data.condition=folder'),
        (
            {'data': {'condition': 'folder:x'}, 'timesteps': {'sampler': 'policy'}},
            'timesteps.sampler: policy measures images without pictures',
        ),
    ],
)
def test_fields_that_do_not_fit(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)
    assert resolve(to_dict(config('x', 'y'))).picture_path == 'y'
