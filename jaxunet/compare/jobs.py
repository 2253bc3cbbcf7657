"""Training jobs of `jaxunet.compare.queue`: what is trained, for how long, and how it is measured.

`jaxunet.compare.comparison_file` reads them from files.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import runpy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxunet.config import Config
from jaxunet.config.relations import MAX_STEPS_PER_CALL
from jaxunet.config.run_sections import SUITS
from jaxunet.config.samplers import DEFAULT_STEPS, SAMPLERS
from jaxunet.config.schema import FACTS, Fields
from jaxunet.data.automatic import complete, with_values
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import expanded
from jaxunet.runtime.untrusted import one_line, plain, shown
from jaxunet.sampling.generator import sampler_of
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sweep.points import set_field

FORM = 'NAME:STEPS or NAME:STEPS:SKIP_SCHEDULE'
FOREVER = 10**9  # steps
LONGEST_NAME = 150  # bytes of the name of a job; files are named after it, and add to it
# Far beyond any use, so that a typing error does not draw samples for ever.
MOST_SAMPLES, MOST_STEPS = 10**7, 10**4
# Fields that `Job.load_config` replaces, or that the training of a job does not read. A name that
# ends in a dot is a whole section.
OVERRIDDEN = (
    'init_from',
    'init_from_order',
    'init_from_ema',
    'parallel.devices',
    'ema.snapshot_every',
    'train.steps',
    'train.epochs',
    'train.minutes',
    'train.checkpoint_every',
    'train.sample_every',
    'train.evaluate_every',
    'train.keep',
    'train.keep_every',
    'train.keep_best',
    'train.rollbacks',
    'evaluation.',
)
# Fields of a network that trains in less than a second on a CPU, for the tests of a job file.
TINY: Mapping[str, object] = {
    'model.base_channels': 8,
    'model.channel_mult': (1,),
    'model.attention_resolutions': (),
    'model.num_head_channels': 8,
    'model.norm_groups': 4,
    'data.batch_size': 8,
    'data.holdout': 20,
}


@dataclass(frozen=True)
class Job:
    """A training run and its measurements.

    Fields:
      case: name of what is compared, such as an objective.
      data: short name of the images.
      config: path of a config file.
      fields: fields of the config that the job sets, by dotted path.
      seconds: seconds of training at which the averaged weights are measured, ascending.
      samplers: `NAME:STEPS` or `NAME:STEPS:SKIP_SCHEDULE`, such as dpmpp_2m:20; each draws
        `samples` images at each of these times.
      references: real images, as data.path -> (their name in the rows, metrics to compute). The
        path '' is that of the training images, as the model sees them.
      seed: seed of the run and of its samples.
      samples: number of images that each sampler draws at each time.
      batch_size: images drawn at once.
      options: options of all samplers, by the fields of `SamplerConfig`.
      picture: number of images in the grid that is saved for the first sampler; 0 = no grid.
      all_pictures: save such a grid for every sampler, which its name then ends with.
      kept: keep the work folder of the run once it is done, for jobs that start from its weights.
      averages: averages of the weights to choose from: rates and widths of the config, such as
        0.9999 and 0.15. At each time, the job measures the average whose samples, drawn by the
        first sampler, have the smallest Fréchet distance to the first reference with `fid`. () =
        the first rate, without a choice.
      choosing: number of samples drawn with each average for this choice; they are not measured.
    """

    case: str
    data: str
    config: str
    fields: Mapping[str, object]
    seconds: tuple[float, ...]
    samplers: tuple[str, ...]
    references: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    seed: int = 0
    samples: int = 2000
    batch_size: int = 500
    options: Mapping[str, Any] = field(default_factory=dict)
    picture: int = 64
    all_pictures: bool = False
    kept: bool = False
    averages: tuple[str, ...] = ()
    choosing: int = 2000

    @property
    def name(self) -> str:
        """Name of the job, used in file names and messages."""
        return f'{self.data}_{self.case}_seed{self.seed}'

    @property
    def schedule(self) -> str:
        """The learning rate's course; that of the config file is made for its number of steps."""
        return str(self.fields.get('optimizer.schedule', 'constant'))

    def sampler(self, text: str) -> SamplerConfig:
        """Returns one of the samplers with the options of the job."""
        return dataclasses.replace(parse_sampler(text), **self.options)

    def load_config(self, devices: int = 1, step_seconds: float = 0.0) -> Config:
        """Returns the config of the run; a time, not a number of steps, ends it (`base_config`).

        Args:
          devices: devices on which the run trains, data-parallel; 0 = as the config says.
          step_seconds: seconds that the clock counts for a step. With them, a falling learning rate
            reaches 0 at the step of the last time, and `train.steps` is that step.

        Raises:
          UserError: the config file does not exist, a field does not fit, or the config leaves
            fields open and its images cannot be opened.
        """
        try:
            values = call_function(self.config, 'get_config')
            if not isinstance(values, ConfigDict):
                raise UserError(f'{self.config}: get_config() must return a ConfigDict')
            raw = values.to_dict()
            for path, value in self.fields.items():
                set_field(raw, path, value)
            raw['seed'] = self.seed
            run = {'train': {'keep': 1, 'keep_every': 0, 'keep_best': 0}}
            parallel = {'parallel': {'devices': devices}} if devices else {}
            config = base_config(completed(raw, self.schedule).replace(**run, **parallel))
            steps = config.train.steps
            if step_seconds and self.schedule != 'constant':
                together = config.train.steps_per_call or MAX_STEPS_PER_CALL
                steps = steps_lasting(self.seconds[-1], step_seconds, together)
            return config.replace(optimizer={'schedule': self.schedule}, train={'steps': steps})
        except UserError as error:
            raise UserError(f'{self.name}: {error}') from None

    def state_names(self, config: Config) -> dict[str, str]:
        """Returns the averages to choose from, each with its name in the training state.

        Raises:
          UserError: the config does not keep one of them.
        """
        kept = {str(rate): str(rate) for rate in config.ema.rates}
        kept |= {str(width): name for name, width in config.ema.width_names.items()}
        wanted = self.averages or (next(iter(kept)),)
        if unknown := [average for average in wanted if average not in kept]:
            raise UserError(
                f'{self.name}: averages: expected some of {", ".join(kept)}, which the '
                f'config keeps, found {unknown[0]!r}'
            )
        return {average: kept[average] for average in wanted}


def completed(values: ConfigDict | Fields, schedule: str = 'constant') -> Config:
    """Returns `complete` of a config with this schedule, on which a learning rate may depend."""
    raw = values.to_dict() if isinstance(values, ConfigDict) else values
    if isinstance(raw.get('optimizer'), dict):  # `complete` reports it otherwise
        raw = with_values(raw, {'optimizer.schedule': schedule})
    return complete(raw)


def base_config(config: Config) -> Config:
    """Returns the config that all runs share.

    Time ends a run, so nothing depends on the number of steps: the learning rate is constant, until
    a job sets another schedule.
    Sampling, evaluation and checkpoints during training are off. All methods are measured by one
    sampler, whatever their objectives: DDIM in 50 steps where the config leaves it open.

    Raises:
      UserError: the config needs trained weights; a run starts from the random ones of its seed.
    """
    if config.init_from:
        raise UserError(
            f'init_from: expected no weights, since every run of a comparison starts from random '
            f'ones, found {config.init_from}'
        )
    if config.diffusion.objective == 'consistency':
        raise UserError(
            'diffusion.objective: consistency tunes a trained network, and every run of a '
            'comparison starts from random weights'
        )
    together = max(config.train.steps_per_call, 1)
    forever = FOREVER // together * together
    quiet = {'steps': forever, 'checkpoint_every': forever, 'sample_every': 0, 'evaluate_every': 0}
    evaluation = config.evaluation
    measured = {
        'sampler': evaluation.sampler or 'ddim',
        'steps': DEFAULT_STEPS['ddim'] if evaluation.steps == SUITS else evaluation.steps,
    }
    return config.replace(train=quiet, optimizer={'schedule': 'constant'}, evaluation=measured)


def check_jobs(jobs: Sequence[Job]) -> None:
    """Checks jobs before any of them runs.

    Raises:
      UserError: two jobs have the same name, or a value is out of range; the message begins with
        the job's name.
    """
    counts = Counter(job.name for job in jobs)
    for job in jobs:
        if counts[job.name] > 1:
            raise UserError(f'two jobs are called {job.name}; rename a case')
        if Path(job.name).name != job.name or len(os.fsencode(job.name)) > LONGEST_NAME:
            raise UserError(
                f'{plain(job.name)}: expected names of images and cases without /, of at most '
                f'{LONGEST_NAME} bytes together, as files are named after them'
            )
        times = job.seconds
        ascending = all(map(math.isfinite, times)) and list(times) == sorted(set(times))
        if not times or min(times) <= 0 or not ascending:
            raise UserError(f'{job.name}: seconds: expected ascending times, found {times}')
        if not job.samplers:
            raise UserError(f'{job.name}: samplers: expected at least one, found none')
        for name, number, (least, most) in (
            ('samples', job.samples, (1, MOST_SAMPLES)),
            ('batch_size', job.batch_size, (1, FACTS['evaluation.batch_size'].limit)),
            ('picture', job.picture, (0, FACTS['train.sample_count'].limit)),
            ('choosing', job.choosing, (0, MOST_SAMPLES)),
        ):
            if number < least:
                raise UserError(f'{job.name}: {name}: expected {least} or more, found {number}')
            if number > most:
                raise UserError(
                    f'{job.name}: {name}: expected at most {most:,}, found {shown(number)}'
                )
        config = job.load_config()
        job.state_names(config)
        try:
            for sampler in job.samplers:
                sampler_of(config, job.sampler(sampler))
        except UserError as error:
            raise UserError(f'{job.name}: {error}') from None
        if len(job.averages) > 1 and job.choosing < 1:
            raise UserError(f'{job.name}: choosing: expected samples, found {job.choosing}')
        if len(job.averages) > 1 and not any(
            'fid' in metrics for _, metrics in job.references.values()
        ):
            raise UserError(f'{job.name}: averages are chosen by fid; name it for a reference')


def parse_sampler(text: str) -> SamplerConfig:
    """Parses `NAME:STEPS` or `NAME:STEPS:SKIP_SCHEDULE` into sampler options.

    Raises:
      UserError: the text has another form, or there is no such sampler. `sampler_of` checks
        whether the options fit the model.
    """
    name, *rest = text.split(':')
    if not 1 <= len(rest) <= 2 or not re.fullmatch('[1-9][0-9]{0,9}', rest[0]):
        raise UserError(f'samplers: expected {FORM}, found {shown(text)}')
    if int(rest[0]) > MOST_STEPS:
        raise UserError(f'samplers: expected at most {MOST_STEPS:,} steps, found {shown(text)}')
    if name not in SAMPLERS:
        raise UserError(
            f'samplers: expected one of {", ".join(SAMPLERS)}, found {name!r}'
            f'{near_misses(name, SAMPLERS)}'
        )
    return SamplerConfig(
        name=name, steps=int(rest[0]), skip_schedule=rest[1] if len(rest) == 2 else None
    )


def call_function(path: str, function: str, *arguments: object) -> object:
    """Returns what a function of a Python file returns.

    Raises:
      UserError: no such file, no such function in it, or the file or the function failed.
    """
    path = expanded(path)
    if not Path(path).is_file():
        raise UserError(f'no file {path}')
    try:
        defined = runpy.run_path(path).get(function)
        if callable(defined):
            return defined(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f'{path}: expected a Python file with {function}(), found '
            f'{type(error).__name__}: {one_line(error)}'
        ) from None
    raise UserError(f'{path}: expected a Python file with {function}()')


def steps_lasting(seconds: float, step_seconds: float, together: int = MAX_STEPS_PER_CALL) -> int:
    """Returns the steps that take at least `seconds`, a multiple of the steps of a call."""
    steps = math.ceil(seconds / step_seconds / together) * together
    return steps if steps * step_seconds >= seconds else steps + together  # it was rounded
