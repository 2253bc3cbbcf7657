"""Starts a run as its command line asks, in a process of its own if it may be started again."""

from __future__ import annotations

import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

import jax
from absl import logging

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.load import load_initial
from jaxunet.checkpoint.newest import newest_config, saved_steps
from jaxunet.checkpoint.writer import orbax
from jaxunet.config import Config, by_path
from jaxunet.runtime import command, compiled_cache, distributed, program
from jaxunet.runtime.background import Background
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import memory_for
from jaxunet.runtime.paths import shown_path
from jaxunet.training.log_file import LogFile
from jaxunet.training.loop import train
from jaxunet.training.page import sample_command
from jaxunet.training.parallel import on_fewer_devices
from jaxunet.training.preemption import Preemption
from jaxunet.training.restarts import Supervisor
from jaxunet.training.saving import write_error_ends
from jaxunet.training.start import open_checked, print_images

MODULE = 'jaxunet.train'  # the command


def keep_log(arguments: Sequence[str]) -> None:
    """Keeps what the command logs for the log file of the run.

    Args:
      arguments: of the command.
    """
    log = LogFile(program.shown(shlex.join(['python', '-m', MODULE, *arguments])))
    log.addFilter(command.is_shown)
    logging.get_absl_logger().addHandler(log)


def check_restarts(start: distributed.Start) -> None:
    """Raises `UserError` if --restarts is for processes that this command cannot start again."""
    launcher = {'auto': distributed.detect(os.environ)}.get(start.cluster, start.cluster)
    if launcher in ('ompi', 'mpi4py'):
        raise UserError(
            '--restarts: mpirun cannot start one of its processes again; leave it out, or start '
            'the processes with srun'
        )
    if (start.processes or 1) > 1:
        raise UserError(
            f'--restarts: expected one process, or processes of srun, found --num_processes='
            f'{start.processes}; leave it out, and let SLURM or Kubernetes restart all processes '
            'with the same command, as docs/training.md shows'
        )


def supervise(arguments: Sequence[str], workdir: pathlib.Path, restarts: int) -> int:
    """Runs the command in a child process, and again if that dies; returns its exit code.

    Args:
      arguments: of the command.
      restarts: how often a process is started again.
    """
    child = [sys.executable, '-m', MODULE, *arguments, '--restarts=0']
    main = os.environ.get('SLURM_PROCID', '0') == '0'
    return Supervisor(child, workdir, restarts, main=main).run()


def run(
    config: Config, folder: pathlib.Path, start: distributed.Start, *, fewer_devices: bool
) -> None:
    """Joins the processes of the run, and trains.

    Args:
      folder: the workdir.
      fewer_devices: train on fewer devices than the config says if there are fewer.
    """
    with (
        distributed.joined(start),
        memory_for('this run', 'lower data.batch_size or choose a smaller network'),
    ):
        _run(config, folder, fewer_devices=fewer_devices)


def _run(config: Config, folder: pathlib.Path, *, fewer_devices: bool) -> None:
    compiled_cache.enable_compilation_cache()
    # A GPU takes seconds to start. Meanwhile Python does what every run needs.
    devices = Background(jax.devices)
    orbax()
    checkpoint.state_template(config)
    devices.wait()
    if fewer_devices:
        config = on_fewer_devices(config)
    source, kernels = open_checked(config)
    distributed.agree(
        by_path(config)
        | {
            'jax': jax.__version__,
            'devices': f'{jax.local_device_count()} x {jax.local_devices()[0].device_kind}',
            'backends': ', '.join(f'{op}={name}' for op, name in kernels.names.items()),
            'workdir': folder,
            'checkpoints in the workdir, which the processes must share': ', '.join(
                map(str, saved_steps(folder))
            )
            or 'none',
            f'images in {shown_path(config.data.path)}': len(source),
        }
    )
    if jax.process_index() == 0:
        print_images(config, source, folder)
    # A resumed run no longer needs the weights that it started from.
    resumes = bool(saved_steps(folder))
    initial = None if resumes else load_initial(config, source.class_names)
    with write_error_ends():
        reached = train(config, folder, source, initial, caller=Preemption())
    trained = newest_config(folder) or config  # whose steps may follow from a budget
    if reached >= trained.train.steps and jax.process_index() == 0:
        print(f'samples of the trained model: {sample_command(config, folder)}', flush=True)
