"""Trains a diffusion UNet.

    python -m jaxunet.train --config configs/elephants64.py [--config.section.field=value ...] [--workdir DIR]

Running the same command again resumes. SIGTERM and SIGINT save and exit with 0. `WORKDIR` gets checkpoints/, metrics.csv,
tensorboard/ and samples/.
"""

from __future__ import annotations

import os
import pathlib
import pprint
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import jax
from absl import flags, logging

from jaxunet import checkpoint, cli, estimate
from jaxunet.config import Config, resolve, to_dict
from jaxunet.data.sources import open_source
from jaxunet.errors import UserError
from jaxunet.load import load_initial
from jaxunet.ops import load_ops
from jaxunet.training.loop import Background, train
from jaxunet.training.parallel import Parallel

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Where checkpoints, logs and samples go; default: runs/NAME for configs/NAME.py.')
DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'Print the resolved config, parameter count, GFLOPs per image and a memory estimate, and exit.'
)
COORDINATOR = flags.DEFINE_string('coordinator', None, 'HOST:PORT of process 0, for a run over several hosts; with the next two flags.')
PROCESSES = flags.DEFINE_integer('num_processes', None, 'Number of processes of the run.')
PROCESS = flags.DEFINE_integer('process_id', None, 'Number of this process.')


def main(argv: Sequence[str]) -> None:
    config = resolve(CONFIG.value)
    if DRY_RUN.value:
        dry_run(config)
        return
    start_distributed()
    cli.enable_compilation_cache()
    load_ops(config.backend)  # both fail before anything is read or written
    Parallel(config)
    height, width, channels = config.image_shape
    source = open_source(config.data.path, image_shape=(height, width, channels), classes=config.data.classes)
    check_classes(config, len(source.class_names))
    workdir = pathlib.Path(WORKDIR.value) if WORKDIR.value else pathlib.Path('runs') / default_name()
    print(f'{len(source)} images from {config.data.path}; workdir {workdir}', flush=True)
    try:
        # A run that goes on no longer needs the file that it started from.
        train(config, workdir, source, None if checkpoint.exists(workdir) else load_initial(config))
    except checkpoint.CheckpointWriteError as error:
        # In one piece and on a line of its own: threads of the storage library may be printing tracebacks at this moment.
        sys.stderr.flush()
        os.write(2, f'\nerror: {error}\n'.encode())
        leave(cli.USER_ERROR)
    if any(thread.name == Background.NAME for thread in threading.enumerate()):
        leave(0)  # everything is saved; the compiler's thread would hold the exit up


def leave(code: int) -> NoReturn:
    """Exits at once, without waiting for threads of libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def default_name() -> str:
    """`NAME` of `--config configs/NAME.py`; `digits` without one."""
    given = [a for a in sys.argv[1:] if a.startswith('--config=')] or [
        sys.argv[i + 1] for i, a in enumerate(sys.argv[1:-1], 1) if a == '--config'
    ]
    return pathlib.Path(given[-1].removeprefix('--config=').split(':')[0]).stem if given else 'digits'


def start_distributed() -> None:
    """Joins a run over several processes if the flags name one.

    Raises:
      UserError: some of the three flags are missing.
    """
    values = {'coordinator': COORDINATOR.value, 'num_processes': PROCESSES.value, 'process_id': PROCESS.value}
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return
    if missing:
        raise UserError(f'--{missing[0]}: missing; a run over several processes needs --coordinator, --num_processes and --process_id')
    jax.distributed.initialize(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    logging.info('process %d of %d', jax.process_index(), jax.process_count())


def check_classes(config: Config, found: int) -> None:
    """A conditional model needs a label for every image, each within its table."""
    wanted = config.model.num_classes
    if wanted and found == 0:
        raise UserError(f'model.num_classes: {wanted}, but {config.data.path} has no class labels; set it to 0, or use class sub-folders')
    if wanted and found > wanted:
        raise UserError(f'model.num_classes: {wanted}, but {config.data.path} has {found} classes; raise it, or name some in data.classes')


def dry_run(config: Config) -> None:
    """Prints what a run would be. Allocates no arrays."""
    print(pprint.pformat(to_dict(config), sort_dicts=False, width=100))
    print(estimate.summary(config))


if __name__ == '__main__':
    cli.run(main)
