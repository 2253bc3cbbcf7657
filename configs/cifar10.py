"""DDPM's CIFAR-10 run: unconditional, 35.7 M parameters.

    python -m jaxunet.train --config configs/cifar10.py        # downloads the official archive
    python -m jaxunet.train --config configs/cifar10.py --config.data.path=cifar10:/path/to/copy

To measure the FID of 10,000 samples during training: --config.train.evaluate_every=50000. To train
a class-conditional model with guidance: --config.model.num_classes=10
--config.model.label_dropout=0.1.

Hardware: one GPU or more. Time: 78 steps a second on an H100 with backend=auto, about 3 hours for
the 795,600 steps. Result: the full run has not been done.

Recipe: --config.timesteps.sampler=adaptive --config.loss.weighting=min_snr. Of eight training
methods with this network, it had the lowest Fréchet distance (of a classifier's features) after 4
minutes of training: 25.6, compared with 33.5 for this config, which it reached in two thirds of the
time (three seeds; both with a constant learning rate after 500 steps; docs/results.md, "Training
methods"). After 45 minutes: 7.9, compared with 11.6, reached in half of the time (one seed).

Source: Ho et al. 2020, arXiv 2006.11239, appendix B; tqch/ddpm-torch, configs/cifar10.json.
ddpm-torch trains in float32 (--config.precision=float32), and draws samples in all 1000 steps with
the larger variance (--like ddpm_torch of jaxunet.sample).
"""

from ml_collections import ConfigDict

from jaxunet.config import default_config


def get_config() -> ConfigDict:
    """Returns the config of this run; the command line can change any field."""
    config = default_config()
    config.precision = 'bfloat16'

    model = config.model
    model.image_channels = 3
    model.base_channels = 128
    model.channel_mult = (1, 2, 2, 2)
    model.num_res_blocks = 2
    model.attention_resolutions = (16,)
    model.num_heads = 1
    model.num_head_channels = 0
    model.conv_resample = True
    model.downsample_padding = 'same'
    model.dropout = 0.1
    model.num_classes = 0
    model.label_dropout = 0.0
    model.time_embedding = 'ddpm'
    model.norm_eps = 1e-6
    model.init = 'ddpm'

    config.data.path = 'cifar10:'
    config.data.image_size = (32,)
    config.data.batch_size = 128
    config.data.augment = 'flip'

    config.optimizer.learning_rate = 2e-4
    config.optimizer.schedule = 'constant'
    config.optimizer.warmup_steps = 5000
    config.ema.rates = (0.9999,)

    # 2,040 epochs of ddpm-torch: it leaves out the last batch of each epoch, which is not full.
    config.train.steps = 2040 * (50_000 // 128)
    config.train.steps_per_call = 0  # up to 20: a GPU's host may be slower than its steps
    config.train.log_every = 100
    config.train.sample_every = 10_000
    config.train.sample_count = 64
    config.train.checkpoint_every = 10_000

    # Ancestral sampling in 100 of the 1000 timesteps. With so few steps, the smaller variance is
    # better (Nichol & Dhariwal 2021, section 4).
    config.evaluation.samples = 10_000
    config.evaluation.batch_size = 2000
    config.evaluation.sampler = 'ddpm'
    config.evaluation.steps = 100
    config.evaluation.variance = 'fixed_small'
    config.evaluation.metrics = ('fid', 'kid', 'precision', 'recall')
    return config
