"""guided-diffusion's ImageNet 64×64 run: class-conditional, learned variance, 296 M parameters.

    python -m jaxunet.train --config configs/imagenet64.py --config.data.path=/data/imagenet64

The images lie in one sub-folder for each class. To sample with the published weights of this
network:

    python -m jaxunet.sample --checkpoint 64x64_diffusion.pt --preset adm_imagenet64

Hardware: several 80 GB GPUs, or a smaller batch. Time and result: the full run has not been done.
Source: ADM, Dhariwal & Nichol 2021, arXiv 2105.05233; openai/guided-diffusion.
"""

from ml_collections import ConfigDict

from jaxunet.config import default_config


def get_config() -> ConfigDict:
    """Returns the config of this run; the command line can change any field."""
    config = default_config()
    config.precision = 'bfloat16'

    model = config.model
    model.image_channels = 3
    model.base_channels = 192
    model.channel_mult = (1, 2, 3, 4)
    model.num_res_blocks = 3
    model.attention_resolutions = (32, 16, 8)
    model.num_head_channels = 64
    model.resblock_updown = True
    model.scale_shift_norm = True
    model.dropout = 0.1
    model.num_classes = 1000
    model.label_dropout = 0.0

    config.diffusion.schedule = 'cosine'
    config.diffusion.learn_sigma = True

    config.data.path = 'imagenet64'
    config.data.image_size = (64,)
    config.data.batch_size = 2048
    config.data.num_workers = 8

    config.optimizer.learning_rate = 3e-4
    config.optimizer.schedule = 'constant'
    config.optimizer.warmup_steps = 0
    config.optimizer.clip_norm = 0.0
    config.ema.rates = (0.9999,)
    config.ema.warmup = False

    config.train.steps = 540_000
    config.train.log_every = 100
    config.train.sample_every = 10_000
    config.train.checkpoint_every = 10_000
    return config
