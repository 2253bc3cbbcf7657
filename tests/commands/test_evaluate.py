"""`python -m jaxunet.evaluate` as a user types it, and every form that samples and references may
have.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys

import numpy as np
import pytest
from support.commands import call, call_each
from support.data_files import encoded, put
from support.inception_case import random_state
from support.untrained_features import write_untrained

from jaxunet.data.images import save_images
from jaxunet.data.unetcu_bin import header_bytes, to_values
from jaxunet.metrics.image_sets import open_images
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import read


def pixels(n: int, seed: int, shape: tuple[int, ...] = (16, 16, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def loaded(path, **options) -> np.ndarray:
    with open_images(str(path), **options) as source:
        return source.load(np.arange(len(source)))


@pytest.mark.parametrize('form', ['folder', 'zip', 'tar', 'tar.xz'])
def test_image_files_at_their_own_size(form, tmp_path):
    images = pixels(5, 0, (9, 14, 3))
    path = put(tmp_path, {f'all/{i}.png': encoded(image) for i, image in enumerate(images)}, form)
    np.testing.assert_array_equal(loaded(path), images)


def test_grey_files_become_rgb(tmp_path):
    grey = pixels(1, 0, (9, 14))[0]
    path = put(tmp_path, {'a.png': encoded(grey)}, 'folder')
    np.testing.assert_array_equal(loaded(path)[0], np.repeat(grey[..., None], 3, axis=2))


@pytest.mark.parametrize('form', ['folder', 'tar.xz'])
def test_images_of_several_sizes_are_refused(form, tmp_path):
    files = {'a.png': encoded(pixels(1, 0)[0]), 'b.png': encoded(pixels(1, 0, (16, 20, 3))[0])}
    (folder := tmp_path / 'my set').mkdir()
    with pytest.raises(
        UserError,
        match=r'b\.png: expected 16x16 pixels .*, found 16x20; bring all to one size: .*'
        r"--input '.*my set.*' --output",
    ):
        loaded(put(folder, files, form))


def test_arrays_at_their_own_size(tmp_path):
    images = pixels(4, 0, (6, 10, 3))
    for name in ('images', 'arr_0'):
        for save in (np.savez, np.savez_compressed):
            save(tmp_path / 'x.npz', **{name: images})
            np.testing.assert_array_equal(loaded(tmp_path / 'x.npz'), images)
    np.savez(tmp_path / 'grey.npz', images=images[..., 0])
    np.testing.assert_array_equal(
        loaded(tmp_path / 'grey.npz'), np.repeat(images[..., :1], 3, axis=3)
    )
    assert loaded('digits:').shape == (1797, 8, 8, 3)


def test_unetcu_files_at_their_own_size(tmp_path):
    images = pixels(4, 0, (6, 10, 3))
    values = b''.join(to_values(image).tobytes() for image in images)
    data = header_bytes(4, (6, 10, 3)) + values
    (tmp_path / 'x.bin').write_bytes(data)
    (tmp_path / 'x.bin.gz').write_bytes(gzip.compress(data))
    for name in ('x.bin', 'x.bin.gz'):
        np.testing.assert_array_equal(loaded(tmp_path / name), images)
    (tmp_path / 'x.bin.gz').write_bytes(gzip.compress(data)[:200])
    with pytest.raises(UserError, match=r'not a readable \.gz file'):
        loaded(tmp_path / 'x.bin.gz')


@pytest.mark.parametrize('shape', [(8, 8, 1), (16, 24, 3), (40, 32, 3)])
@pytest.mark.parametrize('n', [1, 6, 7])
def test_grids_come_back(n, shape, tmp_path):
    images = pixels(n, 0, shape)
    save_images(tmp_path / 'g.png', images)
    found = loaded(tmp_path / 'g.png', grid_size=shape[:2])
    np.testing.assert_array_equal(found, np.repeat(images, 3 // shape[2], axis=3))


def test_grids_that_are_none(tmp_path):
    save_images(tmp_path / 'g.png', pixels(6, 0))
    for size in ((16, 17), (8, 8), (15, 15)):
        with pytest.raises(UserError, match='expected a grid of'):
            loaded(tmp_path / 'g.png', grid_size=size)
    (tmp_path / 'photo.png').write_bytes(
        encoded(pixels(1, 0, (102, 102, 3))[0])
    )  # the size of a grid of 2 by 2, without its gaps
    with pytest.raises(UserError, match='expected a grid of 16x16 images'):
        loaded(tmp_path / 'photo.png', grid_size=(16, 16))
    with pytest.raises(UserError, match='give --image_size'):
        loaded(tmp_path / 'g.png')


def test_paths_that_are_none(tmp_path):
    (tmp_path / 'empty').mkdir()
    with pytest.raises(UserError, match='no images'):
        loaded(tmp_path / 'empty')
    with pytest.raises(UserError, match='no such file or folder'):
        loaded(tmp_path / 'nowhere')
    np.savez(tmp_path / 'x.npz', pictures=pixels(2, 0))
    with pytest.raises(UserError, match='no array "images"'):
        loaded(tmp_path / 'x.npz')


def run(*arguments, cache, **options):
    variables = {'JAX_COMPILATION_CACHE_DIR': str(cache), 'HOME': str(cache.parent)}
    return call('jaxunet.evaluate', *arguments, variables=variables, **options)


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp('weights') / 'inception.npz'
    np.savez(path, **random_state())
    return path


def test_from_images_to_results(weights, tmp_path):
    save_images(tmp_path / 'samples.png', pixels(10, 0))
    real = put(
        tmp_path, {f'{i}.png': encoded(image) for i, image in enumerate(pixels(4, 1))}, 'zip'
    )
    metrics = ['fid', 'kid', 'precision', 'recall', 'inception_score']
    out = run(
        f'--samples={tmp_path}/samples.png',
        f'--reference={real}',
        f'--metrics={",".join(metrics)}',
        f'--features={weights}',
        '--batch_size=4',
        '--seed=5',
        f'--output={tmp_path}/out/metrics.jsonl',
        cache=tmp_path / 'cache',
        fresh=True,
    )
    rows = read(tmp_path / 'out/metrics.jsonl')
    assert [row['metric'] for row in rows] == metrics
    assert [line.split(':')[0] for line in out.splitlines()] == [row['metric'] for row in rows]
    for row in rows:
        assert (row['num_samples'], row['sample_size'], row['seed']) == (10, '16x16', 5)
        assert row['features'].startswith('inception-')
        resize = "bilinear to 299x299, no antialiasing; not the file of pytorch-fid's weights"
        assert resize in row['resize']
        if row['metric'] != 'inception_score':
            assert (row['num_reference'], row['reference']) == (4, str(real))


def test_statistics_in_place_of_images(tmp_path):
    """The second distance, of the same images, is 0, and added to the same file."""
    features = write_untrained(tmp_path, side=16)
    images = enumerate(pixels(4, 1))
    real = put(tmp_path, {f'{i}.png': encoded(image) for i, image in images}, 'zip')
    np.savez(tmp_path / 'samples.npz', images=pixels(10, 0))
    for samples, reference, extra in (
        (tmp_path / 'samples.npz', real, ['--write_statistics=~/real.npz']),
        (real, tmp_path / 'real.npz', []),
    ):
        run(
            f'--samples={samples}',
            f'--reference={reference}',
            f'--features={features}',
            '--batch_size=4',
            f'--output={tmp_path}/out/metrics.jsonl',
            *extra,
            cache=tmp_path / 'cache',
        )
    other, same = read(tmp_path / 'out/metrics.jsonl')
    assert (other['num_samples'], other['num_reference']) == (10, 4)
    assert same['num_reference'] == same['num_samples'] == 4
    assert abs(same['value']) < 1e-6 * other['value']


# In a process of its own, because modules of several commands cannot define their flags together.
APPEND = """
import json, sys
from absl import flags
from jaxunet.evaluate import output
from jaxunet.runtime.errors import UserError
flags.FLAGS(['evaluate', f'--output={sys.argv[1]}'])
for values in (3.0,), (2.0, float('nan')):
    try:
        output.append([{'value': value} for value in values])
    except UserError as error:
        print(error)
"""


def test_results_that_are_not_finite_are_not_written(tmp_path):
    written = tmp_path / 'a' / 'out.jsonl'
    done = subprocess.run(
        [sys.executable, '-c', APPEND, str(written)],
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f'--output: {written}: expected finite results, found NaN or infinity' in done.stdout
    assert written.read_text() == '{"value": 3.0}\n'


def test_nearest_training_images(tmp_path):
    features = write_untrained(tmp_path, side=16)
    training = pixels(8, 1)
    np.savez(tmp_path / 'training.npz', images=training)
    np.savez(tmp_path / 'samples.npz', images=np.concatenate([pixels(3, 0), training[4:5]]))
    out = run(
        f'--samples={tmp_path}/samples.npz',
        f'--reference={tmp_path}/training.npz',
        f'--features={features}',
        f'--nearest={tmp_path}/out/pairs.png',
        f'--output={tmp_path}/metrics.jsonl',
        '--batch_size=8',
        cache=tmp_path / 'cache',
    ).splitlines()
    rows = read(tmp_path / 'metrics.jsonl')
    assert [line.split(': ')[0] for line in out[:3]] == [row['metric'] for row in rows]
    assert [row['metric'].split('=')[0] for row in rows] == [
        'copies[pixels]',
        'copies[features',
        'copies[pixels or features',
    ]
    assert rows[0]['value'] == 0.25
    assert rows[0]['of_training_images'] == 0
    assert out[3].startswith(f'the closest pairs are in {tmp_path}/out/pairs.png, all of them in ')
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {'pairs.png', 'pairs.csv'}


MISTAKES = [
    ([], '--samples, --checkpoint: expected one of them, found none'),
    (
        ['--samples=S', '--metrics=fdi'],
        '--metrics: expected some of fid, sfid, kid, precision, recall, copies, inception_score, '
        'found \'fdi\'; did you mean "fid"',
    ),
    (['--samples=S', '--metrics=kid'], '--reference: missing; needed by kid'),
    (
        ['--samples=S', '--checkpoint=S'],
        '--samples, --checkpoint: expected one of them, found both',
    ),
    (
        ['--samples=S', '--reference=B', '--ema=0.1'],
        '--ema: only --checkpoint has it; leave it out',
    ),
    (['--checkpoint=S', '--image_size=8'], '--image_size: only --samples has it; leave it out'),
    (['--checkpoint=S', '--ema=0.1', '--plot=w.png'], '--plot: needs several averages to compare'),
    (['--checkpoint=S', '--ema=0.1,0.2', '--plot=w.pdf'], '--plot: expected a name that ends in'),
    (['--samples=S', '--metrics=nll'], '--metrics: nll needs a model, --checkpoint, and a command'),
    (['--checkpoint=S', '--metrics=fid,nll'], 'found fid,nll with --checkpoint'),
    (['--checkpoint=S', '--terms=t.npz'], '--terms: only with --metrics nll'),
    (['--checkpoint=S', '--num_heads=2'], '--num_heads: only with --metrics nll; leave it out'),
    (['--checkpoint=S', '--metrics=nll', '--plot=p.png'], '--plot: not with --metrics nll'),
    (['--checkpoint=S', '--metrics=nll', '--terms=t.csv'], '--terms: expected a name that'),
    (['--checkpoint=S', '--ema=0.1,0.1'], '--ema: 0.1 is given twice'),
    (['--checkpoint=S'], 'is a file, expected a workdir or a checkpoint in one, whose config'),
    (['--checkpoint=nowhere'], 'nowhere: no such file or folder; expected a workdir'),
    (
        ['--samples=S', '--reference=S', '--features=nowhere.npz'],
        '--features: expected inception or inception_tensorflow, or a file that ends in .pth',
    ),
    (
        ['--samples=S', '--reference=S', '--features=S'],
        "expected the 472 tensors of FID's Inception-v3",
    ),
    (
        ['--samples=S', '--reference=S', '--image_size=8x8'],
        '--image_size: expected SIDE or HEIGHT,WIDTH',
    ),
    (
        ['--samples=S', '--reference=S', '--write_statistics=x.txt'],
        '--write_statistics: expected a name that ends in .npz',
    ),
    (['--samples=S', '--reference=S', '--output=/proc'], '--output: /proc: cannot be written'),
    (['--samples=S', '--reference=S', '--batch_size=0'], 'flag --batch_size=0'),
    (['--samples=S', '--nearest=x.png'], '--reference: missing; needed by --nearest'),
    (
        ['--samples=S', '--reference=S', '--nearest=x.jpg'],
        "--nearest: expected a name that ends in .png, found 'x.jpg'",
    ),
    (
        ['--samples=S', '--reference=S', '--nearest=/proc/version/y.png'],
        '--nearest: /proc/version/y.png: cannot be written',
    ),
    (
        ['--samples=S', '--reference=S', '--features=F', '--nearest=x.png'],
        'copies: need 5 training images or more, found 4',
    ),
    # The last image of the reference B is corrupt, which shows when its features are computed: the
    # samples' mistakes come before that.
    (['--samples=nothere', '--reference=B', '--features=F'], 'nothere: no such file or folder'),
    (['--samples=nothere', '--reference=S'], 'nothere: no such file or folder'),  # no download
    (
        ['--samples=S', '--reference=S', '--nearest=x.png'],
        'features=inception: cannot download https://',
    ),
    (
        ['--samples=S', '--reference=cifar10_test:/proc', '--features=F'],
        '/proc: not the official archive of CIFAR-10',
    ),
    (
        ['--samples=S', '--reference=B', '--features=F', '--num_samples=5'],
        '--num_samples: 5 asked for, but',
    ),
    (['--samples=S', '--reference=B', '--features=F'], '1.png: cannot be decoded'),
]


def test_mistakes(tmp_path, monkeypatch):
    samples = tmp_path / 's.npz'
    np.savez(samples, images=pixels(4, 0))
    good = encoded(pixels(1, 0)[0])
    bad = put(tmp_path, {'0.png': good, '1.png': good[:100]}, 'zip')
    features = write_untrained(tmp_path, side=16)
    files = {'=S': f'={samples}', '=B': f'={bad}', '=F': f'={features}'}
    commands = [
        ['jaxunet.evaluate', *(a[:-2] + files.get(a[-2:], a[-2:]) for a in arguments)]
        for arguments, _ in MISTAKES
    ]
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')  # refuses
    (folder := tmp_path / 'folders').mkdir()
    results = call_each(commands, folder)
    for (arguments, message), (code, _, error) in zip(MISTAKES, results, strict=True):
        assert code == 2, (arguments, error)
        assert message in error, arguments
        assert 'Traceback' not in error, arguments
    assert not [*folder.glob('*/*')]
    made = {p.name for p in tmp_path.iterdir()}
    assert made <= {'s.npz', 'random.npz', 'images.zip', 'cache', 'folders'}
