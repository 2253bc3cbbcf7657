"""Handwritten digits, class-conditional: UCI optdigits, 1,797 grey images of 8×8 in the package.

    python -m jaxunet.train --config configs/digits.py

Hardware: any; written for 2 CPU cores. Expected: about 1 minute there; clear digits in
runs/digits/samples, a column a class. Without --config, commands train on the same images with the
defaults of jaxunet/config/schema.py, which predict noise on the linear schedule and need more
steps.
"""

from ml_collections import ConfigDict

from jaxunet.config import default_config


def get_config() -> ConfigDict:
    """Returns the config of this run; the command line can change any field."""
    config = default_config()

    # Images of 8×8 need few channels: 166 thousand parameters.
    model = config.model
    model.base_channels = 16
    model.num_head_channels = 16
    model.norm_groups = 8

    # The best of three, in the same number of steps: docs/results.md#digits.
    config.diffusion.objective = 'edm'

    config.data.batch_size = 32
    config.optimizer.learning_rate = 2e-3

    config.train.steps = 1500
    config.train.sample_every = 500
    config.train.checkpoint_every = 500
    return config
