"""Trains a diffusion UNet.

    python -m jaxunet.train --config configs/elephants64.py [--config.section.field=value ...]
                            [--workdir DIR]

Run the same command again to resume a run. On SIGTERM, SIGHUP or SIGINT (Ctrl-C) the run saves a
checkpoint and exits with 0; on a second SIGINT it exits with 130 and saves nothing. The folder
`--workdir` gets checkpoints/, metrics.csv, tensorboard/, samples/, log.txt, index.html (a page to
look at in a browser) and, with train.evaluate_every, evaluation.csv.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import os
import pathlib
import pprint
import shlex
import sys
from collections.abc import Sequence

import jax
from absl import flags, logging

from jaxunet import is_function_too
from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.load import fit_initial, load_initial
from jaxunet.checkpoint.newest import newest_classes, newest_config, saved_steps
from jaxunet.checkpoint.optimizer import endless_warmup, rate_jump
from jaxunet.checkpoint.resumable import check_resumable
from jaxunet.checkpoint.writer import orbax
from jaxunet.config import Config, by_path, cli, to_dict
from jaxunet.config.samplers import evaluation_sampler, grid_sampler
from jaxunet.config.unused import check_used
from jaxunet.data.automatic import complete
from jaxunet.data.classes import check_classes, keep_classes, label_table
from jaxunet.data.look import log_pixels
from jaxunet.data.source import with_class_order
from jaxunet.data.sources import check_path, is_downloaded, open_images
from jaxunet.metrics.features import INCEPTION
from jaxunet.model import cost as estimate
from jaxunet.model.low_res import check_condition
from jaxunet.ops.backends import choose
from jaxunet.runtime import command, compiled_cache, distributed, program
from jaxunet.runtime.background import Background
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import memory_for
from jaxunet.runtime.paths import is_remote, of_user, shown_path
from jaxunet.training.budget import check_named
from jaxunet.training.evaluation import check_training_images, evaluation_network
from jaxunet.training.log_file import LogFile
from jaxunet.training.loggers.installed import make_loggers
from jaxunet.training.loop import train
from jaxunet.training.page import sample_command
from jaxunet.training.parallel import Parallel, on_fewer_devices
from jaxunet.training.preemption import Preemption
from jaxunet.training.restarts import Supervisor
from jaxunet.training.saving import write_error_ends
from jaxunet.training.session import check_steps_per_call
from jaxunet.training.start import check_workdir, open_checked
from jaxunet.training.tuning import for_tuning, init_from_config
from jaxunet.training.workdir import check_makeable

is_function_too(__name__)
CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string(
    'workdir',
    None,
    'Folder for checkpoints, logs and samples; default: runs/NAME for configs/NAME.py.',
)
DRY_RUN = flags.DEFINE_bool(
    'dry_run',
    False,
    'Train nothing: print the config with all choices made, the samplers, what the run takes from '
    'init_from, the number of parameters, GFLOPs per image and an estimate of the memory.',
)
CLUSTER = flags.DEFINE_enum(
    'cluster',
    'auto',
    distributed.CLUSTERS,
    'Launcher of a run of several processes: slurm (srun), ompi (mpirun of Open MPI 4), mpi4py '
    '(any mpirun; needs mpi4py), auto (the one whose environment variables are set), or none, '
    'which trains in one process and ignores these variables.',
)
COORDINATOR = flags.DEFINE_string(
    'coordinator',
    None,
    'HOST:PORT of process 0, for processes started by hand; needs --num_processes and '
    '--process_id.',
)
PROCESSES = flags.DEFINE_integer('num_processes', None, 'With --coordinator: number of processes.')
PROCESS = flags.DEFINE_integer(
    'process_id', None, 'With --coordinator: index of this process, from 0.'
)
WAIT = flags.DEFINE_integer(
    'wait_seconds',
    300,
    'Run of several processes: seconds to wait until all have started.',
    lower_bound=1,
)
HEARTBEAT = flags.DEFINE_integer(
    'heartbeat_seconds',
    30,
    'Run of several processes: seconds without a message after which a process counts as dead and '
    'the others end.',
    lower_bound=2,
)
FEWER_DEVICES = flags.DEFINE_bool(
    'fewer_devices',
    False,
    'Train on fewer devices than parallel.devices says if there are fewer, and on fewer than there '
    'are if the batch does not divide among them. --restarts sets it from the first restart on.',
)
RESTARTS = flags.DEFINE_integer(
    'restarts',
    0,
    'Number of times that a run is started again from its last checkpoint if its process dies '
    '(killed by a signal, out of memory, stalled devices, a device error); every new checkpoint '
    'begins the count anew. 0 = never. The run goes on with the devices that are left. In a SLURM '
    'job, the job is requeued instead. Needs one process, or srun.',
    lower_bound=0,
)
of_user(WORKDIR)


def main(argv: Sequence[str]) -> int | None:
    """Joins the processes of the run, trains, and exits."""
    if RESTARTS.value:
        check_restarts()
        if not DRY_RUN.value:
            return supervise()
    log = LogFile(program.shown(command_line()))
    log.addFilter(command.is_shown)
    logging.get_absl_logger().addHandler(log)
    saved = newest_config(workdir())
    start_config = init_from_config(CONFIG.value, saved)
    values = for_tuning(CONFIG.value, saved, start_config, cli.named_fields(CONFIG))
    config = complete(values, saved, start_config)
    check_used(config, earlier=[saved] if saved else [])
    check_workdir(config, workdir())
    check_named(config, cli.named_fields(CONFIG))
    start = distributed.Start(
        CLUSTER.value,
        COORDINATOR.value,
        PROCESSES.value,
        PROCESS.value,
        WAIT.value,
        HEARTBEAT.value,
    )
    if DRY_RUN.value:
        distributed.check_flags(start)
        dry_run(config, saved)
        return None
    with (
        distributed.joined(start),
        memory_for('this run', 'lower data.batch_size or choose a smaller network'),
    ):
        run(config)
    return None


def command_line() -> str:
    """Returns the command line."""
    return shlex.join(['python', '-m', 'jaxunet.train', *sys.argv[1:]])


def check_restarts() -> None:
    """Raises `UserError` if --restarts is for processes that this command cannot start again."""
    launcher = {'auto': distributed.detect(os.environ)}.get(CLUSTER.value, CLUSTER.value)
    if launcher in ('ompi', 'mpi4py'):
        raise UserError(
            '--restarts: mpirun cannot start one of its processes again; leave it out, or start '
            'the processes with srun'
        )
    if (PROCESSES.value or 1) > 1:
        raise UserError(
            f'--restarts: expected one process, or processes of srun, found --num_processes='
            f'{PROCESSES.value}; leave it out, and let SLURM or Kubernetes restart all processes '
            'with the same command, as docs/training.md shows'
        )


def supervise() -> int:
    """Runs this command in a child process, and again if that dies; returns its exit code."""
    command = [sys.executable, '-m', 'jaxunet.train', *sys.argv[1:], '--restarts=0']
    return Supervisor(
        command,
        workdir(),
        RESTARTS.value,
        main=os.environ.get('SLURM_PROCID', '0') == '0',
    ).run()


def run(config: Config) -> None:
    """Trains, as this process's part of the run."""
    compiled_cache.enable_compilation_cache()
    # A GPU takes seconds to start. Meanwhile Python does what every run needs.
    devices = Background(jax.devices)
    orbax()
    checkpoint.state_template(config)
    devices.wait()
    if FEWER_DEVICES.value:
        config = on_fewer_devices(config)
    source, kernels = open_checked(config)
    folder = workdir()
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
        held = f' and {len(source.held_out)} held out' if source.held_out else ''
        print(
            f'{len(source)} images{held} from {shown_path(config.data.path)}; workdir {folder}',
            flush=True,
        )
    # A resumed run no longer needs the weights that it started from.
    resumes = bool(saved_steps(folder))
    initial = None if resumes else load_initial(config, source.class_names)
    with write_error_ends():
        reached = train(config, folder, source, initial, caller=Preemption())
    trained = newest_config(folder) or config  # whose steps may follow from a budget
    if reached >= trained.train.steps and jax.process_index() == 0:
        print(f'samples of the trained model: {sample_command(config, folder)}', flush=True)


def workdir() -> pathlib.Path:
    """Returns the folder of the run."""
    return pathlib.Path(WORKDIR.value or f'runs/{cli.config_name()}')


def dry_run(config: Config, saved: Config | None) -> None:
    """Prints the resolved config, what it starts from and the cost estimate of a run.

    Args:
      saved: config of the run that the workdir holds; None if it holds none.

    Raises:
      UserError: the workdir cannot be made, the run cannot resume the one in it or start from
        `init_from`, its images do not have the right classes, or it lacks a logger or what its
        evaluations need.
    """
    check_makeable(workdir())
    make_loggers(config.train.loggers)
    check_condition(config)
    choose(config.backend, config.precision, here=False).check_averages(config)
    check_evaluation(config)
    print(pprint.pformat(to_dict(config), sort_dicts=False, width=100))
    if saved is not None:
        changes = ', '.join(check_resumable(saved, config, workdir())) or 'nothing'
        print(f'resumes the run in {workdir()}, with its choices of fields; changed: {changes}')
        newest = saved_steps(workdir())[0]
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
        print(f'init_from: {start_from(config)}')
    print(estimate.summary(config), flush=True)
    estimate.warn_if_long_on_a_cpu(config)
    if warning := endless_warmup(config):
        print(warning)
    try:
        devices = on_fewer_devices(config) if FEWER_DEVICES.value else config
        Parallel(devices, choose(config.backend, config.precision))
    except UserError as error:
        print(f'{error}; a run on this machine alone ends with this error')
    try:
        check_path(config.data.path)
    except UserError as error:
        print(f'data.path: {error}; a run ends with this error')
        return
    if not is_downloaded(config.data.path):
        saved_names = newest_classes(workdir())
        source = with_class_order(open_images(config), saved_names)
        check_classes(config, source)
        if config.train.evaluate_every:
            check_training_images(config, source)
        log_pixels(source)
        if config.model.num_classes:
            print(label_table(keep_classes(saved_names, source.class_names, config, workdir())))


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


def start_from(config: Config) -> str:
    """Returns a line that says what a run takes from `init_from` and what starts fresh.

    Raises:
      UserError: see `load_initial`.
    """
    if saved_steps(workdir()):
        return f'not read, as the run resumes from its checkpoint in {workdir()}'
    names: Sequence[str] = ()
    unnamed = ''
    try:
        names = open_images(config).class_names
    except UserError as error:  # a dry run without images still says what it can
        unnamed = f'; names of classes not compared, as the images cannot be read ({error})'
    initial = fit_initial(config, names)
    return '; '.join((initial.note, *initial.report)) + unnamed


if __name__ == '__main__':
    command.run(main)
