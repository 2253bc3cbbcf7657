"""Writes a model's weights for other programs.

    python -m jaxunet.export --checkpoint PATH --output model.bin \\
        [--ema RATE|WIDTH|none] [--with_optimizer]
    python -m jaxunet.export --checkpoint PATH --output folder/ --license mit
    python -m jaxunet.export --init --config configs/elephants64.py --output model.bin
    python -m jaxunet.export --classifier --checkpoint 64x64_classifier.pt --image_size 64 \\
        --output classifier.safetensors

The extension of --output chooses the format; a slash at its end, or --format=diffusers, writes a
folder that diffusers loads, with a model card. unet.cu's generate.py and train_unet read the .bin.
Tensors in .pt and .safetensors have guided-diffusion's names; --names=unet.cu writes a .pt for
unet.cu's PyTorch network instead. --init writes untrained weights of a config's network.
--classifier copies a classifier of noisy images between .pt and .safetensors.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from jaxunet.checkpoint import model_flags
from jaxunet.checkpoint.load import Model, load_model
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config
from jaxunet.data.automatic import complete
from jaxunet.runtime import command
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import is_remote, of_user
from jaxunet.runtime.upload import check_uploadable
from jaxunet.runtime.whole_files import check_file, check_writable
from jaxunet.training.evaluation import metrics_at
from jaxunet.weights import (
    PROGRAMS,
    WRITTEN,
    diffusers,
    extension_of,
    hub,
    names_folder,
    read_classifier,
    unetcu,
    write_classifier,
    write_folder,
    write_weights,
)
from jaxunet.weights.diffusers_output import check_new
from jaxunet.weights.guided_diffusion import PROGRAM
from jaxunet.weights.guided_diffusion import flags as reader_flags

CHECKPOINT = flags.DEFINE_string(
    'checkpoint',
    None,
    'Workdir, checkpoint, .bin, .pt, .safetensors or .pkl file, or folder of diffusers.',
)
INIT = flags.DEFINE_bool(
    'init', False, 'Instead of --checkpoint: write untrained weights of the network of --config.'
)
OUTPUT = flags.DEFINE_string(
    'output',
    None,
    'File to write: .bin (unet.cu), .pt (guided-diffusion, or as --names says) or .safetensors; or '
    'a folder (diffusers), with a slash at its end or --format=diffusers.',
    required=True,
)
FORMAT = flags.DEFINE_enum(
    'format', None, [diffusers.PROGRAM], 'Format of --output; default: as its name says.'
)
LICENSE = flags.DEFINE_string(
    'license', '', 'The licence in the model card of --format=diffusers, such as mit.'
)
NAMES = flags.DEFINE_enum(
    'names', None, PROGRAMS, f'Names of the weights in a .pt; default: {PROGRAM}.'
)
OUTPUT_ORDER = flags.DEFINE_enum(
    'output_order',
    None,
    ['legacy', 'new'],
    "Order of attention's rows to write, as guided-diffusion's use_new_attention_order (False is "
    'legacy); default: that of the file that is read, or legacy if it has none.',
)
EMA = flags.DEFINE_string(
    'ema',
    '',
    'Average of the weights to write: a rate of the run, or a width such as 0.10, which needs the '
    "run's snapshots (ema.widths); default: the run's first rate, or the averages in a .pt; none = "
    'the weights themselves.',
)
WITH_OPTIMIZER = flags.DEFINE_bool(
    'with_optimizer', False, "Also write Adam's moments, to continue training; implies --ema=none."
)
CLASSIFIER = flags.DEFINE_bool(
    'classifier',
    False,
    'The file of --checkpoint is a classifier of noisy images; give the model that it guides by '
    '--preset or --config, or --image_size for RGB images.',
)
MODEL = model_flags.define(
    'Config of the model in a weight file that does not state it, or of --init.'
)
of_user(CHECKPOINT, OUTPUT)
flags.adopt_module_key_flags(model_flags)  # so that --help lists them


def main(argv: Sequence[str]) -> None:
    """Writes the weights that the flags name.

    Raises:
      UserError: a flag or file is wrong, or the format cannot hold the model.
    """
    if WITH_OPTIMIZER.value and EMA.value not in ('', 'none'):
        raise UserError(
            f'--ema: {EMA.value} with --with_optimizer; the moments belong to the weights without '
            'averaging, use --ema=none'
        )
    if INIT.value == bool(CHECKPOINT.value):
        found = 'both' if INIT.value else 'none'
        raise UserError(f'--checkpoint, --init: expected one of them, found {found}')
    is_folder = names_folder(OUTPUT.value, FORMAT.value)
    if is_folder:
        check_folder()
    else:
        extension_of(OUTPUT.value, WRITTEN)
        if LICENSE.present:
            raise UserError('--license: only a folder of diffusers has a model card; leave it out')
    if is_remote(OUTPUT.value):
        check_uploadable(OUTPUT.value, '--output')
    elif is_folder:
        check_writable(OUTPUT.value, '--output')
    else:
        check_file(OUTPUT.value, '--output')
    if CLASSIFIER.value:
        copy_classifier()
        return
    model = load(CHECKPOINT.value) if CHECKPOINT.value else fresh()
    if WITH_OPTIMIZER.value and model.moments is None:
        raise UserError(f'--with_optimizer: {CHECKPOINT.value} holds no moments of AdamW')
    if is_folder:
        write_folder(
            OUTPUT.value,
            model.params,
            model.config,
            class_names=model.class_names,
            license_name=LICENSE.value,
            step=model.step,
            metrics=metrics_at(CHECKPOINT.value, model.step),
        )
        print(f'{model.note} -> {OUTPUT.value} ({diffusers.PROGRAM})')
        return
    names, new_order = NAMES.value or PROGRAM, order(model)
    write_weights(
        OUTPUT.value,
        model.params,
        model.config,
        model.moments if WITH_OPTIMIZER.value else None,
        program=names,
        new_attention_order=new_order,
        class_names=model.class_names,
    )
    size = ''
    if not is_remote(OUTPUT.value):
        size = f' ({pathlib.Path(OUTPUT.value).stat().st_size / 2**20:.1f} MiB)'
    with_moments = ' with optimizer moments' if WITH_OPTIMIZER.value else ''
    print(f'{model.note} -> {OUTPUT.value}{size}{with_moments}')
    if OUTPUT.value.lower().endswith('.pt') and names == PROGRAM:
        given = reader_flags(model.config, new_attention_order=new_order)
        print(f'{PROGRAM} reads it with {given}')


def check_folder() -> None:
    """Checks the flags for a folder of diffusers.

    Raises:
      UserError: a flag has no effect, or the folder exists.
    """
    others = {'names': NAMES, 'output_order': OUTPUT_ORDER, 'with_optimizer': WITH_OPTIMIZER}
    others |= {'classifier': CLASSIFIER}
    if named := [f'--{name}' for name, flag in others.items() if flag.present]:
        raise UserError(f'{", ".join(named)}: no effect on a folder of diffusers; leave it out')
    check_new(OUTPUT.value)


def copy_classifier() -> None:
    """Copies the classifier of --checkpoint.

    Raises:
      UserError: a flag is missing or has no effect, or the file is not a classifier of such images.
    """
    path = CHECKPOINT.value
    if path is None:
        raise UserError('--classifier: needs --checkpoint, the file to copy')
    unused = {'names': NAMES, 'ema': EMA, 'with_optimizer': WITH_OPTIMIZER}
    unused |= {'new_attention_order': MODEL.order, 'output_order': OUTPUT_ORDER} | MODEL.stated
    del unused['image_size']
    if named := [f'--{name}' for name, flag in unused.items() if flag.present]:
        raise UserError(f'{", ".join(named)}: no effect with --classifier; leave it out')
    given = MODEL.given()
    config: Config | None = given['config']
    if config is None and 'image_size' in given:
        data, model = {'image_size': given['image_size']}, {'image_channels': 3}
        config = Config().replace(data=data, model=model)
    if config is None:
        raise UserError(
            '--classifier: expected --preset or --config of the model that it guides, or '
            '--image_size; found none of them'
        )
    classifier = read_classifier(path, config)
    write_classifier(OUTPUT.value, classifier.params, classifier.config, classifier.classes)
    print(f'{path}: {classifier.note} -> {OUTPUT.value}')


def load(path: str) -> Model:
    """Loads the weights of --checkpoint."""
    given = MODEL.given()
    if hub.has_no_order(path):
        given['new_attention_order'] = None  # the flag then means the order to write
    return load_model(path, ema=EMA.value, trained=WITH_OPTIMIZER.value, **given)


def fresh() -> Model:
    """Returns untrained weights of the network of --config.

    Fields that the config leaves open are chosen from its images.

    Raises:
      UserError: --config is missing or invalid, its images are needed but not there, or a flag has
        no effect.
    """
    unused = {'ema': EMA, 'with_optimizer': WITH_OPTIMIZER, 'preset': MODEL.preset} | MODEL.stated
    if named := [f'--{name}' for name, flag in unused.items() if flag.present]:
        raise UserError(f'{", ".join(named)}: no effect with --init; leave it out')
    if MODEL.config.value is None:
        raise UserError('--init: needs --config, the network whose weights to write')
    config = complete(MODEL.config.value)
    params = jax.tree.map(np.asarray, fresh_state(config).params)
    return Model(config, params, None, f'fresh weights of seed {config.seed}')


def order(model: Model) -> bool:
    """Returns the order of qkv's rows to write, as guided-diffusion's `use_new_attention_order`.

    --output_order chooses it. Without this flag it is the order of the weight file, or that of
    --new_attention_order for weights without an order. Formats of unet.cu have a single order.

    Raises:
      UserError: --output_order is given for a format of unet.cu, or together with
        --new_attention_order for weights without an order.
    """
    is_unetcu = OUTPUT.value.lower().endswith('.bin') or NAMES.value == unetcu.PROGRAM
    if OUTPUT_ORDER.value is not None:
        if is_unetcu:
            raise UserError('--output_order: unet.cu has one order only; leave it out')
        if MODEL.order.value is not None and (
            INIT.value or hub.has_no_order(str(CHECKPOINT.value))
        ):
            raise UserError(
                '--new_attention_order: these weights have no order by themselves; leave it out '
                'beside --output_order'
            )
        return OUTPUT_ORDER.value == 'new'
    if model.new_attention_order is None:
        return bool(MODEL.order.value)
    return model.new_attention_order and not is_unetcu


if __name__ == '__main__':
    command.run(main)
