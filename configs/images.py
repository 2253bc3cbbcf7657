"""Your own images, of any number and size: the recipe that gives good pictures soonest.

    python -m jaxunet.train --config configs/images.py --config.data.path=my_photos

`my_photos` is a folder, a .zip or .tar of images, or anything else that data.path accepts. Fields
that are empty or 0 here are chosen from the images when training starts, and logged: their size (at
most 64x64 for photographs), grey or colour, the UNet's levels, batch, objective, learning rate and
number of steps. Set any of them to choose yourself: --config.data.image_size=128.

Hardware: one GPU. For 64x64 images, the network and the batch are those of configs/elephants64.py.
"""

from ml_collections import ConfigDict

from jaxunet.config import default_config


def get_config() -> ConfigDict:
    """Returns the config of this run; the command line can change any field."""
    config = default_config()
    config.precision = 'bfloat16'

    config.data.path = ''
    config.data.image_size = ()
    config.data.batch_size = 0
    config.data.augment = 'flip'
    config.data.holdout = 0.05  # loss on these images shows when the model begins to memorize

    model = config.model
    model.image_channels = 0
    model.base_channels = 64
    model.channel_mult = ()
    model.attention_resolutions = ()
    model.num_res_blocks = 2
    model.num_head_channels = 32
    model.num_classes = 0
    model.label_dropout = 0.0

    config.diffusion.objective = ''  # v for few images, else flow: docs/results.md#recipes

    config.optimizer.learning_rate = 0.0
    config.optimizer.schedule = 'linear'
    config.optimizer.warmup_steps = 500
    config.ema.rates = (0.9995,)

    config.train.steps = 0
    config.train.steps_per_call = 0  # up to 20: a GPU's host may be slower than its steps
    config.train.log_every = 100
    config.train.sample_every = 1000
    config.train.sample_count = 64
    config.train.checkpoint_every = 1000
    config.train.holdout_every = 500
    return config
