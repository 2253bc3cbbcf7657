"""`jaxunet.sample` with a classifier, and of pictures that a network enlarges."""

from __future__ import annotations

import pathlib
import signal
import time
import zlib

import numpy as np
import pytest
from PIL import Image
from support.commands import ROOT, Fork, call
from support.tiny import flags as tiny_flags
from support.tiny import tiny_config
from support.weight_cases import random_params, torch_bytes

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.state import fresh_state
from jaxunet.data.classes import Classes
from jaxunet.data.images import save_images
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.low_res import LowRes, read_low_res
from jaxunet.weights import noisy_classifier, write_weights
from jaxunet.weights.torch_file import TorchFile

CLASSES = 3


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model without classes, a classifier of its images, and two that enlarge pictures."""
    folder = tmp_path_factory.mktemp('conditional')
    config = tiny_config(model={'num_classes': 0, 'label_dropout': 0.0})
    write_weights(folder / 'model.safetensors', random_params(config), config)
    wide = {'base_channels': 64, 'norm_groups': 32, 'num_head_channels': 64}
    rng = np.random.default_rng(1)
    state = {
        row.name: (0.2 * rng.standard_normal(row.shape)).astype(np.float32)
        for row in noisy_classifier.table(config.replace(model=wide), CLASSES)
    }
    (folder / 'classifier.pt').write_bytes(torch_bytes(state))
    config = tiny_config(model={'num_classes': 0, 'label_dropout': 0.0, 'low_res_size': (3, 4)})
    write_weights(folder / 'plain_up.safetensors', random_params(config), config)
    classes = {'num_classes': CLASSES, 'low_res_size': (3, 4), 'image_channels': 3}
    config = tiny_config(model=classes)
    write_weights(folder / 'up.safetensors', random_params(config), config)
    small = rng.integers(0, 256, (3, 3, 4, 3), dtype=np.uint8)
    np.savez(folder / 'small.npz', images=small, labels=np.array([2, 0, 1]))
    np.savez(folder / 'square.npz', images=small.reshape(-1, 3, 3, 3))
    Image.fromarray(small[0]).save(folder / 'one.png')
    save_images(folder / 'grid.png', small[:2])
    return folder


def command(
    folder: pathlib.Path, output: pathlib.Path, *flags: str, model: str = 'model'
) -> list[str]:
    return [
        'jaxunet.sample',
        f'--checkpoint={folder / model}.safetensors',
        f'--output={output}',
        '--sampler=ddim',
        '--steps=3',
        *flags,
    ]


def images(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.fixture(scope='module')
def plain(folder: pathlib.Path) -> np.ndarray:
    """Samples of the model without a guide."""
    call(*command(folder, folder / 'plain.npz', '--num_samples=4'))
    return images(folder / 'plain.npz')['images']


def test_a_classifier_guides_a_model_without_classes(
    folder: pathlib.Path, plain: np.ndarray, tmp_path: pathlib.Path
) -> None:
    classifier, guided = f'--classifier={folder / "classifier.pt"}', tmp_path / 'guided.npz'
    strong = ('--classifier_scale=30', '--class_labels=2,0', '--num_samples=4')
    out = call(*command(folder, guided, classifier, *strong))
    assert f'guided by {folder / "classifier.pt"}: classifier of 3 classes, ' in out
    found = images(guided)
    assert found['labels'].tolist() == [2, 0, 2, 0]
    difference = found['images'].astype(int) - plain
    assert (np.abs(difference).mean(axis=(1, 2, 3)) > 1).all()


def test_a_weaker_model_guides(
    folder: pathlib.Path, plain: np.ndarray, tmp_path: pathlib.Path
) -> None:
    config = tiny_config(model={'num_classes': 0, 'label_dropout': 0.0, 'base_channels': 64})
    weaker, guided = tmp_path / 'w.safetensors', tmp_path / 'g.npz'
    write_weights(weaker, random_params(config), config)
    flags = (f'--guide={weaker}', '--guidance_scale=3', '--guidance_range=0.01,50')
    out = call(*command(folder, guided, *flags, '--num_samples=4'))
    assert f', guided by {weaker}: ' in out
    assert out.count(str(weaker)) == 1
    assert (images(guided)['images'] != plain).any()


def test_a_classifier_is_copied(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It goes to .safetensors and back; the size of its images chooses its network."""
    there, back, model = (
        tmp_path / 'a.safetensors',
        tmp_path / 'b.pt',
        f'--config={ROOT}/configs/digits.py',
    )
    command = ('jaxunet.export', '--classifier')
    for source, output in ((folder / 'classifier.pt', there), (there, back)):
        out = call(*command, f'--checkpoint={source}', f'--output={output}', model)
        assert out.startswith(f'{source}: classifier of 3 classes, ')
    files = [path.open('rb') for path in (folder / 'classifier.pt', back)]
    with files[0], files[1], TorchFile('a.pt', files[0]) as a, TorchFile('b.pt', files[1]) as b:
        assert a.shapes == b.shapes
        for name in a.shapes:
            np.testing.assert_array_equal(a.read(name), b.read(name))
    for flags, message in (
        ((), '--classifier: expected --preset or --config of the model that it guides'),
        (('--image_size=8',), 'expected 3 channels, those of the images'),
        ((model, '--ema=none'), '--ema: no effect with --classifier'),
    ):
        given = (f'--checkpoint={there}', f'--output={tmp_path}/c.pt', *flags)
        assert message in call(*command, *given, code=2)


def test_pictures_are_enlarged(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One sample of each, of its class; a picture by itself gives the same.

    Guidance sees every picture twice.
    """
    all_of, one = tmp_path / 'all.npz', tmp_path / 'one.npz'
    assert '3 images in' in call(
        *command(folder, all_of, f'--low_res={folder}/small.npz', '--guidance_scale=2', model='up')
    )
    found = images(all_of)
    assert found['images'].shape == (3, 8, 8, 3)
    assert found['labels'].tolist() == [2, 0, 1]
    single = (f'--low_res={folder}/one.png', '--class_labels=2', '--num_samples=4')
    call(*command(folder, one, *single, '--guidance_scale=2', model='up'))
    again = images(one)
    # The noise of sample 0 is the same, and that of the others is not.
    np.testing.assert_array_equal(again['images'][0], found['images'][0])
    assert (again['images'][1:3] != found['images'][1:]).any(axis=(1, 2, 3)).all()


def test_a_classifier_guides_to_the_classes_of_the_pictures(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    flags = f'--low_res={folder}/small.npz', f'--classifier={folder}/classifier.pt'
    call(*command(folder, tmp_path / 'all.npz', *flags, model='plain_up'))
    assert images(tmp_path / 'all.npz')['labels'].tolist() == [2, 0, 1]


def test_samples_of_other_pictures_are_not_kept(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A killed command goes on with its own pictures alone, even if the first one is the same."""
    path, output = tmp_path / 'small.npz', tmp_path / 'all.npz'
    small = images(folder / 'small.npz')
    np.savez(path, **small)

    def enlarge(samples: int) -> list[str]:
        flags = (f'--low_res={path}', '--batch_size=1', f'--num_samples={samples}')
        return command(folder, output, *flags, model='up')

    process = Fork(enlarge(1000))
    while len(list(tmp_path.glob('all.npz.partial/0*.npz'))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    np.savez(path, images=small['images'][[0, 2, 1]], labels=small['labels'])
    error = call(*enlarge(1000), code=2)
    assert 'holds samples that were made from other pictures, such as sample 1; repeat' in error
    np.savez(path, **small)
    assert '2 images in' in call(*enlarge(2))


def test_a_run_tells_how_to_enlarge_pictures(tmp_path: pathlib.Path) -> None:
    config = tiny_config(model={'low_res_size': (4,)})
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
    state = fresh_state(config).replace(step=np.int32(config.train.steps))
    checkpoints.save(config.train.steps, state, config)
    checkpoints.wait()
    checkpoints.close()
    flags = [*tiny_flags(), '--config.model.low_res_size=4', f'--workdir={tmp_path}']
    out = call('jaxunet.train', *flags)
    assert f'jaxunet.sample --checkpoint {tmp_path} --low_res PICTURES\n' in out


def test_a_checksum_is_of_the_picture_and_its_class() -> None:
    pixels = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4, 1)
    none = np.zeros(0, np.int32)
    plain = LowRes(pixels, none, 'x').checksums(5)
    assert plain.tolist() == [zlib.crc32(pixels[i % 2].tobytes()) for i in range(5)]
    assert LowRes(pixels[:1], none, 'x').checksums(1) == plain[:1]
    classes = [LowRes(pixels, np.array([3, i], np.int32), 'x').checksums(2) for i in (3, 4)]
    assert classes[0][0] == classes[1][0] != plain[0]
    assert classes[0][1] != classes[1][1]


def test_pictures_are_read(folder: pathlib.Path) -> None:
    """A grid, with names of classes; as many as are asked for."""
    expected = images(folder / 'small.npz')
    shape = (3, 4, 3)
    grid = read_low_res(str(folder / 'grid.png'), shape, None, Classes(CLASSES))
    np.testing.assert_array_equal(grid.pixels, expected['images'][:2])
    assert not len(grid.labels)
    first = read_low_res(str(folder / 'small.npz'), shape, 1, Classes(CLASSES))
    np.testing.assert_array_equal(first.of(np.arange(2)), expected['images'][[0, 0]])
    assert first.labels.tolist() == [2]
    colourless = read_low_res(str(folder / 'small.npz'), shape, 1, Classes(0), colourless=True)
    grey = np.array(Image.fromarray(expected['images'][0]).convert('L'))
    assert np.abs(colourless.pixels[0].astype(int) - grey[..., None]).max() <= 1
    with pytest.raises(UserError, match=r'square\.npz: expected pictures of 3x4 pixels .* of 3x3;'):
        read_low_res(str(folder / 'square.npz'), shape, None, Classes(0))
    with pytest.raises(UserError, match=r"a class of the model, 0 to 1, found '2'; correct"):
        read_low_res(str(folder / 'small.npz'), shape, None, Classes(2))


def test_mistakes_are_one_line(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pictures = f'--low_res={folder}/'
    for model, flag, message in (
        ('model', '--classifier_scale=2', '--classifier_scale: needs --classifier, which is not'),
        ('model', '--guide_ema=none', '--guide_ema: needs --guide, which is not given'),
        (
            'model',
            f'--guide={folder}/model.safetensors',
            'guide: has no effect with guidance_scale',
        ),
        (
            'model',
            '--guidance_range=1',
            '--guidance_range: expected two numbers such as 0.28,2.9, f',
        ),
        ('model', f'{pictures}small.npz', '--low_res, --condition: the model draws from'),
        ('up', '--steps=3', '--low_res: missing; the model enlarges pictures of 3x4 pixels'),
        ('up', f'{pictures}grid.png', '--class_labels: missing; the model has classes, and the'),
    ):
        error = call(*command(folder, tmp_path / 'x.npz', flag, model=model), code=2)
        assert error.splitlines()[-1].startswith(f'error: {message}')
