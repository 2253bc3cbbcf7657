"""Draws images from a trained model.

    python -m jaxunet.sample --checkpoint PATH --num_samples 64 --sampler ddim --steps 50 --output samples.png

PATH is a workdir, one checkpoint in it, or a .bin (unet.cu), .pt (guided-diffusion) or .safetensors file.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from jaxunet import cli
from jaxunet.config import BACKENDS, PRECISIONS, Config, resolve
from jaxunet.errors import UserError
from jaxunet.generate import Generator
from jaxunet.images import check_output, save_images
from jaxunet.load import load_model
from jaxunet.sampling import SAMPLERS, SKIP_SCHEDULES, VARIANCES, SamplerConfig

CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Workdir, checkpoint, or .bin, .pt or .safetensors file.', required=True)
NUM_SAMPLES = flags.DEFINE_integer('num_samples', 16, 'How many images.', lower_bound=1)
SAMPLER = flags.DEFINE_enum('sampler', 'ddpm', SAMPLERS, 'ddpm: ancestral sampling; ddim: fewer steps will do.')
STEPS = flags.DEFINE_integer('steps', None, 'Sampling steps; default: all that the model was trained with, or 50 with ddim.', lower_bound=1)
ETA = flags.DEFINE_float('eta', None, 'ddim: noise, from 0 (none, default) to 1 (as ddpm).')
SKIP_SCHEDULE = flags.DEFINE_enum('skip_schedule', 'linear', SKIP_SCHEDULES, 'Which steps are kept when some are skipped.')
VARIANCE = flags.DEFINE_enum(
    'variance', None, VARIANCES, 'ddpm: variance of each step; default learned if the model has it, else fixed_small.'
)
CLASS_LABELS = flags.DEFINE_list(
    'class_labels', None, 'Labels, repeated as often as needed, e.g. 3 or 0,1,2; default: every class in turn.'
)
GUIDANCE_SCALE = flags.DEFINE_float('guidance_scale', 1.0, 'Classifier-free guidance: 1 = plain conditional, more = closer to the class.')
SEED = flags.DEFINE_integer('seed', 0, 'Same seed, same images, whatever the batch size.', lower_bound=0)
BATCH_SIZE = flags.DEFINE_integer('batch_size', 64, 'Images drawn at a time, over all devices.', lower_bound=1)
DEVICES = flags.DEFINE_integer('devices', 0, 'How many devices to use; 0 = all.', lower_bound=0)
OUTPUT = flags.DEFINE_string('output', 'samples.png', 'X.png: one grid; X.npz: arrays; a folder: one PNG an image.')
EMA = flags.DEFINE_string('ema', '', "Rate of the average to use; default: the run's first; none = the parameters without averaging.")
NEW_ATTENTION_ORDER = flags.DEFINE_bool(
    'new_attention_order',
    None,
    "guided-diffusion's use_new_attention_order of a .pt or .safetensors that does not say; default: false, as there.",
)
CONFIG_FILE = cli.define_optional_config('Config whose model the weight file holds, where the file does not say.')
BACKEND = flags.DEFINE_enum('backend', None, BACKENDS, "Default: the run's.")
PRECISION = flags.DEFINE_enum('precision', None, PRECISIONS, "Default: the run's; float32 for weight files.")


def main(argv: Sequence[str]) -> None:
    check_output(OUTPUT.value)
    cli.enable_compilation_cache()
    given = resolve(CONFIG_FILE.value) if CONFIG_FILE.value is not None else None
    model = load_model(CHECKPOINT.value, ema=EMA.value, config=given, new_attention_order=NEW_ATTENTION_ORDER.value)
    config = model.config.replace(**{k: v for k, v in {'backend': BACKEND.value, 'precision': PRECISION.value}.items() if v is not None})
    labels = class_labels(config, NUM_SAMPLES.value)
    if GUIDANCE_SCALE.value != 1 and config.model.num_classes and config.model.label_dropout == 0:
        raise UserError(
            '--guidance_scale: the model was trained with every label (model.label_dropout=0) and cannot be guided; leave it at 1'
        )
    steps = STEPS.value or (min(50, config.diffusion.steps) if SAMPLER.value == 'ddim' else config.diffusion.steps)
    sampler = SamplerConfig(SAMPLER.value, steps, ETA.value, SKIP_SCHEDULE.value, VARIANCE.value, GUIDANCE_SCALE.value)
    generator = Generator(config, sampler, batch_size=min(BATCH_SIZE.value, NUM_SAMPLES.value), devices=devices())
    print(f'{model.note}; {SAMPLER.value}, {steps} steps, {len(devices())} x {jax.devices()[0].device_kind}', flush=True)

    images = []
    params = generator.put(model.params)
    with tqdm(
        total=NUM_SAMPLES.value, unit='image', dynamic_ncols=True, bar_format='{l_bar}{bar}| {n:.0f}/{total} [{elapsed}<{remaining}]'
    ) as bar:
        for start in range(0, NUM_SAMPLES.value, generator.batch_size):
            indices = np.arange(start, min(start + generator.batch_size, NUM_SAMPLES.value))

            def progress(share: float, start: int = start, count: int = len(indices)) -> bool:
                bar.update(start + share * count - bar.n)
                return True

            batch_labels = None if labels is None else labels[indices]
            batch = generator(params, seed=SEED.value, indices=indices, labels=batch_labels, progress=progress)
            assert batch is not None  # progress never stops it
            images.append(batch)
    classes = config.model.num_classes
    columns = classes if labels is not None and CLASS_LABELS.value is None and 1 < classes <= 20 else None
    save_images(OUTPUT.value, np.concatenate(images), labels, columns=columns)
    print(f'{NUM_SAMPLES.value} images in {OUTPUT.value}')


def devices() -> list[jax.Device]:
    if DEVICES.value > jax.local_device_count():
        raise UserError(f'--devices: {DEVICES.value} asked for, but this machine has {jax.local_device_count()}')
    return jax.local_devices()[: DEVICES.value or None]


def class_labels(config: Config, count: int) -> np.ndarray | None:
    """int32 (count,), or None for an unconditional model.

    Raises:
      UserError: labels for an unconditional model, or a label that is no class.
    """
    classes, given = config.model.num_classes, CLASS_LABELS.value
    if classes == 0:
        if given is not None:
            raise UserError('--class_labels: the model is unconditional (model.num_classes=0); leave the flag out')
        return None
    for label in given or []:
        if not (label.isdigit() and int(label) < classes):
            raise UserError(f'--class_labels: expected whole numbers from 0 to {classes - 1}, found {label!r}')
    cycle = [int(label) for label in given] if given else list(range(classes))
    return np.resize(np.array(cycle, np.int32), count)


if __name__ == '__main__':
    cli.run(main)
