"""Writes a model's weights for other programs.

    python -m jaxunet.export --checkpoint PATH --output model.bin \\
        [--ema RATE|WIDTH|none] [--with_optimizer]

unet.cu's generate.py and train_unet read the .bin; .pt and .safetensors use guided-diffusion's
names.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from jaxunet.checkpoint.load import load_model
from jaxunet.config import cli, resolve
from jaxunet.runtime.errors import UserError
from jaxunet.weights import write_weights

CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'Workdir, checkpoint, or .bin, .pt or .safetensors file.', required=True
)
OUTPUT = flags.DEFINE_string(
    'output',
    None,
    'File to write: .bin (unet.cu), .pt (guided-diffusion) or .safetensors.',
    required=True,
)
EMA = flags.DEFINE_string(
    'ema',
    '',
    'Average of the weights to write: a rate of the run, or a width such as 0.10, which needs the '
    "run's snapshots (ema.widths); default: the run's first rate; none = the weights themselves.",
)
WITH_OPTIMIZER = flags.DEFINE_bool(
    'with_optimizer', False, "Also write Adam's moments, to continue training; implies --ema=none."
)
NEW_ATTENTION_ORDER = flags.DEFINE_bool(
    'new_attention_order',
    None,
    "guided-diffusion's use_new_attention_order, for a .pt or .safetensors that does not state it; "
    'default: false.',
)
CONFIG_FILE = cli.define_optional_config(
    "Config of the weight file's model, if the file does not state it."
)


def main(argv: Sequence[str]) -> None:
    """Writes the weights that the flags name.

    Raises:
      UserError: a wrong flag or file, or a model that the format cannot hold.
    """
    with_optimizer = WITH_OPTIMIZER.value
    if with_optimizer and EMA.value not in ('', 'none'):
        raise UserError(
            f'--ema: {EMA.value} with --with_optimizer; the moments belong to the weights without '
            'averaging, use --ema=none'
        )
    is_run = pathlib.Path(CHECKPOINT.value).is_dir()
    given = resolve(CONFIG_FILE.value) if CONFIG_FILE.value is not None else None
    model = load_model(
        CHECKPOINT.value,
        ema='none' if with_optimizer and is_run else EMA.value,
        config=given,
        new_attention_order=NEW_ATTENTION_ORDER.value,
    )
    if with_optimizer and model.moments is None:
        raise UserError(f'--with_optimizer: {CHECKPOINT.value} holds no optimizer state')
    moments = model.moments if with_optimizer else None
    write_weights(OUTPUT.value, model.params, model.config, moments, class_names=model.class_names)
    size = pathlib.Path(OUTPUT.value).stat().st_size
    with_moments = ', with optimizer moments' if with_optimizer else ''
    print(f'{model.note} -> {OUTPUT.value} ({size / 2**20:.1f} MiB{with_moments})')


if __name__ == '__main__':
    cli.run(main)
