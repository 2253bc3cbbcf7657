"""EDM's CIFAR-10 run: DDPM++, unconditional, 55.7 M parameters.

    python -m jaxunet.train --config configs/edm_cifar10.py    # downloads the official archive

To train the class-conditional model: --config.model.num_classes=10. To start from the published
weights, or to draw samples of them:

    python -m jaxunet.train --config configs/edm_cifar10.py --config.train.steps=20000 \\
        --config.init_from=edm-cifar10-32x32-uncond-vp.pkl
    python -m jaxunet.sample --checkpoint edm-cifar10-32x32-uncond-vp.pkl --sampler heun --steps 18

For NCSN++: --config.model.time_embedding=fourier --config.model.channel_mult_noise=2
--config.model.encoder_type=residual --config.model.resample_filter=1,3,3,1.

Hardware: one GPU or more. Time and result: the full run of 200 million images has not been done.
The authors report an FID of 1.97 (1.79 with classes) of 50,000 samples, and of 1.98 (1.79) for
NCSN++.

Source: Karras et al. 2022, arXiv 2206.00364, table 7 (config F); NVlabs/edm, train.py. It trains in
float32 (--config.precision=float32). Two things differ here: steps whose gradients are not finite
are skipped, where it replaces these gradients by numbers; and its averages grow with a half-life of
1/20 of the run so far, not as ema.warmup says.
"""

from ml_collections import ConfigDict

from jaxunet.config import default_config

BATCH = 512
MILLION = 1_000_000  # images


def get_config() -> ConfigDict:
    """Returns the config of this run; the command line can change any field."""
    config = default_config()
    config.precision = 'bfloat16'

    model = config.model
    model.image_channels = 3
    model.base_channels = 128
    model.conv_in_channels = 128
    model.channel_mult = (2, 2, 2)
    model.num_res_blocks = 4
    model.attention_resolutions = (16,)
    model.decoder_attention = 'last'
    model.num_heads = 1
    model.num_head_channels = 0
    model.resblock_updown = True
    model.resample_proj = True
    model.skip_scale = 0.5**0.5
    model.dropout = 0.13
    model.num_classes = 0
    model.label_dropout = 0.0
    model.label_position = 'input'
    model.time_embedding = 'ddpm'
    model.norm_eps = 1e-6
    model.norm_group_channels = 4
    model.init = 'edm'

    config.diffusion.objective = 'edm'
    config.diffusion.edm_time_scale = 1.0

    config.data.path = 'cifar10:'
    config.data.image_size = (32,)
    config.data.batch_size = BATCH
    config.data.augment = 'edm'
    config.data.augment_probability = 0.12

    config.optimizer.name = 'adam'
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = 'constant'
    config.optimizer.warmup_steps = 10 * MILLION // BATCH
    config.optimizer.clip_norm = 0.0
    config.ema.rates = (0.5 ** (BATCH / (0.5 * MILLION)),)  # half-life: half a million images

    config.train.steps = 200 * MILLION // BATCH // 20 * 20
    config.train.steps_per_call = 0  # up to 20: a GPU's host may be slower than its steps
    config.train.log_every = 100
    config.train.sample_every = 10_000
    config.train.sample_count = 64
    config.train.checkpoint_every = 10_000

    config.evaluation.samples = 10_000
    config.evaluation.batch_size = 2000
    config.evaluation.sampler = 'heun'
    config.evaluation.steps = 18
    config.evaluation.metrics = ('fid', 'kid', 'precision', 'recall')
    return config
