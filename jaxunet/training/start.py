"""Checks that come before the first step of a run, in the order of their cost."""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from typing import Any

import jax
from absl import logging

from jaxunet.checkpoint.newest import newest_config
from jaxunet.checkpoint.optimizer import endless_warmup
from jaxunet.config import Config
from jaxunet.config.unused import check_used
from jaxunet.data.automatic import complete
from jaxunet.data.classes import check_classes
from jaxunet.data.look import log_pixels
from jaxunet.data.source import ArraySource, Source
from jaxunet.data.sources import open_images
from jaxunet.model import cost as estimate
from jaxunet.ops.backends import Kernels, choose
from jaxunet.runtime.errors import UserError, plural
from jaxunet.runtime.out_of_memory import warn_of_small_limit
from jaxunet.runtime.paths import check_local, expanded, shown_path
from jaxunet.training.budget import check_named
from jaxunet.training.loggers.installed import make_loggers
from jaxunet.training.parallel import Parallel
from jaxunet.training.tuning import for_tuning, init_from_config


def chosen_config(
    values: Any, named: Collection[str], workdir: pathlib.Path, given: ArraySource | None = None
) -> tuple[Config, Config | None]:
    """Returns the config of a run with all choices made, and that of the run in its workdir.

    Args:
      values: as for `jaxunet.data.automatic.complete`.
      named: paths of the fields that the command line or the caller set.
      workdir: of the run; the second config is None if it holds none.
      given: as for `jaxunet.data.sources.open_images`.

    Raises:
      UserError: a field is wrong or has no effect, or as `check_workdir`.
    """
    saved = newest_config(workdir)
    start = init_from_config(values, saved)
    config = complete(for_tuning(values, saved, start, named), saved, start, given)
    check_used(config, earlier=[saved] if saved else [])
    check_workdir(config, workdir)
    check_named(config, named)
    return config, saved


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
    told = 'class' * bool(config.model.num_classes) or 'picture' * bool(config.model.low_res_size)
    if told and config.data.noise_candidates > 1:
        logging.warning(
            'data.noise_candidates: noise near its image tells the network the %s, which the noise '
            'of samples does not (docs/training.md)',
            told,
        )
    source = open_images(config, given)
    check_classes(config, source)
    if jax.process_index() == 0:
        log_pixels(source)
    return source, kernels


def print_images(config: Config, source: Source, workdir: pathlib.Path) -> None:
    """Prints how many images a run trains on, and its workdir."""
    held = f' and {len(source.held_out)} held out' if source.held_out else ''
    images = f'{plural(len(source), "image")}{held} from {shown_path(config.data.path)}'
    print(f'{images}; workdir {workdir}', flush=True)


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
