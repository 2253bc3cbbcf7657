"""Evaluates a model in training: draws samples and compares them with real images.

The fields of `config.evaluation` set how. A line per metric goes to `WORKDIR/evaluation.csv`.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Int, UInt8

from jaxunet.checkpoint.folders import find
from jaxunet.config import Config
from jaxunet.config.relations import HIGHER_IS_BETTER
from jaxunet.config.samplers import evaluation_sampler
from jaxunet.data.crop import Batch, Crops
from jaxunet.data.source import ArraySource, Source
from jaxunet.metrics.evaluation import Result, check_metrics, compute, result_label
from jaxunet.metrics.features import FeatureNetwork, load_features
from jaxunet.metrics.sides import image_side, open_side
from jaxunet.metrics.table import TABLE, ImageSummary, check_reference, with_reference
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.progress import progress_bar
from jaxunet.runtime.rows import Row
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.options import SamplerConfig
from jaxunet.training.conditions import SampleConditions
from jaxunet.training.logs import StepTable, read_rows

FEATURE_BATCH = 256  # images whose features are computed at a time
FILE = 'evaluation.csv'
COLUMNS = (
    'step',
    'training_seconds',
    'metric',
    'value',
    'std',
    'num_samples',
    'sampler',
    'evaluations',
    'reference',
    'num_reference',
    'features',
    'resize',
    'settings',
    'seed',
)
NUMBERS = ('step', 'training_seconds', 'value')
TEXTS = tuple(name for name in COLUMNS if name not in NUMBERS)  # or numbers, or empty
SETTINGS = (
    'subsets',
    'subset_size',
    'k',
    'parts',
    'of_training_images',
    'reference_statistics',
)  # options of single metrics, for that column


def evaluation_network(config: Config) -> FeatureNetwork:
    """Loads the features of `config.evaluation` and checks everything that an evaluation needs.

    This finds mistakes before training starts.

    Raises:
      UserError: the model's images have other bits or channels, samples or reference images are too
        few for a metric, the features cannot be loaded, take images of another size or do not allow
        the metrics, or the reference cannot be opened.
    """
    evaluation = config.evaluation
    if config.data.bits != 8 or config.image_shape[2] not in (1, 3):
        raise UserError(
            'evaluation: compares images of 8 bits and 1 or 3 channels, found '
            f'data.bits={config.data.bits} and model.image_channels={config.image_shape[2]}'
        )
    check_metrics(evaluation.metrics, option='evaluation.metrics')
    for metric in evaluation.metrics:
        if evaluation.samples < (least := TABLE[metric].least_samples):
            raise UserError(
                f'evaluation.samples: {metric} needs {least} or more, found {evaluation.samples}'
            )
    network = load_features(evaluation.features)
    check_metrics(evaluation.metrics, network, 'evaluation.metrics')
    network.check_size((config.image_shape[0], config.image_shape[1]))
    compared = with_reference(evaluation.metrics)
    if compared and evaluation.reference:
        with open_side(
            evaluation.reference,
            compared,
            network,
            'evaluation.reference',
            batch_size=FEATURE_BATCH,
            is_reference=True,
        ):
            pass  # only opened: its features are computed when they are needed
    return network


def check_training_images(config: Config, source: Source) -> None:
    """Checks that the training images are enough for the metrics, if they are the reference.

    Raises:
      UserError: a metric needs more.
    """
    if not config.evaluation.reference:
        check_reference(len(source), with_reference(config.evaluation.metrics), source.name)


class Colour(Source):
    """The images of a source with three channels; grey images are repeated.

    Raises:
      UserError: the images have neither 1 nor 3 channels, or more than 8 bits.
    """

    def __init__(self, source: Source) -> None:
        height, width, channels = source.image_shape
        if channels not in (1, 3) or source.reading.bits != 8:
            raise UserError(
                f'evaluation: {source.name}: expected images of 1 or 3 channels of 8 bits to '
                f'compare, found {channels} of {source.reading.bits}'
            )
        self._source, self.name, self.image_shape = source, source.name, (height, width, 3)
        self.labels, self.class_names = source.labels, source.class_names
        self.in_memory = source.in_memory

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Returns the images at these places, uint8 (rows, height, width, 3)."""
        return colour(self._source.load(indices, crops))


def colour(
    images: UInt8[np.ndarray, 'n height width channels'],
) -> UInt8[np.ndarray, 'n height width 3']:
    """Repeats the channel of grey images three times; leaves colour images as they are."""
    return np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images


def drawn(
    generator: Generator,
    params: Params,
    conditions: SampleConditions,
    numbers: range,
    seed: int,
    keep_on: Callable[[], bool],
) -> Iterator[UInt8[np.ndarray, 'n height width channels']]:
    """Yields the samples with these numbers, in batches.

    Args:
      params: weights on the devices of the generator.
      keep_on: asked while samples are drawn.

    Raises:
      StoppedError: `keep_on` returned False.
    """
    for first in range(numbers.start, numbers.stop, generator.batch_size):
        indices = np.arange(first, min(first + generator.batch_size, numbers.stop))
        given = conditions.load(indices)
        yield generator(
            params,
            seed=seed,
            indices=indices,
            labels=given.labels,
            low_res=given.low_res,
            progress=lambda _: keep_on(),
        )


def summary_of_samples(
    images: UInt8[np.ndarray, 'n height width channels'],
    metrics: Sequence[str],
    network: FeatureNetwork,
) -> ImageSummary:
    """Returns what these metrics need of samples."""
    rgb = colour(images)
    source = ArraySource('samples of the model', rgb, (rgb.shape[1], rgb.shape[2], 3))
    return image_side(source.name, source, metrics, network, batch_size=FEATURE_BATCH)


def summary_of_reference(
    path: str, source: Source | None, metrics: Sequence[str], network: FeatureNetwork, option: str
) -> ImageSummary:
    """Returns what these metrics need of the reference.

    Args:
      path: the reference; '' = the training images.
      source: the training images.
      option: gave the path; begins the messages.
    """
    if path:
        with open_side(
            path, metrics, network, option, batch_size=FEATURE_BATCH, is_reference=True
        ) as opened:
            return opened.compute()
    assert source is not None
    return image_side(source.name, Colour(source), metrics, network, batch_size=FEATURE_BATCH)


class Evaluator:
    """Draws samples and computes their metrics.

    Sample i is the same function of the weights every time, so results differ by the weights alone.

    Args:
      source: the training images. They are the reference unless `evaluation.reference` names
        another, and a super-resolution network enlarges some of them. None if neither needs them.
      devices: of this process; all of them draw samples, the first computes features.

    Raises:
      UserError: as `evaluation_network`, the training images are the reference and too few for a
        metric, or the model does not support an option of the sampler.
    """

    def __init__(
        self, config: Config, source: Source | None, devices: Sequence[jax.Device]
    ) -> None:
        evaluation = config.evaluation
        self.config, self.source = config, source
        self.network = evaluation_network(config)
        if source is not None:
            check_training_images(config, source)
        chosen = evaluation_sampler(config)
        sampler = SamplerConfig(
            name=chosen.name,
            steps=chosen.steps,
            variance=evaluation.variance or None,
            eta=evaluation.eta or None,
            skip_schedule=evaluation.skip_schedule or None,
            guidance_scale=evaluation.guidance_scale,
        )
        self.generator = Generator(
            config,
            sampler,
            batch_size=min(evaluation.batch_size, evaluation.samples),
            devices=devices,
        )
        self._conditions = SampleConditions(config, source, evaluation.samples)
        self._reference: ImageSummary | None = None

    def measure(self, params: Params, keep_on: Callable[[], bool] = lambda: True) -> list[Result]:
        """Draws samples and returns their metrics, in the order of `evaluation.metrics`.

        Args:
          params: weights, on any devices or numpy.
          keep_on: asked while samples are drawn.

        Raises:
          StoppedError: `keep_on` returned False.
        """
        return self.compare(self.sample(params, keep_on))

    def sample(
        self, params: Params, keep_on: Callable[[], bool] = lambda: True
    ) -> UInt8[np.ndarray, 'n height width channels']:
        """Draws `evaluation.samples` images under `SampleConditions`, as `measure`."""
        evaluation = self.config.evaluation
        placed = self.generator.put(params)
        images = []
        with progress_bar(
            total=evaluation.samples, unit='image', desc='samples to evaluate', leave=False
        ) as bar:
            for batch in drawn(
                self.generator,
                placed,
                self._conditions,
                range(evaluation.samples),
                self.config.seed,
                keep_on,
            ):
                images.append(batch)
                bar.update(len(batch))
        return np.concatenate(images)

    def compare(self, images: UInt8[np.ndarray, 'n height width channels']) -> list[Result]:
        """Returns the metrics of these samples."""
        evaluation = self.config.evaluation
        compared = with_reference(evaluation.metrics)
        if compared and self._reference is None:
            self._reference = summary_of_reference(
                evaluation.reference, self.source, compared, self.network, 'evaluation.reference'
            )
        samples = summary_of_samples(images, evaluation.metrics, self.network)
        return compute(
            evaluation.metrics, self.network, samples, self._reference, seed=self.config.seed
        )

    def scores_of(self, workdir: pathlib.Path) -> Callable[[], dict[int, float]]:
        """Returns a function that reads a run's scores by step from its evaluation.csv.

        A score is the value of the first of `evaluation.metrics`, negative if smaller is better.
        """
        metric = self.config.evaluation.metrics[0]
        label, sign = result_label(metric, self.network), 1 if metric in HIGHER_IS_BETTER else -1

        known: dict[int, float] = {}

        def scores() -> dict[int, float]:
            # The best checkpoints must not be lost because a file cannot be read at the moment.
            with contextlib.suppress(OSError):
                rows = [row for row in read_evaluations(workdir) if row['metric'] == label]
                by_step = {int(row['step']): sign * float(row['value'] or math.nan) for row in rows}
                known.update({step: x for step, x in by_step.items() if math.isfinite(x)})
            return known

        return scores

    def row(self, result: Result, step: int, seconds: float) -> Row:
        """Returns the line of evaluation.csv for a result.

        Args:
          seconds: training time so far.
        """
        values = result.protocol | {
            'step': step,
            'training_seconds': seconds,
            'metric': result.label,
            'value': result.value,
            'std': result.std,
            'sampler': self._sampler(),
            'evaluations': self.generator.sampler.evaluations,
        }
        settings = (f'{name}={values[name]}' for name in SETTINGS if name in values)
        values['settings'] = ' '.join(settings)
        return {name: values.get(name) for name in COLUMNS}

    def _sampler(self) -> str:
        """Returns the name of the sampler with the options that are not its defaults."""
        evaluation, sampler = self.config.evaluation, self.generator.sampler.config
        words = [str(sampler.name)]
        if sampler.name == 'ddpm':
            words.append(str(sampler.variance))
        defaults = {'eta': 0, 'skip_schedule': '', 'guidance_scale': 1}
        words += [
            f'{option}={getattr(evaluation, option)}'
            for option, default in defaults.items()
            if getattr(evaluation, option) != default
        ]
        return ' '.join(words)


def evaluation_table(workdir: pathlib.Path, start_step: int) -> StepTable:
    """Opens `WORKDIR/evaluation.csv` and drops the lines of steps after `start_step`."""
    return StepTable(workdir / FILE, COLUMNS, start_step, texts=TEXTS)


def read_evaluations(workdir: pathlib.Path) -> list[dict[str, str]]:
    """Reads the lines of `WORKDIR/evaluation.csv`."""
    return read_rows(workdir / FILE, COLUMNS, TEXTS)


def is_evaluated(workdir: pathlib.Path, step: int) -> bool:
    """Returns True if `WORKDIR/evaluation.csv` has lines of a step."""
    try:
        return any(int(row['step']) == step for row in read_evaluations(workdir))
    except OSError:
        return False


def metrics_at(checkpoint: str | None, step: int | None) -> list[str]:
    """Returns the metrics that a run measured at the step of a checkpoint, a line each.

    Args:
      checkpoint: a workdir or a checkpoint in it; anything else has no metrics.
      step: of the checkpoint; None = of none.
    """
    run = find(checkpoint) if checkpoint and step is not None else None
    if run is None:
        return []
    with contextlib.suppress(OSError):
        return [
            f'{row["metric"]} {float(row["value"]):.4g} of {row["num_samples"]} samples '
            f'({row["sampler"]}, {row["evaluations"]} evaluations) against {row["num_reference"]} '
            f'images, features {row["features"]}'
            for row in read_evaluations(run[0])
            if int(row['step']) == step and row['value']
        ]
    return []
