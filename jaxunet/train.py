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

import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from jaxunet import is_function_too
from jaxunet.config import cli
from jaxunet.runtime import command
from jaxunet.runtime.interrupt import importing
from jaxunet.runtime.launchers import CLUSTERS
from jaxunet.runtime.paths import of_user

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
    CLUSTERS,
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
    """Trains, or prints what a run would do; returns the exit code of a run with --restarts."""
    with importing():  # only now, as --help needs none of it
        from jaxunet.runtime import distributed  # noqa: PLC0415
        from jaxunet.training import launch  # noqa: PLC0415
        from jaxunet.training.dry_run import dry_run  # noqa: PLC0415
        from jaxunet.training.start import chosen_config  # noqa: PLC0415
    start = distributed.Start(
        CLUSTER.value,
        COORDINATOR.value,
        PROCESSES.value,
        PROCESS.value,
        WAIT.value,
        HEARTBEAT.value,
    )
    workdir = pathlib.Path(WORKDIR.value or f'runs/{cli.config_name()}')
    if RESTARTS.value:
        launch.check_restarts(start)
        if not DRY_RUN.value:
            return launch.supervise(sys.argv[1:], workdir, RESTARTS.value)
    launch.keep_log(sys.argv[1:])
    config, saved = chosen_config(CONFIG.value, cli.named_fields(CONFIG), workdir)
    if DRY_RUN.value:
        distributed.check_flags(start)
        dry_run(config, saved, workdir, fewer_devices=FEWER_DEVICES.value)
    else:
        launch.run(config, workdir, start, fewer_devices=FEWER_DEVICES.value)
    return None


if __name__ == '__main__':
    command.run(main)
