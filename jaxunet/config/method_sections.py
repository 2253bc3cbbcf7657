"""The sections of a config that say what is trained: network, diffusion, losses, timesteps."""

from dataclasses import dataclass

from jaxunet.config.fields import FRACTION, NOT_NEGATIVE, POSITIVE, UNIT, UP_TO_ONE, Range, option
from jaxunet.runtime import dropout_rate

FROM_ONE = Range('1 or more', lambda v: v >= 1)


@dataclass(frozen=True)
class ModelConfig:
    """The UNet. Names follow guided-diffusion where it has the option; see `jaxunet.model.unet`."""

    # 1 = grey, 3 = RGB; 0 = chosen
    image_channels: int = option(1, POSITIVE, limit=1024, left_open=0)
    base_channels: int = option(32, POSITIVE, limit=2**16)  # unit of channel_mult
    # Channels of each level as multiples of base_channels, from full resolution down; each level
    # has half the resolution of the one before. () = chosen, with attention_resolutions.
    channel_mult: tuple[float, ...] = option((1, 2), POSITIVE, limit=1024, left_open=())
    # Residual blocks per level; the decoder has one more.
    num_res_blocks: int = option(1, POSITIVE, limit=64)
    # Levels with attention, each named by the shorter side of its feature maps in pixels.
    attention_resolutions: tuple[int, ...] = (4,)
    # Heads per attention block; 0 = derived from num_head_channels.
    num_heads: int = option(0, NOT_NEGATIVE)
    # Heads per attention block of the decoder; 0 = num_heads.
    num_heads_upsample: int = option(0, NOT_NEGATIVE)
    # Channels per head; 0 = derived from num_heads.
    num_head_channels: int = option(32, NOT_NEGATIVE)
    conv_resample: bool = False  # learned resampling; False = average pool and nearest neighbour
    # Padding of stride-2 convolutions: symmetric (guided-diffusion) | same (DDPM: right, bottom).
    downsample_padding: str = option('symmetric', choices=('symmetric', 'same'))
    resblock_updown: bool = False  # residual blocks change the resolution, not separate layers
    # True: the embedding scales and shifts the output of norm_2. False: it is added before norm_2.
    scale_shift_norm: bool = False
    # Probability, in each residual block; rounded to multiples of 2⁻¹⁶.
    dropout: float = option(
        0.0, Range(dropout_rate.SUPPORTED, dropout_rate.is_supported), left_open=-1.0
    )
    # 0 = unconditional: class labels are not used.
    num_classes: int = option(10, NOT_NEGATIVE, limit=10**7)
    # Share of labels that training drops; above 0, samples can have classifier-free guidance.
    label_dropout: float = option(0.1, FRACTION)
    # adm: cos, then sin | ddpm: sin, then cos, with frequencies down to 1/max_period | fourier:
    # sin, then cos, with fixed random frequencies (NCSN++).
    time_embedding: str = option('adm', choices=('adm', 'ddpm', 'fourier'))
    # Ratio of the embedding's highest to its lowest frequency.
    max_period: int = option(10000, POSITIVE)
    norm_groups: int = option(32, POSITIVE)  # groups of GroupNorm
    norm_eps: float = option(1e-5, POSITIVE)  # added to GroupNorm's variance
    # Initial kernels; biases are zero. torch: PyTorch's default | ddpm: uniform fan-average | edm:
    # as ddpm, with √0.2 of it for qkv, and 1e-5 of it where zero_init has zeros (NVlabs/edm).
    init: str = option('torch', choices=('torch', 'ddpm', 'edm'))
    # The last layer of every residual branch and the output layer start at zero.
    zero_init: bool = True
    # Recompute blocks in the backward pass instead of storing their activations.
    remat: bool = False
    # Super-resolution, colouring, pairs: (side,) or (height, width) of a picture that the network
    # sees, enlarged, beside the noisy image, at most as large as that (data.condition). () = none,
    # or with data.condition=folder:PATH chosen: the image's size.
    low_res_size: tuple[int, ...] = option((), POSITIVE, limit=2**14, since='0.2.0')
    # Channels of that picture; 0 = those of the image, or with data.condition=folder:PATH chosen.
    condition_channels: int = option(0, NOT_NEGATIVE, limit=1024, since='0.2.0')
    # Options of DDPM++ and NCSN++ as NVlabs/edm has them (SongUNet); names follow it where it has
    # the option. Factor on the sum of every residual and attention block: √½ there.
    skip_scale: float = option(1.0, UP_TO_ONE, since='0.2.0')
    # Channels of the first convolution; 0 = those of the first level.
    conv_in_channels: int = option(0, NOT_NEGATIVE, limit=2**16, since='0.2.0')
    # Weights of neighbouring pixels, along each axis, where the resolution changes without
    # conv_resample: 1,1 = average pool and nearest neighbour | 1,3,3,1 = NCSN++'s FIR filter.
    resample_filter: tuple[int, ...] = option((1, 1), POSITIVE, since='0.2.0')
    # With resblock_updown: a 1×1 convolution on the residual of the blocks that change resolution.
    resample_proj: bool = option(False, since='0.2.0')
    # standard | residual: a convolution of the image, and then of each such sum, is added to the
    # result of every change of resolution (NCSN++).
    encoder_type: str = option('standard', choices=('standard', 'residual'), since='0.2.0')
    # Blocks of the decoder that attention follows, in the levels that have it: all | last, the last
    # one of a level.
    decoder_attention: str = option('all', choices=('all', 'last'), since='0.2.0')
    # Width of the time's sinusoids, as a multiple of base_channels.
    channel_mult_noise: int = option(1, POSITIVE, limit=64, since='0.2.0')
    # Place where a label's embedding is added to the time's. output: of the layers of the time
    # embedding | input: to the sinusoids, with a bias.
    label_position: str = option('output', choices=('output', 'input'), since='0.2.0')
    # Fewest channels in a group of GroupNorm: layers of few channels have fewer than norm_groups.
    norm_group_channels: int = option(1, POSITIVE, since='0.2.0')

    def groups(self, channels: int) -> int:
        """Returns the number of groups of a GroupNorm."""
        return max(min(self.norm_groups, channels // self.norm_group_channels), 1)


@dataclass(frozen=True)
class DiffusionConfig:
    """The diffusion process and what the network predicts.

    See `jaxunet.diffusion.process`, and `jaxunet.diffusion.levels` for edm and flow. A field that
    begins with the name of an objective belongs to that objective (`jaxunet.config.unused`).
    """

    # epsilon | x0 | v, at the timesteps of `schedule`; edm | flow, at continuous noise levels;
    # consistency: tunes the v, edm or flow network of init_from to draw in one or two evaluations
    # (`jaxunet.training.consistency`); '' = chosen.
    objective: str = option(
        'epsilon',
        choices=('epsilon', 'x0', 'v', 'edm', 'flow', 'consistency'),
        prefixes=True,
        left_open='',
        first_name='prediction',
    )
    # T: number of timesteps, or of slices of equal probability for continuous noise levels.
    steps: int = option(1000, POSITIVE, limit=10**6)
    # epsilon, x0 and v, also tuned: linear (DDPM; also means unset) | cosine (IDDPM). edm and flow
    # have none.
    schedule: str = option('linear', choices=('linear', 'cosine'))
    # edm: mean and standard deviation of ln(σ) in training
    edm_mean: float = option(-1.2, since='0.2.0')
    edm_std: float = option(1.2, POSITIVE, since='0.2.0')
    # edm: standard deviation of the pixels, in [-1, 1]
    edm_sigma_data: float = option(0.5, POSITIVE, since='0.2.0')
    # edm: factor from c_noise = ln(σ)/4 to the time that the network reads. 1000 brings it to the
    # scale of timesteps; 1 in NVlabs/edm.
    edm_time_scale: float = option(1000.0, POSITIVE, since='0.2.0')
    # flow: mean and standard deviation of logit(t) in training
    flow_mean: float = option(0.0, since='0.2.0')
    flow_std: float = option(1.0, POSITIVE, since='0.2.0')
    # What the network predicts, v, edm or flow; '' = as that of init_from.
    consistency_of: str = option('', choices=('', 'v', 'edm', 'flow'), since='0.2.0')
    # consistency of v: mean and standard deviation of ln(σ) in training
    v_mean: float = option(-1.1, belongs_to=(('diffusion.consistency_of', 'v'),), since='0.2.0')
    v_std: float = option(
        2.0, POSITIVE, belongs_to=(('diffusion.consistency_of', 'v'),), since='0.2.0'
    )
    # Discretisation: at σ much above 1, the target is at the noise level (1 - 1/q) σ, so larger
    # values are finer. 0 = chosen by precision (`jaxunet.config.consistency`).
    consistency_q: int = option(
        0, Range('0 (chosen), or 2 or more', lambda v: v == 0 or v >= 2), limit=2**16, since='0.2.0'
    )
    # Equal parts of the run; the k-th takes q^k in place of q.
    consistency_stages: int = option(1, POSITIVE, limit=16, since='0.2.0')
    # c of the loss √(‖·‖² + c²) - c; 0 = the norm itself
    consistency_c: float = option(0.0, NOT_NEGATIVE, since='0.2.0')
    # w: samples of a class come out as from the network of init_from with this guidance scale
    # (classifier-free); 1 = none.
    consistency_guidance: float = option(1.0, FROM_ONE, since='0.2.0')
    learn_sigma: bool = False  # the network also predicts the variance; hybrid loss of IDDPM
    # Weight of the variational bound in the hybrid loss; with kl_loss, the loss is the bound alone.
    vlb_weight: float = option(
        1e-3,
        NOT_NEGATIVE,
        belongs_to=(('diffusion.learn_sigma', True), ('diffusion.kl_loss', False)),
    )
    # The network reads 1000 t/T instead of the timestep t (IDDPM's rescale_timesteps).
    rescale_timesteps: bool = option(False, since='0.2.0')
    # Trains the variational bound alone, T L_vlb (IDDPM's use_kl, L_vlb); without learn_sigma with
    # the variance β.
    kl_loss: bool = option(False, since='0.2.0')

    @property
    def prediction(self) -> str:
        """The network's prediction: epsilon, x0, v, edm or flow."""
        return self.consistency_of if self.objective == 'consistency' else self.objective

    @property
    def folds_guidance(self) -> bool:
        """True if the network is tuned towards the guided predictions of the one it was."""
        return self.objective == 'consistency' and self.consistency_guidance != 1

    @property
    def continuous(self) -> bool:
        """True if noise levels are continuous, without timesteps."""
        return self.objective in ('edm', 'flow', 'consistency')

    @property
    def time_scale(self) -> float:
        """Factor from a timestep, or a time on that scale, to the time that the network reads."""
        if self.prediction == 'edm':
            return self.edm_time_scale / 1000
        return 1000 / self.steps if self.rescale_timesteps else 1.0


@dataclass(frozen=True)
class LossConfig:
    """The weight of each timestep's loss; equations in `jaxunet.diffusion.weighting`.

    A field that begins with the name of a weighting belongs to that weighting, and is refused with
    another (`jaxunet.config.unused`).
    """

    weighting: str = option(
        'uniform',
        choices=('uniform', 'min_snr', 'soft_min_snr', 'p2', 'speed', 'uncertainty'),
        prefixes=True,
    )
    min_snr_gamma: float = option(5.0, POSITIVE)  # γ: largest SNR that counts
    # σ_d: standard deviation of the pixels, in [-1, 1]
    soft_min_snr_sigma: float = option(0.5, POSITIVE)
    p2_k: float = option(1.0, POSITIVE)  # k
    p2_gamma: float = option(1.0, NOT_NEGATIVE)  # γ
    speed_lambda: float = option(0.6, UNIT)  # λ: weights before τ lie between 1 - λ and λ
    speed_tau: float = option(0.7, UNIT)  # τ, as a fraction of diffusion.steps
    # Fourier features of the noise level.
    uncertainty_features: int = option(128, POSITIVE, limit=2**16)
    uncertainty_learning_rate: float = option(1e-3, POSITIVE)


OF_LOSS_SECOND_MOMENT = (('timesteps.sampler', 'loss_second_moment'),)


@dataclass(frozen=True)
class TimestepsConfig:
    """The distribution of training timesteps.

    Equations in `timesteps`, `timestep_policy` and `information_rate` of `jaxunet.diffusion`. A
    field that begins with the name of a sampler belongs to that sampler, and is refused with
    another (`jaxunet.config.unused`).
    """

    sampler: str = option(
        'uniform',
        choices=(
            'uniform',
            'loss_second_moment',
            'speed',
            'speed_code',
            'policy',
            'adaptive',
            'infonoise',
        ),
        prefixes=True,
    )
    # Losses kept per timestep, and uniform share of the distribution.
    history: int = option(10, POSITIVE, limit=10**4, belongs_to=OF_LOSS_SECOND_MOMENT)
    history_uniform: float = option(0.001, FRACTION, belongs_to=OF_LOSS_SECOND_MOMENT)
    speed_k: float = option(5.0, POSITIVE)  # timesteps before τ are drawn this many times as often
    speed_tau: float = option(0.7, UNIT)  # τ, as a fraction of diffusion.steps
    policy_every: int = option(40, POSITIVE)  # optimizer steps between measurements
    policy_probes: int = option(3, POSITIVE)  # timesteps whose bound rewards the policy
    # Recent measurements from which the probes are chosen.
    policy_memory: int = option(5, POSITIVE, limit=10**6)
    policy_learning_rate: float = option(1e-2, POSITIVE)
    policy_entropy: float = option(0.01, NOT_NEGATIVE)  # weight of the entropy bonus
    adaptive_bins: int = option(32, POSITIVE)  # intervals of timesteps whose losses are averaged
    # Length of a bin's moving average, in visits to the bin.
    adaptive_memory: float = option(300.0, POSITIVE)
    adaptive_uniform: float = option(0.05, UNIT)  # uniform share of the distribution
    # Power of the importance weight 1/(T p); 1 = unbiased, 0 = no correction.
    adaptive_correction: float = option(1.0, UNIT)
    # Intervals of ln(σ) whose losses are averaged.
    infonoise_bins: int = option(32, POSITIVE, since='0.2.0')
    # Length of a bin's moving average, in visits to the bin.
    infonoise_memory: float = option(300.0, POSITIVE, since='0.2.0')
    # Optimizer steps with uniform timesteps.
    infonoise_warmup: int = option(1000, NOT_NEGATIVE, since='0.2.0')
    # c: noise-to-signal ratio at half the gate; 0 = the onset rule
    infonoise_pivot: float = option(0.0, NOT_NEGATIVE, since='0.2.0')
    infonoise_uniform: float = option(0.05, UNIT, since='0.2.0')  # share of the distribution
