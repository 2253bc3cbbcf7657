"""Trains the feature network that stands in for Inception, a small classifier of the reference's classes, and writes its file.

    python -m jaxunet.metrics.train_features --reference cifar10_train.tar.xz --test cifar10_test.tar.xz --output cifar10_features.npz
    python -m jaxunet.evaluate --samples samples/ --reference cifar10_train.tar.xz --features cifar10_features.npz

CIFAR-10: some minutes on one GPU. What is measured with it is labelled by the file, and is no FID: compare numbers of one file only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags

from jaxunet import cli, download
from jaxunet.data.pipeline import images_bytes, load_all
from jaxunet.data.source import Source
from jaxunet.errors import UserError
from jaxunet.metrics.classifier import to_arrays
from jaxunet.metrics.classifier_training import Images, Recipe, train
from jaxunet.metrics.features import CLASSIFIER, KIND
from jaxunet.metrics.image_sets import open_images

REFERENCE = flags.DEFINE_string('reference', None, 'Images with classes: what data.path may be, at one size.', required=True)
TEST = flags.DEFINE_string('test', None, 'Images of the same classes to tell the accuracy on; default: a tenth of the reference, held out.')
OUTPUT = flags.DEFINE_string('output', None, 'The file to write, .npz.', required=True)
EPOCHS = flags.DEFINE_integer('epochs', None, f'Passes over the images; default: {Recipe.epochs}.', lower_bound=1)
SECONDS = flags.DEFINE_float('seconds', None, 'Instead of --epochs: as many as fit in this time.', lower_bound=0.1)
BATCH_SIZE = flags.DEFINE_integer('batch_size', Recipe.batch_size, 'Images of a step.', lower_bound=2)
CHANNELS = flags.DEFINE_integer('channels', 64, 'Of the first convolution; the stages have up to 8 times as many.', lower_bound=1)
LEARNING_RATE = flags.DEFINE_float('learning_rate', Recipe.learning_rate, 'Peak, for batches of 512.', lower_bound=1e-6)
FLIP = flags.DEFINE_bool('flip', True, 'Mirror images at random; switch it off where left and right make a difference.')
SEED = flags.DEFINE_integer('seed', 0, 'Of the initial weights, the order of the images, and the augmentation.', lower_bound=0)

MAX_BYTES = 8 * 2**30  # of pixels, which lie on the device
HELD_OUT = 10  # one image in so many


def main(argv: Sequence[str]) -> None:
    if EPOCHS.value is not None and SECONDS.value is not None:
        raise UserError('--epochs, --seconds: give one of them')
    target = Path(OUTPUT.value).expanduser()
    if target.suffix.lower() != '.npz' or target.is_dir():
        raise UserError(f'--output: expected a name that ends in .npz, found {OUTPUT.value!r}')
    cli.enable_compilation_cache()
    reference, names = load('--reference', REFERENCE.value)
    if TEST.value:
        held, other = load('--test', TEST.value)
        if other != names or held.images.shape[1:] != reference.images.shape[1:]:
            raise UserError(
                f'--test: expected classes {", ".join(names)} at {_size(reference)} as in {REFERENCE.value}, '
                f'found {", ".join(other)} at {_size(held)}'
            )
        train_set, test_set, tested = reference, held, TEST.value
    else:
        train_set, test_set = split(reference, SEED.value)
        tested = f'a tenth of {REFERENCE.value}, held out'
    recipe = Recipe(
        epochs=EPOCHS.value or Recipe.epochs,
        seconds=SECONDS.value or 0.0,
        batch_size=BATCH_SIZE.value,
        learning_rate=LEARNING_RATE.value,
        flip=FLIP.value,
        seed=SEED.value,
    )
    done = train(train_set, test_set, CHANNELS.value, recipe, lambda line: print(line, flush=True))
    told = {
        'reference': REFERENCE.value,
        'reference_sha256': fingerprint(reference),
        'classes': list(names),
        'images': len(train_set.images),
        'test': tested,
        'test_images': len(test_set.images),
        'test_accuracy': done.accuracy,
        'epochs': done.epochs,
        'seconds': done.seconds,
        'device': jax.devices()[0].device_kind,
        'seed': SEED.value,
    }
    save(target, {KIND: np.array(CLASSIFIER), **to_arrays(done.architecture, done.params, done.statistics, done.feature_scale, told)})
    print(f'test accuracy {done.accuracy:.4f} on {len(test_set.images)} images ({tested}); {done.epochs} epochs in {done.seconds:.1f} s')
    print(f'{target}: features {CLASSIFIER}-{download.digest(target, "sha256")[:8]}, for python -m jaxunet.evaluate --features {target}')


def load(flag: str, path: str) -> tuple[Images, tuple[str, ...]]:
    """All images with their labels, and the names of the classes. Raises UserError: no classes, or too many pixels."""
    with open_images(path) as source:
        _check(flag, path, source)
        images, labels = load_all(source, progress=True)
        return Images(np.asarray(images), np.asarray(labels)), source.class_names


def _check(flag: str, path: str, source: Source) -> None:
    if len(source.class_names) < 2 or (source.labels < 0).any():
        raise UserError(f'{flag}: {path}: expected images of two classes or more, found none; put each class into a folder of its own')
    if min(source.image_shape[:2]) < 4:
        raise UserError(
            f'{flag}: {path}: expected images of 4 pixels a side or more, found {source.image_shape[0]}x{source.image_shape[1]}'
        )
    if (size := images_bytes(source)) > MAX_BYTES:
        raise UserError(
            f'{flag}: {path}: {size / 2**30:.1f} GiB of pixels, more than the {MAX_BYTES / 2**30:g} accepted; '
            'reduce the images with python -m jaxunet.prepare_data'
        )


def split(images: Images, seed: int) -> tuple[Images, Images]:
    """Nine tenths and one, at random. Raises UserError: too few images."""
    count = len(images.images)
    if count < 2 * HELD_OUT:
        raise UserError(f'--reference: {count} images are too few to hold some out; give --test')
    order = np.random.default_rng(seed).permutation(count)
    held, rest = np.sort(order[: count // HELD_OUT]), np.sort(order[count // HELD_OUT :])
    return Images(images.images[rest], images.labels[rest]), Images(images.images[held], images.labels[held])


def fingerprint(images: Images) -> str:
    """SHA-256 of the pixels and the labels."""
    digest = hashlib.sha256(np.ascontiguousarray(images.images).data)
    digest.update(np.ascontiguousarray(images.labels, '<i4').data)
    return digest.hexdigest()


def save(target: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes the file whole or not at all. Raises UserError if it cannot be written."""
    partial = target.with_name(f'.{target.name}.{os.getpid()}.partial')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open('wb') as file:
            # Entries by their names' order, so that the file depends on its contents alone.
            np.savez(file, **dict(sorted(arrays.items())))  # type: ignore[arg-type]
        os.replace(partial, target)
    except OSError as error:
        raise UserError(f'--output: {target}: cannot be written: {error.strerror or error}; check the folder and the free space') from None
    finally:
        partial.unlink(missing_ok=True)


def _size(images: Images) -> str:
    return '{}x{}'.format(*images.images.shape[1:3])


if __name__ == '__main__':
    cli.run(main)
