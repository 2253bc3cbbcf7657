"""Trains the feature network that stands in for Inception, a small classifier of the reference's classes, and writes its file.

    python -m jaxunet.metrics.train_features --reference cifar10_train.tar.xz --test cifar10_test.tar.xz --output cifar10_features.npz
    python -m jaxunet.evaluate --samples samples/ --reference cifar10_train.tar.xz --features cifar10_features.npz

CIFAR-10: some minutes on one GPU. What is measured with it is labelled by the file, and is no FID: compare numbers of one file only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags

from jaxunet.config import cli
from jaxunet.metrics.classifier import to_arrays
from jaxunet.metrics.classifier_training import Recipe, train
from jaxunet.metrics.features import CLASSIFIER, KIND
from jaxunet.metrics.labelled_images import Images, fingerprint, load, split
from jaxunet.runtime import download
from jaxunet.runtime.errors import UserError

REFERENCE = flags.DEFINE_string(
    'reference', None, 'Images with classes: what data.path may be, at one size.', required=True
)
TEST = flags.DEFINE_string(
    'test',
    None,
    'Images of the same classes to tell the accuracy on; default: a tenth of the reference, held out.',
)
OUTPUT = flags.DEFINE_string('output', None, 'The file to write, .npz.', required=True)
EPOCHS = flags.DEFINE_integer(
    'epochs', None, f'Passes over the images; default: {Recipe.epochs}.', lower_bound=1
)
SECONDS = flags.DEFINE_float(
    'seconds', None, 'Instead of --epochs: as many as fit in this time.', lower_bound=0.1
)
BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', Recipe.batch_size, 'Images of a step.', lower_bound=2
)
CHANNELS = flags.DEFINE_integer(
    'channels',
    96,
    'Of the first convolution; the stages have up to 8 times as many.',
    lower_bound=1,
)
LEARNING_RATE = flags.DEFINE_float(
    'learning_rate', Recipe.learning_rate, 'Peak, for batches of 512.', lower_bound=1e-6
)
FLIP = flags.DEFINE_bool(
    'flip', True, 'Mirror images at random; switch it off where left and right make a difference.'
)
CUTOUT = flags.DEFINE_float(
    'cutout',
    Recipe.cutout,
    "Side of the blank square, as a share of the images' side; DeVries and Taylor (arXiv 1708.04552) take 0.5 for CIFAR-10.",
    lower_bound=0,
    upper_bound=1,
)
CUTMIX = flags.DEFINE_float(
    'cutmix',
    Recipe.cutmix,
    "Probability that a batch's images get a rectangle of one another, and that share of the class (Yun et al., arXiv 1905.04899).",
    lower_bound=0,
    upper_bound=1,
)
SEED = flags.DEFINE_integer(
    'seed',
    0,
    'Of the initial weights, the order of the images, and the augmentation.',
    lower_bound=0,
)


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
        cutout=CUTOUT.value,
        cutmix=CUTMIX.value,
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
        **({'test_accuracy_mirrored': done.mirrored_accuracy} if recipe.flip else {}),
        'epochs': done.epochs,
        'seconds': done.seconds,
        'cutout': recipe.cutout,
        'cutmix': recipe.cutmix,
        'device': jax.devices()[0].device_kind,
        'seed': SEED.value,
    }
    save(
        target,
        {
            KIND: np.array(CLASSIFIER),
            **to_arrays(done.architecture, done.params, done.statistics, done.feature_scale, told),
        },
    )
    print(
        f'test accuracy {done.accuracy:.4f} on {len(test_set.images)} images ({tested}); {done.epochs} epochs in {done.seconds:.1f} s'
    )
    if recipe.flip:
        print(
            f'with the scores of an image and its mirror image added: {done.mirrored_accuracy:.4f}'
        )
    print(
        f'{target}: features {CLASSIFIER}-{download.digest(target, "sha256")[:8]}, for python -m jaxunet.evaluate --features {target}'
    )


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
        raise UserError(
            f'--output: {target}: cannot be written: {error.strerror or error}; check the folder and the free space'
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _size(images: Images) -> str:
    return '{}x{}'.format(*images.images.shape[1:3])


if __name__ == '__main__':
    cli.run(main)
