"""Checks that come before the first step of a run, in the order of their cost."""

from __future__ import annotations

import pathlib

import jax
from absl import logging

from jaxunet.checkpoint.optimizer import endless_warmup
from jaxunet.config import Config
from jaxunet.data.classes import check_classes
from jaxunet.data.look import log_pixels
from jaxunet.data.source import ArraySource, Source
from jaxunet.data.sources import open_images
from jaxunet.model import cost as estimate
from jaxunet.ops.backends import Kernels, choose
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import warn_of_small_limit
from jaxunet.runtime.paths import check_local, expanded
from jaxunet.training.loggers.installed import make_loggers
from jaxunet.training.parallel import Parallel


def open_checked(config: Config, given: ArraySource | None = None) -> tuple[Source, Kernels]:
    """Returns the images and kernels of a run; warns of a config that is unlikely to be meant.

    Args:
      given: as for `jaxunet.data.sources.open_images`.

    Raises:
      UserError: a backend, a device or a logger is missing, or the images do not fit the config.
    """
    # A missing backend or device is an error before anything is read or written.
    kernels = choose(config.backend, config.precision)
    kernels.check_averages(config)
    Parallel(config, kernels)
    if jax.process_index() == 0:
        make_loggers(config.train.loggers)
    warn_of_small_limit()
    estimate.warn_if_long_on_a_cpu(config)
    if warning := endless_warmup(config):
        logging.warning('%s', warning)
    source = open_images(config, given)
    check_classes(config, source)
    if jax.process_index() == 0:
        log_pixels(source)
    return source, kernels


def check_workdir(config: Config, workdir: pathlib.Path) -> None:
    """Checks that a run does not write to a URL, or its sample grids between its training images.

    Raises:
      UserError: the workdir is a URL, the folder of `data.path` or of `data.condition`, or lies in
        one of them and is not hidden.
    """
    check_local(workdir, '--workdir')
    _check_outside(workdir, config.data.path, 'data.path')
    _check_outside(workdir, config.picture_path, 'data.condition')


def _check_outside(workdir: pathlib.Path, path: str, field: str) -> None:
    images = pathlib.Path(expanded(path))
    if not path or not images.is_dir():
        return
    images, folder = images.resolve(), workdir.resolve()
    if not folder.is_relative_to(images):
        return
    if not any(part.startswith('.') for part in folder.relative_to(images).parts):
        raise UserError(
            f'--workdir: {workdir} is in {path}, the folder of {field}, so a '
            'resumed run would train on its own samples; expected a folder outside it'
        )
