"""The configuration of a run: one dataclass per section, one field per option.

The sections are in `method_sections` and `run_sections` of `jaxunet.config`. A field states all of
its facts beside its default (`jaxunet.config.fields`).

The defaults train a small model on the embedded digits. Fields marked "chosen" may be left open, by
the value beside the word; `jaxunet.data.automatic` then chooses them from the images. A config
file's `get_config()` starts from `default_config()`, sets fields and returns the `ConfigDict`;
`jaxunet.config.resolve` checks it and returns the frozen `Config` that everything else reads.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from jaxunet.config.fields import Facts, Range, facts_of, option, stated
from jaxunet.config.method_sections import (
    DiffusionConfig,
    LossConfig,
    ModelConfig,
    TimestepsConfig,
)
from jaxunet.config.run_sections import (
    DataConfig,
    EmaConfig,
    EvaluationConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)

AUGMENTATION_INPUTS = 9  # numbers that describe how data.augment=edm changed an image
PRECISIONS = ('float32', 'bfloat16', 'float16')


@dataclass(frozen=True)
class Config:
    """All options of a run. `jaxunet.config.resolve` makes and checks one."""

    # For the initial weights, the order of images, noise, timesteps and dropout.
    seed: int = option(0, Range(f'0 to {2**32 - 1}', lambda v: 0 <= v < 2**32), limit=2**32 - 1)
    # auto | xla | pallas | cuda, optionally with other backends for some ops, as in
    # pallas+adamw=cuda (see `split_backend`).
    backend: str = 'auto'
    # Compute type; float16 with dynamic loss scaling.
    precision: str = option('float32', choices=PRECISIONS)
    # Initial weights: workdir, checkpoint, .bin, .pt, .safetensors, .pkl, folder of diffusers or
    # OWNER/NAME of the Hugging Face hub. Other classes, image size and channels are possible (see
    # `jaxunet.checkpoint.fine_tune`).
    init_from: str = option('', outside_step=True)
    # Order of attention's rows in an init_from file that does not state it (guided-diffusion's
    # use_new_attention_order): legacy (False) | new (True); '' = the file states it.
    init_from_order: str = option(
        '', choices=('', 'legacy', 'new'), outside_step=True, since='0.2.0'
    )
    # Weights of init_from to take, as --ema of jaxunet.sample: '' = averages if it has any; a rate
    # or width of them; none = the weights themselves, with Adam's moments.
    init_from_ema: str = option('', outside_step=True, since='0.2.0')
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    timesteps: TimestepsConfig = field(default_factory=TimestepsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(
        default_factory=EvaluationConfig, metadata=stated(outside_step=True)
    )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the model's images."""
        size = self.data.image_size
        return size[0], size[-1], self.model.image_channels

    @property
    def low_res_shape(self) -> tuple[int, int, int] | None:
        """(height, width, channels) of the picture beside the noisy image; None without one."""
        size = self.model.low_res_size
        return (size[0], size[-1], self.picture_channels) if size else None

    @property
    def picture_channels(self) -> int:
        """Channels of the picture beside the noisy image."""
        return self.model.condition_channels or self.model.image_channels

    @property
    def picture_path(self) -> str:
        """The set of pictures that belong to the images by their names; '' = there is none."""
        kind, _, path = self.data.condition.partition(':')
        return path if kind == 'folder' else ''

    @property
    def loaded_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of what a run loads: an image, then its own picture if any."""
        height, width, channels = self.image_shape
        return height, width, channels + (self.picture_channels if self.picture_path else 0)

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

    def replace(self, **changes: Any) -> 'Config':
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


def _facts(section: Any, prefix: str = '') -> Iterator[tuple[str, Facts]]:
    for each in dataclasses.fields(section):
        yield prefix + each.name, facts_of(each)
        if dataclasses.is_dataclass(each.type):
            yield from _facts(each.type, f'{each.name}.')


FACTS = dict(_facts(Config))  # by the path of a field or section: seed, data, data.path, ...
CHOICES = {path: facts.choices for path, facts in FACTS.items() if facts.choices}


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


def by_path(config: Config) -> Fields:
    """Returns every field of a config by its path, such as data.path."""
    flat: Fields = {}
    for name, value in to_dict(config).items():
        flat |= (
            {f'{name}.{field}': v for field, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return flat
