"""Measures checkpoints of several models in one process, and compiles each sampler only once."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jaxtyping import UInt8

from jaxunet.checkpoint.store import state_template
from jaxunet.compare.jobs import Job
from jaxunet.compare.stopwatch import Stopwatch
from jaxunet.config import Config
from jaxunet.data.images import class_columns, grid, save_png
from jaxunet.data.source import Source
from jaxunet.metrics.evaluation import compute
from jaxunet.metrics.features import INCEPTION, FeatureNetwork, load_features
from jaxunet.metrics.table import ImageSummary, check_reference, with_reference
from jaxunet.model.unet import Params
from jaxunet.runtime import rows
from jaxunet.runtime.background import Background
from jaxunet.runtime.beside_steps import beside_steps
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.generator import Generator, StoppedError
from jaxunet.training.conditions import SampleConditions
from jaxunet.training.evaluation import (
    FEATURE_BATCH,
    drawn,
    summary_of_reference,
    summary_of_samples,
)
from jaxunet.training.held_out import HeldOutLoss

TRAINING = ''  # path of the reference that is the training images
JUDGED = ('fid', 'kid')  # metrics that the second network computes, too


@dataclass(frozen=True)
class Checkpoint:
    """The averages of the weights at one of a job's times.

    Fields:
      seconds: one of `Job.seconds`.
      training_seconds: training time at the end of the step that reached `seconds`.
      averages: averaged weights by their names in `Job.averages`; the chosen one is measured.
      source: the training images.
    """

    job: Job
    config: Config
    source: Source
    seconds: float
    training_seconds: float
    step: int
    averages: dict[str, Params]


class Measurements:
    """Draws samples from checkpoints, and compares them with real images.

    Args:
      features: file of the feature network; it may appear later (`ready`). '' = no metrics.
      pictures: folder of the grids.
      judge: a second feature network, as of `load_features`, for the distances of `JUDGED`; '' =
        none. It chooses nothing.

    Raises:
      UserError: the judge cannot be loaded.

    Attributes:
      features: as given.
      watch: stopwatch that counts drawing (`sampling`) and waiting for compilers (`compiling`).
    """

    def __init__(self, features: str, pictures: Path, judge: str = '') -> None:
        self.features, self._judge, self._pictures = features, judge, pictures
        self.watch = Stopwatch()
        # Now, as its mistakes would otherwise end the first job after its training.
        self._networks = {judge: load_features(judge)} if judge else {}
        self._references: dict[tuple[object, ...], ImageSummary] = {}
        self._generators: dict[tuple[object, ...], Generator] = {}
        self._held_out: dict[tuple[object, ...], HeldOutLoss] = {}
        self._extracted: set[tuple[str, tuple[int, ...]]] = set()
        self._new: list[Callable[[], object]] = []
        self._compiling: list[Background[None]] = []
        self._devices = jax.local_devices()
        self._keep_on: Callable[[], bool] = lambda: True

    def ready(self) -> bool:
        """Returns True if the features are there, or none are asked for."""
        return not self.features or self.features in INCEPTION or Path(self.features).is_file()

    def prepare(self, job: Job, config: Config, source: Source) -> None:
        """Makes the programs of a job that no earlier job needed; `compile` compiles them.

        Args:
          source: the training images; the loss on its held-out images is measured, too.

        Raises:
          UserError: a sampler that does not exist, options that the model does not support, or too
            few training images for a metric.
        """
        if TRAINING in job.references:
            compared = with_reference(job.references[TRAINING][1])
            check_reference(len(source), compared, source.name)
        for text in job.samplers:
            key = _key(config, job, text)
            if key not in self._generators:
                generator = self._generators[key] = Generator(
                    config,
                    job.sampler(text),
                    batch_size=min(job.batch_size, job.samples),
                    devices=self._devices,
                )
                template = state_template(config).params
                self._new.append(functools.partial(generator.compile_for, template))
        key = _held_out_key(config)
        if source.held_out is not None and key not in self._held_out:
            self._held_out[key] = HeldOutLoss(config, source, self._devices)
            self._new.append(self._held_out[key].compile)
        for features in filter(None, (self.features, self._judge) if job.references else ()):
            shape = (min(job.samples, FEATURE_BATCH), *config.image_shape[:2], 3)
            if (features, shape) not in self._extracted:
                self._extracted.add((features, shape))
                self._new.append(functools.partial(self._extract, features, shape))

    def _extract(self, features: str, shape: tuple[int, ...]) -> None:
        """Compiles a feature network: choosing its convolutions takes half a minute on a GPU."""
        jax.block_until_ready(self._network(features).extract(np.zeros(shape, np.uint8)))

    def compile(self, devices: Sequence[jax.Device]) -> None:
        """Compiles the programs made since the last call, beside training where that is safe.

        Args:
          devices: those on which the job trains.
        """
        new, self._new = self._new, []

        def compile_all() -> None:
            for compile_one in new:
                compile_one()

        if new:
            self._compiling.append(beside_steps(compile_all, devices))

    def wait(self, keep_on: Callable[[], bool] = lambda: True) -> None:
        """Waits until all programs are compiled; raises the error of one that failed.

        Raises:
          StoppedError: `keep_on` returned False.
        """
        while self._compiling:
            compiling = self._compiling.pop()
            compiling.result(keep_on)
            if not keep_on():
                self._compiling.append(compiling)
                raise StoppedError

    def measure(
        self, checkpoint: Checkpoint, keep_on: Callable[[], bool] = lambda: True
    ) -> Iterator[rows.Row]:
        """Yields a row for each sampler of the checkpoint's job; saves the job's grids.

        Args:
          keep_on: asked while samples are drawn, and before anything else that takes long.

        Raises:
          StoppedError: `keep_on` returned False.
          UserError: the weights give no images, a loss or metric is not finite, or the features do
            not fit them.
        """
        self._keep_on = keep_on
        with self.watch.during('compiling'):
            self.wait(keep_on)
        job, config = checkpoint.job, checkpoint.config
        average, about = self._choose(checkpoint)
        held_out = self._held_out.get(_held_out_key(config))
        if held_out is not None:
            about['losses'] = held_out.measure(checkpoint.averages[average]).columns()
        check_finite(about)
        for text in job.samplers:
            generator = self._generators[_key(config, job, text)]
            images, seconds = self._draw(generator, checkpoint, average, range(job.samples))
            if job.picture and (job.all_pictures or text == job.samplers[0]):
                ending = f'_{text.replace(":", "")}' if job.all_pictures else ''
                self._save_grid(checkpoint, images, ending)
            row = {
                'case': job.case,
                'data': job.data,
                'seed': job.seed,
                'seconds': checkpoint.seconds,
                'training_seconds': checkpoint.training_seconds,
                'step': checkpoint.step,
                'batch_size': config.data.batch_size,
                'sampler': text,
                'evaluations': generator.sampler.evaluations,
                'num_samples': len(images),
                'seconds_per_sample': seconds / len(images),
            }
            compared = self._compare(checkpoint, images)
            check_finite(compared)
            yield row | about | compared

    def _choose(self, checkpoint: Checkpoint) -> tuple[str, dict[str, object]]:
        """Returns the name of the average to measure, and fields for the rows that explain why."""
        job = checkpoint.job
        averages = job.averages or tuple(checkpoint.averages)
        if len(averages) == 1 or not self.features:
            return averages[0], {}
        generator = self._generators[_key(checkpoint.config, job, job.samplers[0])]
        path, metrics = next(
            (path, metrics) for path, (_, metrics) in job.references.items() if 'fid' in metrics
        )
        network = self._network(self.features)
        reference = self._reference(network, path, metrics, checkpoint.source)
        distances = {}
        for average in averages:
            others = range(job.samples, job.samples + job.choosing)
            images, _ = self._draw(generator, checkpoint, average, others)
            side = summary_of_samples(images, ['fid'], network)
            (distance,) = compute(['fid'], network, side, reference, seed=job.seed)
            distances[average] = distance.value
        best = min(averages, key=lambda average: distances[average])
        return best, {'average': best, 'choosing': job.choosing, 'average_fid': distances}

    def _draw(
        self, generator: Generator, checkpoint: Checkpoint, average: str, numbers: range
    ) -> tuple[UInt8[np.ndarray, 'n height width channels'], float]:
        """Returns the samples with these indices, and the seconds that drawing them took."""
        conditions = SampleConditions(checkpoint.config, checkpoint.source, numbers.stop)
        with self.watch.during('sampling'):
            params = generator.put(checkpoint.averages[average])
            jax.block_until_ready(params)
            began, seed = time.perf_counter(), checkpoint.job.seed
            batches = drawn(generator, params, conditions, numbers, seed, self._keep_on)
            images = np.concatenate(list(batches))
            return images, time.perf_counter() - began

    def _compare(
        self, checkpoint: Checkpoint, images: UInt8[np.ndarray, 'n height width channels']
    ) -> dict[str, object]:
        """Returns the metrics of samples against each reference, and how they were computed."""
        references = checkpoint.job.references
        if not self.features or not references:
            return {}
        network = self._network(self.features)
        values, counts = self._values(network, references, checkpoint, images)
        compared = {'values': values, 'references': counts, 'features': network.name}
        distances = {
            path: (name, wanted)
            for path, (name, metrics) in references.items()
            if (wanted := tuple(metric for metric in metrics if metric in JUDGED))
        }
        if self._judge and distances:
            judge = self._network(self._judge)
            judged, _ = self._values(judge, distances, checkpoint, images)
            compared |= {'judged': judged, 'judge': judge.name}
        return compared

    def _values(
        self,
        network: FeatureNetwork,
        references: Mapping[str, tuple[str, tuple[str, ...]]],
        checkpoint: Checkpoint,
        images: UInt8[np.ndarray, 'n height width channels'],
    ) -> tuple[dict[str, dict[str, float]], dict[str, int | None]]:
        """Returns the metrics and the number of images of each reference, by their names."""
        metrics = sorted({name for _, names in references.values() for name in names})
        samples = summary_of_samples(images, metrics, network)
        values: dict[str, dict[str, float]] = {}
        counts: dict[str, int | None] = {}
        seed = checkpoint.job.seed
        for path, (name, wanted) in references.items():
            reference = self._reference(network, path, wanted, checkpoint.source)
            # All pairs at once: quicker than random subsets, and without their scatter.
            results = compute(wanted, network, samples, reference, seed=seed, kid_subsets=0)
            values[name] = {m: r.value for m, r in zip(wanted, results, strict=True)}
            counts[name] = reference.count if reference else None
        return values, counts

    def _network(self, features: str) -> FeatureNetwork:
        if features not in self._networks:
            self._networks[features] = load_features(features)
        return self._networks[features]

    def _reference(
        self, network: FeatureNetwork, path: str, metrics: Sequence[str], source: Source
    ) -> ImageSummary | None:
        """Returns a reference with what these metrics need; None if none of them needs one."""
        metrics = with_reference(metrics)
        if not metrics:
            return None
        key = (network.name, path or source, *metrics)
        if key not in self._references:
            if not self._keep_on():
                raise StoppedError
            self._references[key] = summary_of_reference(
                path, source, metrics, network, 'references'
            )
        return self._references[key]

    def _save_grid(
        self,
        checkpoint: Checkpoint,
        images: UInt8[np.ndarray, 'n height width channels'],
        ending: str,
    ) -> None:
        job, shown = checkpoint.job, images[: checkpoint.job.picture]
        picture = grid(shown, class_columns(checkpoint.config.model.num_classes, len(shown)))
        save_png(self._pictures / f'{job.name}_{checkpoint.seconds:g}s{ending}.png', picture)


def check_finite(fields: Mapping[str, object], above: str = '') -> None:
    """Checks that the numbers of a row are finite, because JSON has no others.

    Args:
      fields: the fields of the row, or of a field that holds others.
      above: the names of the fields that hold these, each with a dot behind it.

    Raises:
      UserError: one is not finite; names it.
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            check_finite(value, f'{above}{name}.')
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f'{above}{name}: expected a finite number, found {value}; training has diverged'
            )


def _key(config: Config, job: Job, sampler: str) -> tuple[object, ...]:
    """Returns a key with everything that a compiled sampler depends on."""
    batch = min(job.batch_size, job.samples)
    network = (config.model, config.diffusion, config.image_shape)
    return (*network, config.backend, config.precision, job.sampler(sampler), batch)


def _held_out_key(config: Config) -> tuple[object, ...]:
    """Returns a key with everything that the program and images of a held-out loss depend on."""
    network = (config.model, config.diffusion, config.backend, config.precision)
    return (*network, config.data, config.optimizer.accumulate_steps)
