"""`jaxunet.sample --init_image`: a picture is changed, or completed where its mask is white."""

import time

import numpy as np
import pytest
from PIL import Image
from support.commands import Fork, call
from support.tiny import tiny_config
from support.weight_cases import random_params

from jaxunet.data.picture import read_mask, read_picture
from jaxunet.weights import write_weights


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A model whose every image differs, a photo of another size and a mask for it."""
    folder = tmp_path_factory.mktemp('picture')
    config = tiny_config(model={'num_classes': 0, 'label_dropout': 0.0})
    write_weights(folder / 'model.safetensors', random_params(config), config)
    photo = np.linspace(0, 255, 40 * 24).astype(np.uint8).reshape(24, 40)
    Image.fromarray(photo).save(folder / 'photo.png')
    Image.fromarray(255 - photo).save(folder / 'other.png')
    mask = np.zeros((24, 40), np.uint8)
    mask[8:, 20:] = 255
    Image.fromarray(mask).save(folder / 'mask.png')
    Image.fromarray(mask[:8]).save(folder / 'small.png')
    return folder


def command(folder, output, *extra, image='photo.png', count=3):
    return [
        'jaxunet.sample',
        f'--checkpoint={folder / "model.safetensors"}',
        f'--init_image={folder / image}',
        f'--output={output}',
        f'--num_samples={count}',
        '--sampler=dpmpp_2m',
        '--steps=10',
        *(
            f'--{name}={folder / file}'
            for name, file in [e.split('=') for e in extra if '.png' in e]
        ),
        *(e for e in extra if '.png' not in e),
    ]


def images(path):
    with np.load(path) as arrays:
        return arrays['images']


def test_a_little_noise_gives_variations_of_the_picture(folder, tmp_path):
    out = call(*command(folder, tmp_path / 'x.npz', '--strength=0.1'))
    # The two steps of ten that start at so little noise.
    assert 'dpmpp_2m, 2 evaluations' in out
    found = images(tmp_path / 'x.npz')
    assert len(np.unique(found.reshape(3, -1), axis=0)) == 3
    assert np.abs(found - read_picture(folder / 'photo.png', (8, 8, 1)).astype(int)).mean() < 25


def test_a_part_is_redrawn_and_an_interruption_resumes(folder, tmp_path):
    """Another picture does not continue what was begun."""
    options = ('mask=mask.png', '--batch_size=2', '--resample=2')
    output, partial = tmp_path / 'x.npz', tmp_path / 'x.npz.partial'
    begun = Fork(command(folder, output, *options, count=3000))
    while not list(partial.glob('*.npz')):
        assert begun.poll() is None
        time.sleep(0.02)
    begun.kill()
    begun.communicate()
    first = images(next(iter(sorted(partial.glob('*.npz')))))

    refused = call(*command(folder, output, *options, image='other.png'), code=2)
    assert 'init_image: ' in refused
    assert 'mask: ' not in refused

    call(*command(folder, output, *options, '--batch_size=5', count=9))
    found = images(output)
    np.testing.assert_array_equal(found[:2], first)
    photo = read_picture(folder / 'photo.png', (8, 8, 1))
    redraw = read_mask(folder / 'mask.png', folder / 'photo.png', (8, 8, 1))
    assert 0 < redraw.sum() < 64
    for image in found:
        np.testing.assert_array_equal(image[~redraw], photo[~redraw])
        assert (image[redraw] != photo[redraw]).any()
    assert len(np.unique(found.reshape(9, -1), axis=0)) == 9


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--mask=mask.png'], '--mask: needs --init_image, which is not given'),
        (['--strength=0.5'], '--strength: needs --init_image'),
        (['--init_image={}/photo.png', '--resample=2'], '--resample: needs --mask'),
        (['--init_image={}/photo.png', '--strength=1.5'], 'strength: expected more than 0 and'),
        (['--init_image={}/photo.png', '--mask={}/small.png'], 'small.png: expected a mask of'),
        (['--init_image={}/nowhere.png'], 'nowhere.png: cannot be read'),
    ],
)
def test_mistakes(flags, message, folder, tmp_path):
    error = call(
        'jaxunet.sample',
        f'--checkpoint={folder / "model.safetensors"}',
        f'--output={tmp_path / "x.npz"}',
        *(flag.format(folder) for flag in flags),
        code=2,
    )
    assert message in error
    assert not list(tmp_path.iterdir())
