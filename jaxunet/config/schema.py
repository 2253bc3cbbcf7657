"""The configuration of a run: one dataclass per section, one field per option.

The defaults train a small model on the embedded digits. Fields marked "chosen" may be left open, by
the value beside the word; `jaxunet.data.automatic` then chooses them from the images. A config
file's `get_config()` starts from `default_config()`, sets fields and returns the `ConfigDict`;
`jaxunet.config.resolve` checks it and returns the frozen `Config` that everything else reads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

SUITS = -1  # evaluation.steps: the number that suits the sampler
AUGMENTATION_INPUTS = 9  # numbers that describe how data.augment=edm changed an image


@dataclass(frozen=True)
class ParallelConfig:
    """The distribution of training over devices."""

    mode: str = 'jit'  # jit: one program over a device mesh | pmap: one program per device
    devices: int = 0  # number of devices; 0 = all
    # Lets kernels overlap where that was measured to help: `ops.backends.Kernels.overlap`.
    concurrent_kernels: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The UNet. Names follow guided-diffusion where it has the option; see `jaxunet.model.unet`."""

    image_channels: int = 1  # 1 = grey, 3 = RGB; 0 = chosen
    base_channels: int = 32  # unit of channel_mult
    # Channels of each level as multiples of base_channels, from full resolution down; each level
    # has half the resolution of the one before. () = chosen, with attention_resolutions.
    channel_mult: tuple[float, ...] = (1, 2)
    num_res_blocks: int = 1  # residual blocks per level; the decoder has one more
    # Levels with attention, each named by the shorter side of its feature maps in pixels.
    attention_resolutions: tuple[int, ...] = (4,)
    num_heads: int = 0  # heads per attention block; 0 = derived from num_head_channels
    num_heads_upsample: int = 0  # heads per attention block of the decoder; 0 = num_heads
    num_head_channels: int = 32  # channels per head; 0 = derived from num_heads
    conv_resample: bool = False  # learned resampling; False = average pool and nearest neighbour
    # Padding of stride-2 convolutions: symmetric (guided-diffusion) | same (DDPM: right, bottom).
    downsample_padding: str = 'symmetric'
    resblock_updown: bool = False  # residual blocks change the resolution, not separate layers
    # True: the embedding scales and shifts the output of norm_2. False: it is added before norm_2.
    scale_shift_norm: bool = False
    dropout: float = 0.0  # probability, in each residual block; rounded to multiples of 2⁻¹⁶
    num_classes: int = 10  # 0 = unconditional: class labels are not used
    # Share of labels that training drops; above 0, samples can have classifier-free guidance.
    label_dropout: float = 0.1
    # adm: cos, then sin | ddpm: sin, then cos, with frequencies down to 1/max_period.
    time_embedding: str = 'adm'
    max_period: int = 10000  # ratio of the embedding's highest to its lowest frequency
    norm_groups: int = 32  # groups of GroupNorm
    norm_eps: float = 1e-5  # added to GroupNorm's variance
    # Initial kernels; biases are zero. torch: PyTorch's default | ddpm: uniform fan-average.
    init: str = 'torch'
    # The last layer of every residual branch and the output layer start at zero.
    zero_init: bool = True
    # Recompute blocks in the backward pass instead of storing their activations.
    remat: bool = False
    # Super-resolution and colouring: (side,) or (height, width) of a picture that the network sees,
    # enlarged, beside the noisy image, at most as large as that; in training it is made of the
    # image (data.condition). () = none.
    low_res_size: tuple[int, ...] = ()


@dataclass(frozen=True)
class DiffusionConfig:
    """The diffusion process and what the network predicts.

    See `jaxunet.diffusion.process`, and `jaxunet.diffusion.levels` for edm and flow.
    """

    # epsilon | x0 | v, at the timesteps of `schedule`; edm | flow, at continuous noise levels.
    objective: str = 'epsilon'
    # T: number of timesteps, or of slices of equal probability for edm and flow.
    steps: int = 1000
    # epsilon, x0 and v: linear (DDPM; also means unset) | cosine (IDDPM). edm and flow have none.
    schedule: str = 'linear'
    edm_mean: float = -1.2  # edm: mean and standard deviation of ln(σ) in training
    edm_std: float = 1.2
    edm_sigma_data: float = 0.5  # edm: standard deviation of the pixels, in [-1, 1]
    flow_mean: float = 0.0  # flow: mean and standard deviation of logit(t) in training
    flow_std: float = 1.0
    learn_sigma: bool = False  # the network also predicts the variance; hybrid loss of IDDPM
    vlb_weight: float = 1e-3  # weight of the variational bound in the hybrid loss
    # The network reads 1000 t/T instead of the timestep t (IDDPM's rescale_timesteps).
    rescale_timesteps: bool = False
    # Trains the variational bound alone, T L_vlb (IDDPM's use_kl, L_vlb); without learn_sigma with
    # the variance β.
    kl_loss: bool = False

    @property
    def continuous(self) -> bool:
        """True if noise levels are continuous, without timesteps."""
        return self.objective in ('edm', 'flow')

    @property
    def time_scale(self) -> float:
        """Factor from a timestep to the time that the network reads."""
        return 1000 / self.steps if self.rescale_timesteps else 1.0


@dataclass(frozen=True)
class LossConfig:
    """The weight of each timestep's loss; equations in `jaxunet.diffusion.weighting`.

    A field that begins with the name of a weighting belongs to that weighting, and is refused with
    another (`jaxunet.config.unused`).
    """

    weighting: str = 'uniform'  # uniform | min_snr | soft_min_snr | p2 | speed | uncertainty
    min_snr_gamma: float = 5.0  # γ: largest SNR that counts
    soft_min_snr_sigma: float = 0.5  # σ_d: standard deviation of the pixels, in [-1, 1]
    p2_k: float = 1.0  # k
    p2_gamma: float = 1.0  # γ
    speed_lambda: float = 0.6  # λ: weights before τ lie between 1 - λ and λ
    speed_tau: float = 0.7  # τ, as a fraction of diffusion.steps
    uncertainty_features: int = 128  # Fourier features of the noise level
    uncertainty_learning_rate: float = 1e-3


@dataclass(frozen=True)
class TimestepsConfig:
    """The distribution of training timesteps.

    Equations in `timesteps`, `timestep_policy` and `information_rate` of `jaxunet.diffusion`. A
    field that begins with the name of a sampler belongs to that sampler, and is refused with
    another (`jaxunet.config.unused`).
    """

    # uniform | loss_second_moment | speed | speed_code | policy | adaptive | infonoise
    sampler: str = 'uniform'
    history: int = 10  # loss_second_moment: losses kept per timestep
    history_uniform: float = 0.001  # loss_second_moment: uniform share of the distribution
    speed_k: float = 5.0  # timesteps before τ are drawn this many times as often
    speed_tau: float = 0.7  # τ, as a fraction of diffusion.steps
    policy_every: int = 40  # optimizer steps between measurements
    policy_probes: int = 3  # timesteps whose bound rewards the policy
    policy_memory: int = 5  # recent measurements from which the probes are chosen
    policy_learning_rate: float = 1e-2
    policy_entropy: float = 0.01  # weight of the entropy bonus
    adaptive_bins: int = 32  # intervals of timesteps whose losses are averaged
    adaptive_memory: float = 300.0  # length of a bin's moving average, in visits to the bin
    adaptive_uniform: float = 0.05  # adaptive: uniform share of the distribution
    # adaptive: power of the importance weight 1/(T p); 1 = unbiased, 0 = no correction.
    adaptive_correction: float = 1.0
    infonoise_bins: int = 32  # intervals of ln(σ) whose losses are averaged
    infonoise_memory: float = 300.0  # length of a bin's moving average, in visits to the bin
    infonoise_warmup: int = 1000  # optimizer steps with uniform timesteps
    infonoise_pivot: float = 0.0  # c: noise-to-signal ratio at half the gate; 0 = the onset rule
    infonoise_uniform: float = 0.05  # infonoise: uniform share of the distribution


@dataclass(frozen=True)
class DataConfig:
    """The training images and how they reach the device."""

    # Folder | .zip | .tar(.gz|.xz) | .npz | .bin(.gz) | digits: | cifar10:[local copy] |
    # cifar10_test:[local copy].
    path: str = 'digits:'
    image_size: tuple[int, ...] = (8,)  # (side,) or (height, width), in pixels; () = chosen
    batch_size: int = 64  # images per optimizer step, over all devices; 0 = chosen
    num_workers: int = 0  # worker processes that decode streamed images; 0 = threads
    # device: all images as uint8 in device memory | stream: decode on demand | auto: device if the
    # images fit.
    cache: str = 'auto'
    # Part of an image that is cut out, with the shape of image_size, and resized. center: the
    # largest centred part | random: another part every epoch, as guided-diffusion's random_crop;
    # streams the images.
    crop: str = 'center'
    crop_least: float = 0.8  # crop=random: sides of the smallest part, as a share of the largest
    # none | flip: random horizontal flip | edm: random geometry, which the network gets as an
    # input, so that samples do not show it (`jaxunet.training.augmentation`).
    augment: str = 'none'
    # augment=edm: probability of each transformation; mirroring left and right has 1/2.
    augment_probability: float = 0.12
    augment_rule: str = 'edm'  # augment=edm: edm: as in EDM's code | earlier: see the module
    # Picture of an image for a network with model.low_res_size. image: the image, made small |
    # grey: its brightness, small or of the image's size, so that the network learns to colour.
    condition: str = 'image'
    # Noise samples per image, of which the nearest is used (immiscible diffusion); 1 = off.
    noise_candidates: int = 1
    # none: images keep the noise that they drew | batch: the noise of a batch is dealt out to its
    # images by distance (immiscible diffusion; `jaxunet.training.noise_assignment`).
    noise_assignment: str = 'none'
    # Names of the classes to train on; they become labels 0, 1, ... in this order. () = all.
    classes: tuple[str, ...] = ()
    # Images kept out of training, for the held-out loss: a number, or a share below 1. 0 = none.
    holdout: float = 0.0


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    # adamw | adam | muon: AdamW, and orthogonal steps for the matrices and convolutions of the
    # blocks (`jaxunet.checkpoint.muon`).
    name: str = 'adamw'
    learning_rate: float = 1e-3  # 0 = chosen
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 100  # optimizer steps of linear warm-up
    # After the warm-up: constant | cosine | linear (cosine and linear fall to 0 at train.steps).
    schedule: str = 'cosine'
    clip_norm: float = 1.0  # maximum global gradient norm; 0 = no clipping
    # Parts of a batch that are computed one after another, to save memory; 1 = all at once.
    accumulate_steps: int = 1


@dataclass(frozen=True)
class EmaConfig:
    """Moving averages of the weights: exponential ones, and power functions of the time."""

    rates: tuple[float, ...] = (0.995,)  # one average per rate; sampling uses the first
    warmup: bool = True  # decay = min(rate, (1 + n) / (10 + n)) after n steps
    # Widths (sigma_rel) of power-function averages, such as (0.05, 0.10). A run with any keeps
    # snapshots of them, from which averages of other widths can be computed after training.
    widths: tuple[float, ...] = ()
    snapshot_every: int = 0  # optimizer steps between snapshots; 0 = 32 over train.steps

    @property
    def width_names(self) -> dict[str, float]:
        """The power-function averages: width by the name that it has in the training state."""
        return {f'width_{width}': width for width in self.widths}


@dataclass(frozen=True)
class TrainConfig:
    """The length of a run and what happens along it; `*_every` fields count optimizer steps."""

    steps: int = 1200  # 0 = chosen
    # Length in passes over the training images; 0 = `steps` sets the length.
    epochs: float = 0.0
    # Optimizer steps per compiled call; larger values reduce host overhead. The other counts must
    # be multiples of it. 0 = chosen automatically.
    steps_per_call: int = 1
    log_every: int = 25  # a row of metrics.csv
    sample_every: int = 400  # a sample grid; 0 = never
    sample_count: int = 60  # images per sample grid
    # Sampling steps of a sample grid, with the objective's sampler. 0 = the sampler's own number,
    # or 50 of DDPM for the objectives epsilon and x0.
    sample_steps: int = 0
    # Steps between evaluations (see `evaluation`); also evaluates after the last step. 0 = never.
    evaluate_every: int = 0
    # Steps between measurements of the loss on the images of data.holdout and on as many training
    # images. 0 = never.
    holdout_every: int = 0
    checkpoint_every: int = 400
    # Checkpoints kept: the last `keep`, those at multiples of `keep_every` steps (0 = none), and
    # the `keep_best` with the best values of the first of evaluation.metrics.
    keep: int = 3
    keep_every: int = 0
    keep_best: int = 0
    max_bad_steps: int = 20  # stop after this many skipped steps in a row
    # Skip a step whose gradient norm is more than this many standard deviations above the mean of
    # the last 200 taken steps; never with fewer than 20 of them. 0 = off.
    spike_sigmas: float = 0.0
    # Times that a run goes back to its last good checkpoint after `max_bad_steps`, before it stops.
    rollbacks: int = 0
    # Steps between checks that weights and optimizer state are equal on all devices; also checked
    # before every checkpoint. 0 = never.
    check_replicas_every: int = 0
    stall_seconds: float = 600.0  # end the run if a wait for the devices takes longer; 0 = never


@dataclass(frozen=True)
class EvaluationConfig:
    """The measurement behind `train.evaluate_every` and `jaxunet.compare`.

    Images are drawn from the first weight average with `seed` and compared with real ones.
    """

    samples: int = 500
    batch_size: int = 256  # samples drawn at a time, over all devices
    # ddpm | ddim | dpmpp_2m | heun; '' = that of the sample grids, which suits the objective.
    sampler: str = ''
    # Sampling steps. -1 = the number that suits the sampler: 50 of ddpm and ddim, 20 of dpmpp_2m
    # and heun; 0 = every timestep (diffusion.steps), or for edm and flow, which have none, the same
    # but 250 of ddpm.
    steps: int = SUITS
    # For sampler=ddpm: fixed_small | fixed_large | learned; '' = learned if the model has it, else
    # fixed_small.
    variance: str = ''
    eta: float = 0.0  # for sampler=ddim: 0 = deterministic, 1 = as much noise as ddpm
    # linear | quadratic | log_snr | karras, as --skip_schedule of jaxunet.sample; '' = the
    # sampler's default.
    skip_schedule: str = ''
    guidance_scale: float = 1.0  # classifier-free guidance; 1 = plain conditional
    metrics: tuple[str, ...] = ('fid',)  # names as --metrics of jaxunet.evaluate
    features: str = 'inception'  # feature extractor or a file, as --features of jaxunet.evaluate
    # Real images or statistics, as --reference of jaxunet.evaluate; '' = the training images at
    # the model's size.
    reference: str = ''


@dataclass(frozen=True)
class Config:
    """All options of a run. `jaxunet.config.resolve` makes and checks one."""

    seed: int = 0  # for the initial weights, the order of images, noise, timesteps and dropout
    # auto | xla | pallas | cuda, optionally with other backends for some ops, as in
    # pallas+adamw=cuda (see `split_backend`).
    backend: str = 'auto'
    precision: str = 'float32'  # compute type: float32 | bfloat16 | float16 (dynamic loss scaling)
    # Initial weights: workdir, checkpoint, .bin, .pt or .safetensors. Other classes, image size and
    # channels are possible (see `jaxunet.checkpoint.fine_tune`).
    init_from: str = ''
    # Order of attention's rows in an init_from file that does not state it (guided-diffusion's
    # use_new_attention_order): legacy (False) | new (True); '' = the file states it.
    init_from_order: str = ''
    # Weights of init_from to take, as --ema of jaxunet.sample: '' = averages if it has any; a rate
    # or width of them; none = the weights themselves, with Adam's moments.
    init_from_ema: str = ''
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
        """(height, width, channels) of the model's images."""
        size = self.data.image_size
        return size[0], size[-1], self.model.image_channels

    @property
    def low_res_shape(self) -> tuple[int, int, int] | None:
        """(height, width, channels) of the picture beside the noisy image; None without one."""
        size = self.model.low_res_size
        return (size[0], size[-1], self.model.image_channels) if size else None

    @property
    def augmentation_inputs(self) -> int:
        """Number of the network's inputs that describe the augmentation of an image; 0 = none."""
        return AUGMENTATION_INPUTS if self.data.augment == 'edm' else 0

    @property
    def attention_levels(self) -> tuple[int, ...]:
        """Levels (0 = full resolution) whose residual blocks are followed by attention."""
        side = min(self.image_shape[:2])
        levels = range(len(self.model.channel_mult))
        return tuple(level for level in levels if side >> level in self.model.attention_resolutions)

    @property
    def snapshot_every(self) -> int:
        """Optimizer steps between snapshots of the averages; 0 without `ema.widths`."""
        if not self.ema.widths:
            return 0
        return self.ema.snapshot_every or -(-self.train.steps // SNAPSHOTS)

    def replace(self, **changes: Any) -> Config:
        """Returns a copy with fields changed.

        A section takes a dict of its changed fields: `config.replace(train={'steps': 9})`.
        """
        return dataclasses.replace(
            self,
            **{
                k: dataclasses.replace(getattr(self, k), **v) if isinstance(v, dict) else v
                for k, v in changes.items()
            },
        )


# The ops of `jaxunet.ops.vocabulary` that a kernel backend may implement. `adamw` updates all
# weights at once.
OPS = ('conv3x3', 'norm_silu_conv3x3', 'group_norm', 'attention', 'linear', 'adamw')
SNAPSHOTS = 32  # over a run if `ema.snapshot_every` is 0
Fields = dict[str, Any]  # values by the name of their field; a section is a nested dict
PRECISIONS = ('float32', 'bfloat16', 'float16')


def default_config() -> ConfigDict:
    """Returns all fields with their defaults, as the starting point of a config file.

    The `ConfigDict` is locked: setting an unknown field raises `AttributeError` with near misses.
    """
    return ConfigDict(to_dict(Config())).lock()


# Commands use this file as their config file if they get no --config.
get_config = default_config


def to_dict(config: Config) -> Fields:
    """Returns the config as nested dicts, the form that checkpoints store as JSON."""
    return dataclasses.asdict(config)
