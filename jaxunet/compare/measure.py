"""Measures checkpoints of several models in one process, and compiles each sampler only once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jaxtyping import UInt8

from jaxunet.checkpoint.store import state_template
from jaxunet.compare.jobs import Job, parse_sampler
from jaxunet.config import Config
from jaxunet.data.images import grid, save_png
from jaxunet.data.source import ArraySource
from jaxunet.metrics.evaluation import compute
from jaxunet.metrics.features import FeatureNetwork, load_features
from jaxunet.metrics.sides import image_side, open_side
from jaxunet.metrics.table import Side
from jaxunet.model.unet import Params
from jaxunet.runtime import rows
from jaxunet.sampling.generator import Generator
from jaxunet.training.background import Background
from jaxunet.training.evaluation import FEATURE_BATCH, colour

MAX_COLUMNS = 20  # of a grid with one column per class


@dataclass(frozen=True)
class Checkpoint:
    """Averaged weights at one of a job's times.

    Fields:
      seconds: the time that the job names.
      training_seconds: training time that it took to the end of the step.
      params: the averaged weights.
    """

    job: Job
    config: Config
    seconds: float
    training_seconds: float
    step: int
    params: Params


class Measurements:
    """Draws samples from checkpoints, and compares them with real images.

    Args:
      features: file of the feature network; it may appear later (`ready`). '' = no metrics.
      pictures: folder of the grids.
    """

    def __init__(self, features: str, pictures: Path) -> None:
        self._path, self._pictures = features, pictures
        self._network: FeatureNetwork | None = None
        self._references: dict[str, Side] = {}
        self._generators: dict[tuple[object, ...], Generator] = {}
        self._new: list[tuple[Generator, Config]] = []
        self._compiling: list[Background[None]] = []
        self._device = jax.local_devices()[0]

    def ready(self) -> bool:
        """Returns True if the features are there, or none are asked for."""
        return not self._path or Path(self._path).is_file()

    def prepare(self, job: Job, config: Config) -> None:
        """Makes the samplers of a job that no earlier job had; `compile` compiles them.

        Raises:
          UserError: a sampler that does not exist, or options that the model does not support.
        """
        for text in job.samplers:
            key = _key(config, job, text)
            if key not in self._generators:
                self._generators[key] = self._generator(config, job, text)
                self._new.append((self._generators[key], config))

    def compile(self) -> None:
        """Compiles the samplers made since the last call, in a thread."""
        new, self._new = self._new, []

        def compile_all() -> None:
            for generator, config in new:
                generator.compile_for(state_template(config).params)

        if new:
            self._compiling.append(Background(compile_all))

    def wait(self) -> None:
        """Waits until all samplers are compiled; raises the error of one that failed."""
        while self._compiling:
            self._compiling.pop().result(lambda: True)

    def measure(self, checkpoint: Checkpoint) -> Iterator[rows.Row]:
        """Yields a row for each sampler of the checkpoint's job; saves a grid of the first's.

        Raises:
          UserError: the weights give no images, or the features do not fit them.
        """
        self.wait()
        job, config = checkpoint.job, checkpoint.config
        for text in job.samplers:
            generator = self._generators[_key(config, job, text)]
            images, seconds = _draw(generator, checkpoint)
            if text == job.samplers[0] and job.picture:
                self._save_grid(checkpoint, images)
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
            yield row | self._compare(job, images)

    def _generator(self, config: Config, job: Job, sampler: str) -> Generator:
        return Generator(
            config,
            parse_sampler(sampler),
            batch_size=min(job.batch_size, job.samples),
            devices=[self._device],
        )

    def _compare(
        self, job: Job, images: UInt8[np.ndarray, 'n height width channels']
    ) -> dict[str, object]:
        """Returns the metrics of samples against each reference, and how they were computed."""
        if not self._path or not job.references:
            return {}
        if self._network is None:
            self._network = load_features(self._path)
        network = self._network
        metrics = sorted({name for _, names in job.references.values() for name in names})
        rgb = colour(images)
        source = ArraySource('samples', rgb, (rgb.shape[1], rgb.shape[2], rgb.shape[3]))
        samples = image_side('samples', source, metrics, network, batch_size=FEATURE_BATCH)
        values: dict[str, dict[str, float]] = {}
        counts: dict[str, int | None] = {}
        for path, (name, wanted) in job.references.items():
            reference = self._reference(path, wanted, network)
            # All pairs at once: quicker than random subsets, and without their scatter.
            results = compute(wanted, network, samples, reference, seed=job.seed, kid_subsets=0)
            values[name] = {m: r.value for m, r in zip(wanted, results, strict=True)}
            counts[name] = reference.count
        return {'values': values, 'references': counts, 'features': network.name}

    def _reference(self, path: str, metrics: Sequence[str], network: FeatureNetwork) -> Side:
        key = ' '.join([path, *metrics])
        if key not in self._references:
            with open_side(path, metrics, network, path, batch_size=FEATURE_BATCH) as (side, _):
                self._references[key] = side()
        return self._references[key]

    def _save_grid(
        self, checkpoint: Checkpoint, images: UInt8[np.ndarray, 'n height width channels']
    ) -> None:
        job, classes = checkpoint.job, checkpoint.config.model.num_classes
        picture = grid(images[: job.picture], classes if 1 < classes <= MAX_COLUMNS else None)
        save_png(self._pictures / f'{job.name}_{checkpoint.seconds:g}s.png', picture)


def _key(config: Config, job: Job, sampler: str) -> tuple[object, ...]:
    """Returns what a compiled sampler depends on."""
    batch = min(job.batch_size, job.samples)
    network = (config.model, config.diffusion, config.image_shape)
    return (*network, config.backend, config.precision, sampler, batch)


def _draw(
    generator: Generator, checkpoint: Checkpoint
) -> tuple[UInt8[np.ndarray, 'n height width channels'], float]:
    """Returns the samples of a checkpoint and the seconds that drawing them took."""
    job, classes = checkpoint.job, checkpoint.config.model.num_classes
    params = generator.put(checkpoint.params)
    jax.block_until_ready(params)
    began, images = time.perf_counter(), []
    for first in range(0, job.samples, generator.batch_size):
        indices = np.arange(first, min(first + generator.batch_size, job.samples))
        labels = (indices % classes).astype(np.int32) if classes else None
        batch = generator(params, seed=job.seed, indices=indices, labels=labels)
        assert batch is not None  # only a stop gives None
        images.append(batch)
    return np.concatenate(images), time.perf_counter() - began
