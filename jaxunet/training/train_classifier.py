"""Trains a classifier of noisy images, whose gradient guides samples to a class.

    python -m jaxunet.training.train_classifier --config FILE --workdir DIR
    python -m jaxunet.sample --checkpoint MODEL --classifier DIR/classifier.pt

`model` is the classifier's network; `diffusion` and `data.image_size` are those of the models that
it will guide. `DIR` gets classifier.pt, with guided-diffusion's names, metrics.csv and
checkpoints/. The same command resumes a run; SIGTERM and SIGINT save and exit with 0. A new run
with --config.init_from starts from another classifier.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import pathlib
from collections.abc import Sequence

from absl import flags

from jaxunet.checkpoint.newest import config_at, newest_config
from jaxunet.config import cli
from jaxunet.config.unused import check_used
from jaxunet.data.automatic import complete
from jaxunet.data.classes import check_classes, label_table
from jaxunet.data.look import log_pixels
from jaxunet.data.sources import open_images
from jaxunet.ops.backends import choose
from jaxunet.runtime import command, compiled_cache
from jaxunet.runtime.paths import of_user
from jaxunet.training.classifier import train_classifier
from jaxunet.training.loggers.installed import make_loggers
from jaxunet.training.noisy_classifier import FILE, check_trainable
from jaxunet.training.parallel import Parallel
from jaxunet.training.preemption import Preemption
from jaxunet.training.saving import write_error_ends
from jaxunet.training.start import print_images

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder for classifier.pt, checkpoints and metrics.', required=True
)
of_user(WORKDIR)


def main(argv: Sequence[str]) -> None:
    """Trains the classifier of the config.

    Raises:
      UserError: the config, the images or the workdir do not fit.
    """
    compiled_cache.enable_compilation_cache()
    workdir = pathlib.Path(WORKDIR.value)
    saved = newest_config(workdir)
    start = None if saved else config_at(CONFIG.value.get('init_from'))
    config = complete(CONFIG.value, saved, start)
    check_trainable(config)
    check_used(config, earlier=[saved] if saved else [])
    # A missing backend or device is an error before anything is read or written.
    Parallel(config, choose(config.backend, config.precision))
    make_loggers(config.train.loggers)
    source = open_images(config)
    check_classes(config, source)
    log_pixels(source)
    print_images(config, source, workdir)
    print(label_table(source.class_names), flush=True)
    with write_error_ends():
        step = train_classifier(config, workdir, source, Preemption())
    print(f'{workdir / FILE}: step {step}, for python -m jaxunet.sample --classifier')


if __name__ == '__main__':
    command.run(main)
