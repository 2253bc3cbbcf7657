"""Prints what a run would do, and makes the checks that come before its first step."""

from __future__ import annotations

import pathlib
import pprint
from collections.abc import Sequence

from jaxunet.checkpoint.load import fit_initial
from jaxunet.checkpoint.newest import newest_classes, saved_steps
from jaxunet.checkpoint.optimizer import endless_warmup, rate_jump
from jaxunet.checkpoint.resumable import check_resumable
from jaxunet.config import Config, to_dict
from jaxunet.config.samplers import evaluation_sampler, grid_sampler
from jaxunet.data.classes import check_classes, keep_classes, label_table
from jaxunet.data.look import log_pixels
from jaxunet.data.source import with_class_order
from jaxunet.data.sources import check_path, is_downloaded, open_images
from jaxunet.metrics.features import INCEPTION
from jaxunet.model import cost as estimate
from jaxunet.model.low_res import check_condition
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import is_remote
from jaxunet.training.evaluation import check_training_images, evaluation_network
from jaxunet.training.loggers.installed import make_loggers
from jaxunet.training.parallel import Parallel, on_fewer_devices
from jaxunet.training.session import check_steps_per_call
from jaxunet.training.workdir import check_makeable


def dry_run(
    config: Config, saved: Config | None, workdir: pathlib.Path, *, fewer_devices: bool
) -> None:
    """Prints the resolved config, what it starts from and the cost estimate of a run.

    Args:
      saved: config of the run that the workdir holds; None if it holds none.
      fewer_devices: the run may have fewer devices than the config says.

    Raises:
      UserError: the workdir cannot be made, the run cannot resume the one in it or start from
        `init_from`, its images do not have the right classes, or it lacks a logger or what its
        evaluations need.
    """
    check_makeable(workdir)
    make_loggers(config.train.loggers)
    check_condition(config)
    choose(config.backend, config.precision, here=False).check_averages(config)
    check_evaluation(config)
    print(pprint.pformat(to_dict(config), sort_dicts=False, width=100))
    if saved is not None:
        changes = ', '.join(check_resumable(saved, config, workdir)) or 'nothing'
        print(f'resumes the run in {workdir}, with its choices of fields; changed: {changes}')
        newest = saved_steps(workdir)[0]
        check_steps_per_call(config, newest)
        if warning := rate_jump(saved, config, newest):
            print(warning)
    if config.train.minutes and saved is None:
        print(
            f'train.minutes={config.train.minutes:g}: a run times its step first, and takes as '
            'many steps as fit, in place of train.steps'
        )
    grids, evaluations = grid_sampler(config), evaluation_sampler(config)
    print(f'samplers while training: grids {grids.text}, evaluations {evaluations.text}')
    if config.init_from:
        print(f'init_from: {start_from(config, workdir)}')
    print(estimate.summary(config), flush=True)
    estimate.warn_if_long_on_a_cpu(config)
    if warning := endless_warmup(config):
        print(warning)
    try:
        devices = on_fewer_devices(config) if fewer_devices else config
        Parallel(devices, choose(config.backend, config.precision))
    except UserError as error:
        print(f'{error}; a run on this machine alone ends with this error')
    try:
        check_path(config.data.path)
    except UserError as error:
        print(f'data.path: {error}; a run ends with this error')
        return
    if not is_downloaded(config.data.path):
        saved_names = newest_classes(workdir)
        source = with_class_order(open_images(config), saved_names)
        check_classes(config, source)
        if config.train.evaluate_every:
            check_training_images(config, source)
        log_pixels(source)
        if config.model.num_classes:
            print(label_table(keep_classes(saved_names, source.class_names, config, workdir)))


def check_evaluation(config: Config) -> None:
    """Raises `UserError` if the run's evaluations lack something that need not be downloaded."""
    e = config.evaluation
    remote = e.features in INCEPTION or is_remote(e.features)
    if (
        config.train.evaluate_every
        and not remote
        and not (e.reference and is_downloaded(e.reference))
    ):
        evaluation_network(config)


def start_from(config: Config, workdir: pathlib.Path) -> str:
    """Returns a line that says what a run takes from `init_from` and what starts fresh.

    Raises:
      UserError: see `load_initial`.
    """
    if saved_steps(workdir):
        return f'not read, as the run resumes from its checkpoint in {workdir}'
    names: Sequence[str] = ()
    unnamed = ''
    try:
        names = open_images(config).class_names
    except UserError as error:  # a dry run without images still says what it can
        unnamed = f'; names of classes not compared, as the images cannot be read ({error})'
    initial = fit_initial(config, names)
    return '; '.join((initial.note, *initial.report)) + unnamed
