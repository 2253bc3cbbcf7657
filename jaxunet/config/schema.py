"""The configuration of a run: one dataclass a section, one field a knob. Its defaults are the run of `configs/digits.py`.

A config file's `get_config()` starts from `default_config()`, sets fields and returns the `ConfigDict`; `jaxunet.config.resolve` turns
that into the frozen `Config` which the rest of the project reads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict


@dataclass(frozen=True)
class ParallelConfig:
    mode: str = 'jit'  # jit: one program over a device mesh; pmap: one program a device
    devices: int = 0  # how many devices to use; 0 = all
    concurrent_kernels: bool = (
        False  # of one GPU: its kernels run at once where none waits for another; takes more memory
    )


@dataclass(frozen=True)
class ModelConfig:
    """The UNet. Names follow guided-diffusion where it has the option; `jaxunet.model.unet` explains each."""

    image_channels: int = 1
    base_channels: int = 32
    channel_mult: tuple[float, ...] = (1, 2)
    num_res_blocks: int = 1
    attention_resolutions: tuple[int, ...] = (
        4,
    )  # shorter side, in pixels, of the feature maps that get attention
    num_heads: int = 0  # heads of every attention block; 0 = by num_head_channels
    num_heads_upsample: int = 0  # heads on the way up; 0 = num_heads
    num_head_channels: int = 32  # width of a head; 0 = by num_heads
    conv_resample: bool = False  # learned resampling; False = average pool and nearest neighbour
    downsample_padding: str = 'symmetric'  # of the stride-2 convolution: symmetric (guided-diffusion) | same (DDPM: right and bottom only)
    resblock_updown: bool = False  # residual blocks do the resampling
    scale_shift_norm: bool = (
        False  # the embedding scales and shifts after norm_2, rather than being added before it
    )
    dropout: float = 0.0
    num_classes: int = 10  # 0 = unconditional
    label_dropout: float = 0.1  # share of labels dropped in training, for classifier-free guidance
    time_embedding: str = (
        'adm'  # adm: cos then sin | ddpm: sin then cos, frequencies ending at 1/max_period
    )
    max_period: int = 10000
    norm_groups: int = 32
    norm_eps: float = 1e-5
    init: str = (
        'torch'  # torch: PyTorch's default layers, as guided-diffusion | ddpm: uniform fan-average
    )
    zero_init: bool = (
        True  # the last layer of every residual branch, and of the network, starts at zero
    )
    remat: bool = (
        False  # recompute blocks in the backward pass instead of storing their activations
    )


@dataclass(frozen=True)
class DiffusionConfig:
    steps: int = 1000
    schedule: str = 'linear'  # linear (DDPM) | cosine (IDDPM)
    prediction: str = 'epsilon'  # epsilon | x0 | v
    learn_sigma: bool = False  # the network also predicts the variance; hybrid loss of IDDPM
    vlb_weight: float = 1e-3  # weight of the variational bound in the hybrid loss


@dataclass(frozen=True)
class LossConfig:
    """How much each timestep's loss counts; `jaxunet.diffusion.weighting` has the equations."""

    weighting: str = 'uniform'  # uniform | min_snr | soft_min_snr | p2 | speed | uncertainty
    min_snr_gamma: float = 5.0
    soft_min_snr_sigma: float = 0.5  # σ_d
    p2_k: float = 1.0
    p2_gamma: float = 1.0
    speed_lambda: float = 0.6
    speed_tau: float = 0.7  # of diffusion.steps
    uncertainty_features: int = 128
    uncertainty_learning_rate: float = 1e-3


@dataclass(frozen=True)
class TimestepsConfig:
    """Which timesteps are trained; `jaxunet.diffusion.timesteps` and `jaxunet.diffusion.timestep_policy` have the equations."""

    sampler: str = 'uniform'  # uniform | loss_second_moment | speed | policy | adaptive
    history: int = 10  # loss_second_moment: losses kept for each timestep
    history_uniform: float = 0.001  # and the uniform share of its distribution
    speed_k: float = 5.0
    speed_tau: float = 0.7  # of diffusion.steps
    policy_every: int = 40  # steps between measurements
    policy_probes: int = 3  # timesteps whose bound rewards the policy
    policy_memory: int = 5  # measurements from which these are chosen
    policy_learning_rate: float = 1e-2
    policy_entropy: float = 0.01  # weight of the entropy bonus
    adaptive_bins: int = 32
    adaptive_memory: float = 300.0  # visits to a bin that its average remembers
    adaptive_uniform: float = 0.05  # uniform share of its distribution
    adaptive_correction: float = (
        1.0  # power of the importance weight 1/(T p): 1 = unbiased, 0 = none
    )


@dataclass(frozen=True)
class DataConfig:
    path: str = (
        'digits:'  # folder | .zip | .tar(.gz|.xz) | .npz | .bin | digits: | cifar10:[local copy]
    )
    image_size: tuple[int, ...] = (8,)  # (side,) or (height, width)
    batch_size: int = 64  # images of one optimizer step, over all devices
    num_workers: int = (
        0  # worker processes that decode images when they stream; 0 = threads of this process
    )
    cache: str = 'auto'  # device: the whole set as uint8 in device memory | stream: decode on the way | auto: device if it fits
    augment: str = 'none'  # none | flip (random horizontal flip)
    classes: tuple[
        str, ...
    ] = ()  # names of the classes to train on, which become labels 0, 1, ... in this order; () = all


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = 'adamw'  # adamw | adam
    learning_rate: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 100
    schedule: str = 'cosine'  # constant | cosine | linear (the last two fall to 0 at train.steps)
    clip_norm: float = 1.0  # global gradient norm; 0 = no clipping
    accumulate_steps: int = 1  # micro-batches that make up one batch


@dataclass(frozen=True)
class EmaConfig:
    rates: tuple[float, ...] = (0.995,)  # the first is the one that sampling uses
    warmup: bool = True  # decay = min(rate, (1 + n) / (10 + n)) after n steps


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1200
    # Of one call of the compiled program: more leave the host less to do; all other counts are multiples. 0: as many as suit.
    steps_per_call: int = 1
    log_every: int = 25
    sample_every: int = 400  # 0 = never
    sample_count: int = 60
    sample_steps: int = 50  # DDIM steps of the grids drawn while training
    evaluate_every: int = (
        0  # steps between evaluations (`evaluation`); 0 = never, else also after the last step
    )
    checkpoint_every: int = 400
    keep: int = 3  # checkpoints kept
    max_bad_steps: int = 20  # stop after this many non-finite steps in a row


@dataclass(frozen=True)
class EvaluationConfig:
    """What `train.evaluate_every` and `jaxunet.compare` measure: samples of the first average of the weights, of `seed`."""

    samples: int = 500
    batch_size: int = 256  # samples drawn at a time, over all devices
    sampler: str = 'ddim'  # ddpm | ddim | dpmpp_2m | heun
    steps: int = 50  # of the sampler; 0 = all that the model is trained with
    variance: str = ''  # of sampler=ddpm: fixed_small | fixed_large | learned; '' = learned if the model has it, else fixed_small
    eta: float = 0.0  # of sampler=ddim: noise, 0 = none, 1 = as ddpm
    skip_schedule: str = ''  # linear | quadratic | log_snr | karras, as --skip_schedule of jaxunet.sample; '' = the sampler's own
    guidance_scale: float = (
        1.0  # classifier-free guidance of a class-conditional model; 1 = plain conditional
    )
    metrics: tuple[str, ...] = ('fid',)  # of those of jaxunet.evaluate
    features: str = 'inception'  # or a file, as --features of jaxunet.evaluate
    reference: str = ''  # real images or statistics, as --reference of jaxunet.evaluate; '' = the training images as the model sees them


@dataclass(frozen=True)
class Config:
    seed: int = 0
    backend: str = 'auto'  # auto | xla | pallas | cuda, and other backends for some ops: pallas+adamw=cuda (see `split_backend`)
    precision: str = (
        'float32'  # compute type: float32 | bfloat16 | float16 (with dynamic loss scaling)
    )
    init_from: str = ''  # weights to start from: workdir, checkpoint, .bin, .pt or .safetensors
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    timesteps: TimestepsConfig = field(default_factory=TimestepsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the images, as the model sees them."""
        size = self.data.image_size
        return size[0], size[-1], self.model.image_channels

    @property
    def attention_levels(self) -> tuple[int, ...]:
        """Levels (0 = full resolution) whose residual blocks are followed by attention."""
        side = min(self.image_shape[:2])
        levels = range(len(self.model.channel_mult))
        return tuple(level for level in levels if side >> level in self.model.attention_resolutions)

    def replace(self, **changes: Any) -> Config:
        """A copy with fields changed; a section takes a dict of its changed fields: `c.replace(train={'steps': 9})`."""
        return dataclasses.replace(
            self,
            **{
                k: dataclasses.replace(getattr(self, k), **v) if isinstance(v, dict) else v
                for k, v in changes.items()
            },
        )


# The ops of `jaxunet.ops.vocabulary`, which a kernel backend may implement; AdamW is what is done to all weights at once.
OPS = ('conv3x3', 'norm_silu_conv3x3', 'group_norm', 'attention', 'linear', 'adamw')
PRECISIONS = ('float32', 'bfloat16', 'float16')


def default_config() -> ConfigDict:
    """Every field with its default, for config files to start from. Setting a field that does not exist raises, with near misses."""
    return ConfigDict(to_dict(Config())).lock()


get_config = default_config  # so that this file serves as the config file of a command without one


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested plain dicts (what checkpoints store as JSON)."""
    return dataclasses.asdict(config)
