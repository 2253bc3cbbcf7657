"""The sections of a config that say how a run goes: devices, data, optimizer, course, measures."""

from dataclasses import dataclass

from jaxunet.config.fields import FRACTION, NOT_NEGATIVE, POSITIVE, UNIT, UP_TO_ONE, Range, option

NAMES = ('ddpm', 'ddim', 'dpmpp_2m', 'unipc', 'heun', 'consistency')  # of samplers
SUITS = -1  # evaluation.steps: the number that suits the sampler


@dataclass(frozen=True)
class ParallelConfig:
    """The distribution of training over devices."""

    # jit: one program over a device mesh | pmap: one program per device
    mode: str = option('jit', choices=('jit', 'pmap'))
    devices: int = option(0, NOT_NEGATIVE)  # number of devices; 0 = all
    # Lets kernels overlap where that was measured to help: `ops.backends.Kernels.overlap`.
    concurrent_kernels: bool = option(True, first_default=False)
    # Each device keeps and updates its share of weights, averages and optimizer state, and gathers
    # the weights in the compute type for every step (`jaxunet.training.sharded`).
    shard_optimizer: bool = option(False, since='0.2.0')
    # Type in which gradients are added up over devices; bfloat16 halves the bytes that they
    # exchange, but rounds the sums.
    reduce_dtype: str = option('float32', choices=('float32', 'bfloat16'), since='0.2.0')


@dataclass(frozen=True)
class DataConfig:
    """The training images and how they reach the device."""

    # Folder | .zip | .tar(.gz|.xz) | x-{000000..000009}.tar | .parquet | .arrow | LMDB | .npz |
    # .npy | .bin(.gz) | digits: | cifar10:[local copy] | cifar10_test:[local copy].
    path: str = option('digits:', outside_step=True)
    # (side,) or (height, width), in pixels; () = chosen
    image_size: tuple[int, ...] = option((8,), POSITIVE, limit=2**14, left_open=())
    # Transparent images. white | black | #rrggbb: they are drawn on this | keep: their opacity is a
    # fourth channel (model.image_channels=4), which samples have, too | drop: hidden colours count,
    # as before version 0.2.0.
    background: str = option('white', outside_step=True, since='0.2.0')
    # Bits of each channel that are kept, 8 or 16.
    bits: int = option(8, Range('8 or 16', lambda v: v in (8, 16)), since='0.2.0')
    # Lowest and highest value of the images, such as 0,4095; () = those of their type, or 0 and 1
    # of floats.
    range: tuple[float, ...] = option((), outside_step=True, since='0.2.0')
    # Images per optimizer step, over all devices; 0 = chosen.
    batch_size: int = option(64, POSITIVE, limit=2**22, left_open=0)
    # Worker processes that decode streamed images; 0 = threads.
    num_workers: int = option(0, NOT_NEGATIVE, limit=1024, outside_step=True)
    # device: all images as uint8 in device memory | stream: decode on demand | auto: device if the
    # images fit.
    cache: str = option('auto', choices=('auto', 'device', 'stream'), outside_step=True)
    # Part of an image that is cut out, with the shape of image_size, and resized. center: the
    # largest centred part | random: another part every epoch, as guided-diffusion's random_crop;
    # streams the images.
    crop: str = option('center', choices=('center', 'random'), since='0.2.0')
    # crop=random: sides of the smallest part, as a share of the largest
    crop_least: float = option(0.8, UP_TO_ONE, since='0.2.0')
    # none | flip: random horizontal flip | edm: random geometry, which the network gets as an
    # input, so that samples do not show it (`jaxunet.training.augmentation`).
    augment: str = option('none', choices=('none', 'flip', 'edm'))
    # augment=edm: probability of each transformation; mirroring left and right has 1/2.
    augment_probability: float = option(0.12, UNIT, since='0.2.0')
    # edm: as in EDM's code | earlier: see the module
    augment_rule: str = option(
        'edm', choices=('edm', 'earlier'), belongs_to=(('data.augment', 'edm'),), since='0.2.0'
    )
    # Picture of an image for a network with model.low_res_size. image: the image, made small |
    # grey: its brightness, small or of the image's size, so that the network learns to colour |
    # folder:PATH: the picture of the same name in another set, in any form of path.
    condition: str = option('image', since='0.2.0')
    # Noise samples per image, of which the nearest is used (immiscible diffusion); 1 = off.
    noise_candidates: int = option(1, POSITIVE, since='0.2.0')
    # none: images keep the noise that they drew | batch: the noise of a batch is dealt out to its
    # images by distance (immiscible diffusion; `jaxunet.training.noise_assignment`).
    noise_assignment: str = option('none', choices=('none', 'batch'), since='0.2.0')
    # Labels of the images. '': those that the set has | folders: class sub-folders | names: what
    # stands before the first underscore of a file's name | a column of a table, metadata.csv or the
    # like (`jaxunet.data.labels`).
    labels: str = option('', outside_step=True, since='0.2.0')
    # Names of the classes to train on; they become labels 0, 1, ... in this order. () = all.
    classes: tuple[str, ...] = option((), outside_step=True)
    # Images kept out of training, for the held-out loss: a number, or a share below 1. 0 = none.
    holdout: float = option(0.0, NOT_NEGATIVE, outside_step=True, since='0.2.0')


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    # adamw | adam | muon: AdamW, and orthogonal steps for the matrices and convolutions of the
    # blocks (`jaxunet.checkpoint.muon`).
    name: str = option('adamw', choices=('adamw', 'adam', 'muon'))
    learning_rate: float = option(1e-3, POSITIVE, left_open=0.0)  # 0 = chosen
    betas: tuple[float, ...] = option((0.9, 0.999), FRACTION)
    eps: float = option(1e-8, POSITIVE)
    weight_decay: float = option(0.0, NOT_NEGATIVE)
    warmup_steps: int = option(100, NOT_NEGATIVE)  # optimizer steps of linear warm-up
    # After the warm-up: cosine and linear fall to 0 at train.steps; cooldown is constant, and falls
    # to 0 as a line over the last quarter of train.steps.
    schedule: str = option('cosine', choices=('constant', 'cosine', 'linear', 'cooldown'))
    clip_norm: float = option(1.0, NOT_NEGATIVE)  # maximum global gradient norm; 0 = no clipping
    # Parts of a batch that are computed one after another, to save memory; 1 = all at once.
    accumulate_steps: int = option(1, POSITIVE)


@dataclass(frozen=True)
class EmaConfig:
    """Moving averages of the weights: exponential ones, and power functions of the time."""

    # One average per rate; sampling uses the first.
    rates: tuple[float, ...] = option((0.995,), FRACTION, left_open=())
    warmup: bool = True  # decay = min(rate, (1 + n) / (10 + n)) after n steps
    # Widths (sigma_rel) of power-function averages, such as (0.05, 0.10). A run with any keeps
    # snapshots of them, from which averages of other widths can be computed after training.
    widths: tuple[float, ...] = option((), POSITIVE, since='0.2.0')
    # Optimizer steps between snapshots; 0 = 32 over train.steps.
    snapshot_every: int = option(
        0, NOT_NEGATIVE, counts_steps=True, outside_step=True, since='0.2.0'
    )

    @property
    def width_names(self) -> dict[str, float]:
        """The power-function averages: width by the name that it has in the training state."""
        return {f'width_{width}': width for width in self.widths}


@dataclass(frozen=True)
class TrainConfig:
    """The length of a run and what happens along it; `*_every` fields count optimizer steps."""

    steps: int = option(1200, POSITIVE, left_open=0, counts_steps=True)  # 0 = chosen
    # Length in passes over the training images; 0 = `steps` sets the length.
    epochs: float = option(0.0, NOT_NEGATIVE, outside_step=True, since='0.2.0')
    # Length as minutes of training steps, whose number follows from their time, measured before the
    # first one (`jaxunet.training.budget`); 0 = `steps` or `epochs` sets the length.
    minutes: float = option(0.0, NOT_NEGATIVE, outside_step=True, since='0.2.0')
    # Optimizer steps per compiled call; larger values reduce host overhead. The other counts must
    # be multiples of it. 0 = chosen automatically.
    steps_per_call: int = option(1, NOT_NEGATIVE, outside_step=True)
    log_every: int = option(25, POSITIVE, counts_steps=True)  # a row of metrics.csv
    # Loggers of the metrics and sample grids: csv (metrics.csv) | tensorboard | wandb | mlflow |
    # those of other packages (`jaxunet.training.loggers`).
    loggers: tuple[str, ...] = option(('csv', 'tensorboard'), outside_step=True, since='0.2.0')
    # A sample grid; 0 = never.
    sample_every: int = option(400, NOT_NEGATIVE, counts_steps=True, outside_step=True)
    # Images per sample grid.
    sample_count: int = option(60, POSITIVE, limit=2**16, outside_step=True)
    # Sampling steps of a sample grid, with the objective's sampler. 0 = the sampler's own number,
    # or 50 of DDPM for the objectives epsilon and x0.
    sample_steps: int = option(0, NOT_NEGATIVE, outside_step=True, first_default=50)
    # Steps between evaluations (see `evaluation`); also evaluates after the last step. 0 = never.
    evaluate_every: int = option(0, NOT_NEGATIVE, counts_steps=True, outside_step=True)
    # Steps between measurements of the loss on the images of data.holdout and on as many training
    # images. 0 = never.
    holdout_every: int = option(
        0, NOT_NEGATIVE, counts_steps=True, outside_step=True, since='0.2.0'
    )
    checkpoint_every: int = option(400, POSITIVE, counts_steps=True, outside_step=True)
    # Checkpoints kept: the last `keep`, those at multiples of `keep_every` steps (0 = none), and
    # the `keep_best` with the best values of the first of evaluation.metrics.
    keep: int = option(3, POSITIVE, limit=10**6, outside_step=True)
    keep_every: int = option(0, NOT_NEGATIVE, outside_step=True, since='0.2.0')
    keep_best: int = option(0, NOT_NEGATIVE, outside_step=True, since='0.2.0')
    # Stop after this many skipped steps in a row.
    max_bad_steps: int = option(20, POSITIVE, outside_step=True)
    # Skip a step whose gradient norm is more than this many standard deviations above the mean of
    # the last 200 taken steps; never with fewer than 20 of them. 0 = off.
    spike_sigmas: float = option(0.0, NOT_NEGATIVE, since='0.2.0')
    # Times that a run goes back to its last good checkpoint after `max_bad_steps`, before it stops.
    rollbacks: int = option(0, NOT_NEGATIVE, outside_step=True, since='0.2.0')
    # Steps between checks that weights and optimizer state are equal on all devices; also checked
    # before every checkpoint. 0 = never.
    check_replicas_every: int = option(
        0, NOT_NEGATIVE, counts_steps=True, outside_step=True, since='0.2.0'
    )
    # End the run if a wait for the devices takes longer; 0 = never.
    stall_seconds: float = option(600.0, NOT_NEGATIVE, outside_step=True, since='0.2.0')

    @property
    def length(self) -> str:
        """The field that sets the length of the run: minutes, epochs or steps."""
        return next((name for name in ('minutes', 'epochs') if getattr(self, name)), 'steps')


@dataclass(frozen=True)
class EvaluationConfig:
    """The measurement behind `train.evaluate_every` and `jaxunet.compare`.

    Images are drawn from the first weight average with `seed` and compared with real ones.
    """

    samples: int = option(500, POSITIVE)
    # Samples drawn at a time, over all devices.
    batch_size: int = option(256, POSITIVE, limit=2**20)
    # '' = that of the sample grids, which suits the objective.
    sampler: str = option('', choices=('', *NAMES), first_default='ddim')
    # Sampling steps. -1 = the number that suits the sampler: 50 of ddpm and ddim, 2 of consistency,
    # 20 of the others; 0 = every timestep (diffusion.steps), or for objectives that have none, the
    # same but 250 of ddpm.
    steps: int = option(SUITS, Range(f'{SUITS} or more', lambda v: v >= SUITS), first_default=50)
    # For sampler=ddpm; '' = learned if the model has it, else fixed_small.
    variance: str = option('', choices=('', 'fixed_small', 'fixed_large', 'learned'))
    # For sampler=ddim and dpmpp_2m: 0 = deterministic, 1 = as much noise as ddpm, or as the SDE.
    eta: float = option(0.0, UNIT)
    # As --skip_schedule of jaxunet.sample; '' = the sampler's default.
    skip_schedule: str = option('', choices=('', 'linear', 'quadratic', 'log_snr', 'karras'))
    # Classifier-free guidance; 1 = plain conditional.
    guidance_scale: float = option(1.0, NOT_NEGATIVE)
    metrics: tuple[str, ...] = ('fid',)  # names as --metrics of jaxunet.evaluate
    features: str = 'inception'  # feature extractor or a file, as --features of jaxunet.evaluate
    # Real images or statistics, as --reference of jaxunet.evaluate; '' = the training images at
    # the model's size.
    reference: str = ''
