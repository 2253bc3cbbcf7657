"""unet.cu's run: its 20.5 M-parameter UNet on a folder or archive of 64×64 images.

    python -m jaxunet.train --config configs/elephants64.py --config.data.path=elephants64.zip

elephants64.zip stands for a folder or archive of your own; docs/training.md says where a set like
it comes from.

Hardware: one GPU. Time: 40,000 steps took 9 minutes on an H200 with backend=xla; a step of
backend=auto takes about a third of the time (docs/results.md). Result: recognisable elephants, from
500 photographs.

The architecture is unet.cu's to the letter: its scripts read what `python -m jaxunet.export` writes
to a .bin. The training differs: bfloat16, last layers that start at zero, averaged weights,
gradient clipping, horizontal flips.
"""

from ml_collections import ConfigDict

from jaxunet.config import default_config


def get_config() -> ConfigDict:
    """Returns the config of this run; the command line can change any field."""
    config = default_config()
    config.precision = 'bfloat16'

    model = config.model
    model.image_channels = 3
    model.base_channels = 64
    model.channel_mult = (1, 2, 3, 4)
    model.num_res_blocks = 2
    model.attention_resolutions = (16, 8)
    model.num_head_channels = 32
    model.max_period = 1000
    model.num_classes = 0
    model.label_dropout = 0.0

    config.data.path = 'elephants64.zip'
    config.data.image_size = (64,)
    config.data.batch_size = 32
    config.data.augment = 'flip'

    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = 'constant'
    config.optimizer.warmup_steps = 500

    config.ema.rates = (0.9995,)

    config.train.steps = 40_000
    config.train.steps_per_call = 0  # up to 20: a GPU's host may be slower than its steps
    config.train.log_every = 100
    config.train.sample_every = 5000
    config.train.sample_count = 64
    config.train.checkpoint_every = 5000
    return config
