"""Metrics of a model under way: samples of its averaged weights, compared with real images, as `config.evaluation` says."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt8

from jaxunet.config import Config
from jaxunet.data.pixels import Batch
from jaxunet.data.source import ArraySource, Source
from jaxunet.metrics.evaluation import Result, check_metrics, compute
from jaxunet.metrics.features import FeatureNetwork, load_features
from jaxunet.metrics.sides import image_side, open_side
from jaxunet.metrics.table import Side, with_reference
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.progress import progress_bar
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.sampler import SamplerConfig
from jaxunet.training.logs import StepTable, read_rows

FEATURE_BATCH = 256
FILE = 'evaluation.csv'
# fmt: off
COLUMNS = (
    'step', 'training_seconds', 'metric', 'value', 'std', 'num_samples', 'sampler', 'evaluations', 'reference', 'num_reference', 'features',
    'resize', 'settings', 'seed',
)
# fmt: on
SETTINGS = ('subsets', 'subset_size', 'k', 'parts')  # of single metrics, in the column of that name


def evaluation_network(config: Config) -> FeatureNetwork:
    """The features of `config.evaluation`, after a look at all that measuring needs, which comes when hours of training are over.

    Raises:
      UserError: features that cannot be loaded or take images of another size, metrics that they do not allow, or no such reference.
    """
    e = config.evaluation
    network = load_features(e.features)
    check_metrics(e.metrics, network, 'evaluation.metrics')
    network.check_size((config.image_shape[0], config.image_shape[1]))
    compared = with_reference(e.metrics)
    if compared and e.reference:
        with open_side(
            e.reference, compared, network, 'evaluation.reference', batch_size=FEATURE_BATCH
        ):
            pass  # its features are computed when they are asked for
    return network


class Colour(Source):
    """The images of a source with three colours; grey ones have the same three times."""

    def __init__(self, source: Source) -> None:
        height, width, channels = source.image_shape
        if channels not in (1, 3):
            raise UserError(
                f'evaluation: {source.name}: expected images of 1 or 3 channels to compare, found {channels}'
            )
        self._source, self.name, self.image_shape = source, source.name, (height, width, 3)
        self.labels, self.class_names, self.in_memory = (
            source.labels,
            source.class_names,
            source.in_memory,
        )

    def load(self, indices: Int[np.ndarray, ' rows']) -> Batch:
        return colour(self._source.load(indices))


def colour(
    images: UInt8[np.ndarray, 'n height width channels'],
) -> UInt8[np.ndarray, 'n height width 3']:
    return np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images


class Evaluator:
    """Draws samples and measures them. Sample i is the same function of the weights every time: numbers differ by the weights alone.

    Args:
      source: the training images, which are the reference unless `evaluation.reference` names another.
      devices: of this process; all of them sample, the first computes features.

    Raises:
      UserError: features that cannot be loaded, metrics that they do not allow, or sampler options that the model has not.
    """

    def __init__(self, config: Config, source: Source, devices: Sequence[jax.Device]) -> None:
        e = config.evaluation
        self.config, self.source = config, source
        self.network = evaluation_network(config)
        options: dict[str, Any] = {
            option: getattr(e, option) or None
            for option in ('steps', 'variance', 'eta', 'skip_schedule')
        }
        sampler = SamplerConfig(name=e.sampler, guidance_scale=e.guidance_scale, **options)
        self.generator = Generator(
            config, sampler, batch_size=min(e.batch_size, e.samples), devices=devices
        )
        self._reference: Side | None = None

    def measure(
        self, params: Params, keep_on: Callable[[], bool] = lambda: True
    ) -> list[Result] | None:
        """The metrics of `evaluation.metrics`, in their order; None if `keep_on` turns false on the way.

        Args:
          params: on any devices, or numpy.
        """
        samples = self.sample(params, keep_on)
        return None if samples is None else self.compare(samples)

    def sample(
        self, params: Params, keep_on: Callable[[], bool] = lambda: True
    ) -> UInt8[np.ndarray, 'n height width channels'] | None:
        """`evaluation.samples` images; a conditional model's of every class in turn."""
        e, classes = self.config.evaluation, self.config.model.num_classes
        placed = self.generator.put(params)
        images = []
        with progress_bar(
            total=e.samples, unit='image', desc='samples to evaluate', leave=False
        ) as bar:
            for first in range(0, e.samples, self.generator.batch_size):
                indices = np.arange(first, min(first + self.generator.batch_size, e.samples))
                labels = (indices % classes).astype(np.int32) if classes else None
                batch = self.generator(
                    placed,
                    seed=self.config.seed,
                    indices=indices,
                    labels=labels,
                    progress=lambda _: keep_on(),
                )
                if batch is None:
                    return None
                images.append(batch)
                bar.update(len(indices))
        return np.concatenate(images)

    def compare(self, images: UInt8[np.ndarray, 'n height width channels']) -> list[Result]:
        """The metrics of these samples."""
        e = self.config.evaluation
        compared = with_reference(e.metrics)
        if compared and self._reference is None:
            self._reference = self._open_reference(compared)
        shape = self.config.image_shape
        source = ArraySource('samples', colour(images), (shape[0], shape[1], 3))
        samples = image_side('samples', source, e.metrics, self.network, batch_size=FEATURE_BATCH)
        return compute(e.metrics, self.network, samples, self._reference, seed=self.config.seed)

    def _open_reference(self, metrics: Sequence[str]) -> Side:
        path = self.config.evaluation.reference
        if path:
            with open_side(
                path, metrics, self.network, 'evaluation.reference', batch_size=FEATURE_BATCH
            ) as (side, _):
                return side()
        return image_side(
            self.source.name, Colour(self.source), metrics, self.network, batch_size=FEATURE_BATCH
        )

    def row(self, result: Result, step: int, seconds: float) -> dict[str, Any]:
        """A line of evaluation.csv."""
        protocol = result.protocol | {
            'sampler': self._sampler(),
            'evaluations': self.generator.sampler.evaluations,
        }
        protocol['settings'] = ' '.join(
            f'{name}={protocol[name]}' for name in SETTINGS if name in protocol
        )
        known = {
            'step': step,
            'training_seconds': seconds,
            'metric': result.label,
            'value': result.value,
            'std': result.std,
        }
        return {name: known.get(name, protocol.get(name)) for name in COLUMNS}

    def _sampler(self) -> str:
        e = self.config.evaluation
        name = (
            f'{e.sampler} {self.generator.sampler.config.variance}'
            if e.sampler == 'ddpm'
            else e.sampler
        )
        usual = {'eta': 0, 'skip_schedule': '', 'guidance_scale': 1}
        return ' '.join(
            [
                name,
                *(
                    f'{option}={getattr(e, option)}'
                    for option, value in usual.items()
                    if getattr(e, option) != value
                ),
            ]
        )


def evaluation_table(workdir: pathlib.Path, start_step: int) -> StepTable:
    """`WORKDIR/evaluation.csv`: a line a metric, of steps up to `start_step` at first."""
    return StepTable(workdir / FILE, COLUMNS, start_step)


def read_evaluations(workdir: pathlib.Path) -> list[dict[str, str]]:
    """The lines of evaluation.csv."""
    return read_rows(workdir / FILE, COLUMNS)
