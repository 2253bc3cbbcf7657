"""Draws images from a trained model.

    python -m jaxunet.sample --checkpoint PATH --num_samples 64 --sampler ddim --steps 50 \\
        --output samples.png

Variations of a picture, or of a part of it:

    python -m jaxunet.sample --checkpoint PATH --init_image photo.png --strength 0.6
    python -m jaxunet.sample --checkpoint PATH --init_image photo.png --mask mask.png

Guided to a class by a classifier's gradient:

    python -m jaxunet.sample --checkpoint 64x64_diffusion.pt --preset adm_imagenet64 \\
        --classifier 64x64_classifier.pt --classifier_scale 1.0

Larger versions of given pictures:

    python -m jaxunet.sample --checkpoint 64_256_upsampler.pt --preset adm_upsample_64_256 \\
        --low_res samples64.npz

PATH is a workdir, one checkpoint in it, a weight file or a folder of diffusers (docs/weights.md),
or OWNER/NAME of a model on the Hugging Face hub.

Finished batches are kept in `samples.png.partial` until the output is complete. To resume an
interrupted command, run it again; batch size and devices may change, and there may be more samples.
Several processes, started as for `jaxunet.train`, share the work.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import flags, logging
from jaxtyping import PyTree

from jaxunet.checkpoint import model_flags
from jaxunet.checkpoint.load import Model, load_model
from jaxunet.checkpoint.store import checksum
from jaxunet.config import PRECISIONS, Config, split_backend
from jaxunet.data.classes import Classes, label_table
from jaxunet.data.images import check_output, class_columns, save_images
from jaxunet.data.reading import Reading
from jaxunet.runtime import command, compiled_cache, distributed
from jaxunet.runtime.background import Background
from jaxunet.runtime.command import interrupted
from jaxunet.runtime.errors import UserError, plural
from jaxunet.runtime.launchers import CLUSTERS
from jaxunet.runtime.out_of_memory import memory_for
from jaxunet.runtime.paths import is_remote, of_user
from jaxunet.runtime.whole_files import check_writable
from jaxunet.sampling import flags as how
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.identity import identity
from jaxunet.sampling.low_res import LowRes
from jaxunet.sampling.partial_output import Parts
from jaxunet.sampling.progress import counted

flags.adopt_module_key_flags(how)
CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'Workdir, checkpoint, weight file or folder, or OWNER/NAME.', required=True
)
NUM_SAMPLES = flags.DEFINE_integer(
    'num_samples',
    16,
    'Number of images; default: 16, or with --low_res or --condition one of each picture.',
    lower_bound=1,
    upper_bound=10**9,
)
CLASS_LABELS = flags.DEFINE_list(
    'class_labels',
    None,
    'Classes of the samples, repeated as often as needed: labels such as 3 or 0,1,2, or class '
    'names if the checkpoint has them (a name wins over a label); default: every class in turn.',
)
SEED = flags.DEFINE_integer(
    'seed',
    0,
    'The same seed gives the same images, whatever the batch size and the number of devices.',
    lower_bound=0,
    upper_bound=2**32 - 1,
)
BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 64, 'Images drawn at a time, over all devices.', lower_bound=1
)
DEVICES = flags.DEFINE_integer(
    'devices', 0, 'Number of devices of this machine to use; 0 = all.', lower_bound=0
)
OUTPUT = flags.DEFINE_string(
    'output', 'samples.png', 'X.png: one grid; X.npz, X.npy: arrays; a folder: one PNG per image.'
)
EMA = flags.DEFINE_string(
    'ema',
    '',
    'Average of the weights to use: a rate of the run, or a width such as 0.10, which needs the '
    "run's snapshots (ema.widths); default: the run's first rate, or the averages in a .pt; none = "
    'the weights themselves.',
)
MODEL = model_flags.define('Config of the model in a weight file that does not state it.')
flags.adopt_module_key_flags(model_flags)  # so that --help lists them
CLUSTER = flags.DEFINE_enum(
    'cluster',
    'auto',
    CLUSTERS,
    'Launcher of several processes; see python -m jaxunet.train --help.',
)
COORDINATOR = flags.DEFINE_string(
    'coordinator',
    None,
    'HOST:PORT of process 0, for processes started by hand; needs --num_processes and '
    '--process_id.',
)
PROCESSES = flags.DEFINE_integer(
    'num_processes',
    None,
    'With --coordinator: number of processes. They divide the samples and must share the folder of '
    '--output.',
)
PROCESS = flags.DEFINE_integer(
    'process_id', None, 'With --coordinator: index of this process, from 0.'
)
BACKEND = flags.DEFINE_string(
    'backend',
    None,
    'As config.backend: auto, xla, pallas, cuda, or a combination such as pallas+attention=cuda; '
    "default: the run's.",
)
PRECISION = flags.DEFINE_enum(
    'precision',
    None,
    PRECISIONS,
    "Compute type, as config.precision; default: the run's, or float32 for weight files.",
)
of_user(CHECKPOINT, OUTPUT)

ATTEMPTS = 4  # times that batches are drawn; more than once only if they are damaged later
POLL_SECONDS = 0.5  # between two checks for the other processes' samples


def main(argv: Sequence[str]) -> None:
    """Runs the command; Ctrl-C keeps the finished batches."""
    check_output(OUTPUT.value)
    if not is_remote(OUTPUT.value):
        check_writable(OUTPUT.value, '--output')
    how.check_owned_flags()
    if BACKEND.value is not None:
        split_backend(BACKEND.value, '--backend')
    start = distributed.Start(CLUSTER.value, COORDINATOR.value, PROCESSES.value, PROCESS.value)
    with distributed.joined(start):
        try:
            run()
        except (KeyboardInterrupt, SystemError) as error:
            if not interrupted(error):
                raise
            raise KeyboardInterrupt(
                'interrupted; the same command resumes with the remaining samples'
            ) from None


@memory_for(
    'drawing samples',
    'lower --batch_size, or --num_samples if this machine is full; finished batches are kept',
)
def run() -> None:
    """Draws this process's share of the samples; process 0 also saves the images."""
    compiled_cache.enable_compilation_cache()
    starting = Background(jax.devices)  # a GPU takes seconds to start
    model, config = load()
    starting.wait()
    check_output(OUTPUT.value, config.model.image_channels, Reading.of(config))
    limit = NUM_SAMPLES.value if NUM_SAMPLES.present else None
    guide = how.guide(config)
    classes = guide.classifier.classes if guide else config.model.num_classes
    of_pictures = classes if CLASS_LABELS.value is None else 0
    low_res = how.low_res(config, limit, Classes(of_pictures, model.class_names))
    count = len(low_res.pixels) if low_res and limit is None else NUM_SAMPLES.value
    how.check_memory(count, config)
    how.check_guidance(config)
    weaker = how.weaker()
    chosen = chosen_classes(Classes(classes, model.class_names))
    labels = class_labels(classes, chosen, count, low_res)
    generator = Generator(
        config,
        how.sampler_config(config),
        batch_size=min(BATCH_SIZE.value, count),
        devices=devices(),
        picture=how.picture(config),
        guide=guide,
        weaker=weaker,
    )
    logging.info('%s', generator.kernels)
    parts = Parts(
        OUTPUT.value,
        identity(generator, model.params, SEED.value, chosen, low_res),
        None if low_res is None else low_res.checksums(count),
    )
    resume(parts)
    rank, processes = jax.process_index(), jax.process_count()
    if rank == 0:
        evaluations, kind = generator.sampler.evaluations, jax.devices()[0].device_kind
        guided = f', guided by {how.CLASSIFIER.value}: {guide.classifier.note}' if guide else ''
        guided += f', guided by {weaker.note}' if weaker else ''
        print(
            f'{model.note}{guided}; {generator.sampler.config.name}, '
            f'{plural(evaluations, "evaluation")} of the network, {len(devices())} x {kind}',
            flush=True,
        )
        if classes and model.class_names:
            print(label_table(model.class_names), flush=True)

    params = generator.put(model.params)
    first, end = count * rank // processes, count * (rank + 1) // processes
    with counted(parts, count) as update:
        for _ in range(ATTEMPTS):
            draw(generator, params, parts, labels, low_res, first, end, update)
            if rank > 0:
                return
            images = finished_images(parts, count, update)
            if images is not None:
                break
            first, end = 0, count  # some finished batches were damaged: draw them again
        else:
            raise UserError(
                f'{parts.folder}: {ATTEMPTS} times, finished batches were damaged; check the disk '
                'and the memory of this machine, or choose another --output'
            )
    shown = 0 if low_res or CLASS_LABELS.value is not None else classes  # in turn, one a column
    columns, reading = class_columns(shown, count), generator.reading
    save_images(OUTPUT.value, images, labels, columns=columns, reading=reading)
    parts.remove()
    print(f'{plural(count, "image")} in {OUTPUT.value}')


def load() -> tuple[Model, Config]:
    """Loads the weights; returns them with the config that the flags change."""
    model = load_model(CHECKPOINT.value, ema=EMA.value, **MODEL.given())
    changes = {'backend': BACKEND.value, 'precision': PRECISION.value}
    return model, model.config.replace(**{k: v for k, v in changes.items() if v is not None})


def resume(parts: Parts) -> None:
    """Checks that all processes draw the same samples and see the same finished batches."""
    if jax.process_count() == 1:
        if parts.finished():
            logging.info('resuming from %s', parts.folder)
        return
    if jax.process_index() == 0:
        parts.create()
    pictures = f'{checksum(parts.made_from):08x}'
    distributed.agree(
        parts.identity
        | {'num_samples': NUM_SAMPLES.value, 'output': OUTPUT.value, 'pictures': pictures}
    )
    found = parts.finished() if parts.exists() else 'not there'
    distributed.agree({f'{parts.folder}, which the processes must share': found})


def draw(
    generator: Generator,
    params: PyTree,
    parts: Parts,
    labels: np.ndarray | None,
    low_res: LowRes | None,
    first: int,
    end: int,
    update: Callable[[float], None],
) -> None:
    """Draws the samples with index first to end − 1 that are missing, and stores each batch.

    Args:
      params: parameters from `generator.put`.
      parts: the finished samples.
      labels: class of every sample, or None for an unconditional model.
      low_res: the pictures to enlarge, or None.
      update: the function from `counted`, which updates the progress bar.

    Raises:
      UserError: a batch cannot be stored.
    """
    for start, stop in parts.missing(first, end, generator.batch_size):
        indices = np.arange(start, stop)

        def progress(share: float, batch: int = len(indices)) -> bool:
            update(share * batch)
            return True

        batch = generator(
            params,
            seed=SEED.value,
            indices=indices,
            labels=None if labels is None else labels[indices],
            low_res=None if low_res is None else low_res.of(indices),
            progress=progress,
        )
        try:
            parts.save(start, batch)
        except UserError as error:
            done = len(parts.finished())
            after = f'\nThe same command resumes after the {done} batches stored before.'
            raise UserError(f'{error}{after if done else ""}') from error


def finished_images(parts: Parts, count: int, update: Callable[[float], None]) -> np.ndarray | None:
    """Waits for the other processes and returns all samples; None if some files are damaged.

    Args:
      update: the function from `counted`, which updates the progress bar.
    """
    while jax.process_count() > 1 and parts.missing(0, count, count):
        update(0.0)
        time.sleep(POLL_SECONDS)  # if another process is lost, JAX ends this one
    update(0.0)
    return parts.load(count)


def devices() -> list[jax.Device]:
    """Returns the devices that --devices asks for.

    Raises:
      UserError: this machine has fewer.
    """
    if DEVICES.value > jax.local_device_count():
        raise UserError(
            f'--devices: {DEVICES.value} asked for, but this machine has {jax.local_device_count()}'
        )
    return jax.local_devices()[: DEVICES.value or None]


def chosen_classes(classes: Classes) -> list[int]:
    """Returns the labels that --class_labels gives by number or name; empty without the flag.

    Args:
      classes: classes of the model, or of the classifier that guides it.

    Raises:
      UserError: labels are given for an unconditional model, a class is unknown, or the flag has
        none.
    """
    given = CLASS_LABELS.value
    if classes.count == 0 and given is not None:
        raise UserError(
            '--class_labels: the model is unconditional (model.num_classes=0); leave the flag out'
        )
    if given == []:
        raise UserError(
            '--class_labels: expected labels such as 0,1,2, or names, found none; leave the flag '
            'out for every class in turn'
        )
    return classes.labels_of(given or [])


def class_labels(
    classes: int, chosen: list[int], count: int, low_res: LowRes | None = None
) -> np.ndarray | None:
    """Returns the class of every sample, int32 (count,); None for an unconditional model.

    Samples take the chosen classes in turn; without these, the classes of the pictures of --low_res
    or, without pictures, all classes.

    Args:
      classes: number of classes of the model.
      chosen: labels of --class_labels; empty without the flag.
      count: number of samples.
      low_res: the pictures of --low_res.

    Raises:
      UserError: no classes are chosen, and the pictures have none.
    """
    if classes and low_res is not None and not chosen:
        if not len(low_res.labels):
            raise UserError(
                '--class_labels: missing; the model has classes, and the pictures of --low_res '
                'have none'
            )
        return np.resize(low_res.labels, count)
    return np.resize(np.array(chosen or range(classes), np.int32), count) if classes else None


if __name__ == '__main__':
    command.run(main)
