"""Trains a small classifier on images with classes, as a feature network in place of Inception.

    python -m jaxunet.metrics.train_features --reference cifar10: --test cifar10_test: \\
        --output features.npz
    python -m jaxunet.evaluate --samples samples/ --reference cifar10: --features features.npz

CIFAR-10 takes a few minutes on one GPU. Distances between these features are not FIDs. Results name
the file of features, and only results of the same file can be compared.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from jaxunet.metrics.classifier import to_arrays
from jaxunet.metrics.classifier_recipe import Recipe
from jaxunet.metrics.classifier_training import Trained, train
from jaxunet.metrics.features import CLASSIFIER, KIND
from jaxunet.metrics.labelled_images import Images, fingerprint, load, split
from jaxunet.runtime import command, compiled_cache, download
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import of_user
from jaxunet.runtime.whole_files import check_file, written

REFERENCE = flags.DEFINE_string(
    'reference', None, 'Images with classes, as for data.path, all of one size.', required=True
)
TEST = flags.DEFINE_string(
    'test', None, 'Test images of the same classes; default: a tenth of the reference, held out.'
)
OUTPUT = flags.DEFINE_string('output', None, 'The file to write, .npz.', required=True)
EPOCHS = flags.DEFINE_integer(
    'epochs', None, f'Passes over the images; default: {Recipe.epochs}.', lower_bound=1
)
SECONDS = flags.DEFINE_float(
    'seconds',
    None,
    'Train for as many epochs as fit in this time, instead of --epochs.',
    lower_bound=0.1,
)
BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', Recipe.batch_size, 'Images per step.', lower_bound=2
)
CHANNELS = flags.DEFINE_integer(
    'channels',
    96,
    'Channels of the first convolution; the stages have up to 8 times as many.',
    lower_bound=1,
)
LEARNING_RATE = flags.DEFINE_float(
    'learning_rate',
    Recipe.learning_rate,
    'Peak learning rate for batches of 512.',
    lower_bound=1e-6,
)
FLIP = flags.DEFINE_bool(
    'flip', True, 'Mirror images at random; switch it off if left and right differ in meaning.'
)
CUTOUT = flags.DEFINE_float(
    'cutout',
    Recipe.cutout,
    "Side of the blank square, as a share of the images' side; DeVries and Taylor "
    '(arXiv 1708.04552) use 0.5 for CIFAR-10.',
    lower_bound=0,
    upper_bound=1,
)
CUTMIX = flags.DEFINE_float(
    'cutmix',
    Recipe.cutmix,
    'Probability that the images of a batch get a rectangle of another image and its share of '
    'the target (Yun et al., arXiv 1905.04899).',
    lower_bound=0,
    upper_bound=1,
)
SEED = flags.DEFINE_integer(
    'seed',
    0,
    'Seed of the initial weights, the order of the images and the augmentation.',
    lower_bound=0,
)
of_user(REFERENCE, TEST, OUTPUT)


def main(argv: Sequence[str]) -> None:
    """Trains the classifier that the flags describe and writes its file.

    Raises:
      UserError: a wrong flag, path or image, or a loss that is not finite.
    """
    if EPOCHS.value is not None and SECONDS.value is not None:
        raise UserError('--epochs, --seconds: give one of them')
    target = Path(OUTPUT.value)
    if target.suffix.lower() != '.npz':
        raise UserError(f'--output: expected a name that ends in .npz, found {OUTPUT.value!r}')
    check_file(target, '--output')
    compiled_cache.enable_compilation_cache()
    data = _load()
    recipe = Recipe(
        epochs=EPOCHS.value or Recipe.epochs,
        seconds=SECONDS.value or 0.0,
        batch_size=BATCH_SIZE.value,
        learning_rate=LEARNING_RATE.value,
        flip=FLIP.value,
        cutout=CUTOUT.value,
        cutmix=CUTMIX.value,
        seed=SEED.value,
    )
    done = train(
        data.train, data.test, CHANNELS.value, recipe, functools.partial(print, flush=True)
    )
    training = _description(data, done, recipe)
    arrays = to_arrays(
        done.architecture, done.params, done.statistics, done.feature_scale, training
    )
    save(target, {KIND: np.array(CLASSIFIER), **arrays})
    print(
        f'test accuracy {done.accuracy:.4f} on {len(data.test.images)} images ({data.tested}); '
        f'{done.epochs} epochs in {done.seconds:.1f} s'
    )
    if recipe.flip:
        print(
            f'with the scores of an image and its mirror image added: {done.mirrored_accuracy:.4f}'
        )
    name = f'{CLASSIFIER}-{download.digest(target, "sha256")[:8]}'
    quoted = shlex.quote(str(target))
    print(f'{target}: features {name}, for python -m jaxunet.evaluate --features {quoted}')


class _Data(NamedTuple):
    reference: Images  # all images of --reference
    train: Images
    test: Images
    tested: str  # name of the test images in reports
    classes: tuple[str, ...]


def _load() -> _Data:
    """Loads --reference and --test; without --test, holds out a tenth of the reference."""
    reference, names = load('--reference', REFERENCE.value)
    if not TEST.value:
        tested = f'a tenth of {REFERENCE.value}, held out'
        return _Data(reference, *split(reference, SEED.value), tested, names)
    held, other = load('--test', TEST.value)
    if other != names or held.images.shape[1:] != reference.images.shape[1:]:
        raise UserError(
            f'--test: expected classes {", ".join(names)} at {_size(reference)} as in '
            f'{REFERENCE.value}, found {", ".join(other)} at {_size(held)}'
        )
    return _Data(reference, reference, held, TEST.value, names)


def _description(data: _Data, done: Trained, recipe: Recipe) -> dict[str, object]:
    """Returns a description of how the classifier was trained, for its file."""
    return {
        'reference': REFERENCE.value,
        'reference_sha256': fingerprint(data.reference),
        'classes': list(data.classes),
        'images': len(data.train.images),
        'test': data.tested,
        'test_images': len(data.test.images),
        'test_accuracy': done.accuracy,
        **({'test_accuracy_mirrored': done.mirrored_accuracy} if recipe.flip else {}),
        'epochs': done.epochs,
        'seconds': done.seconds,
        'cutout': recipe.cutout,
        'cutmix': recipe.cutmix,
        'device': jax.devices()[0].device_kind,
        'seed': SEED.value,
    }


def save(target: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an .npz, whole or not at all.

    Raises:
      UserError: the file cannot be written.
    """
    with written(target, '--output') as partial, partial.open('wb') as file:
        # Sorted entries make the file a function of its contents.
        np.savez(file, **dict(sorted(arrays.items())))  # type: ignore[arg-type]


def _size(images: Images) -> str:
    return '{}x{}'.format(*images.images.shape[1:3])


if __name__ == '__main__':
    command.run(main)
