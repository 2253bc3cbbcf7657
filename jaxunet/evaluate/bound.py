"""Measures the likelihood of images under a model, for `--metrics nll` of `jaxunet.evaluate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxunet.checkpoint.load import Model, load_model
from jaxunet.data.reading import Reading
from jaxunet.data.source import Selection, Source, with_class_order
from jaxunet.data.sources import open_images, open_source
from jaxunet.diffusion.process import make_diffusion
from jaxunet.evaluate.variational_bound import Likelihood, Terms, check_has_bound
from jaxunet.metrics.evaluation import Result
from jaxunet.metrics.sides import check_count, drawn_rows
from jaxunet.metrics.table import Protocol
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.progress import progress_bar
from jaxunet.runtime.whole_files import written
from jaxunet.sampling.options import resolve_variance
from jaxunet.sampling.subsets import respaced_timesteps


@dataclass(frozen=True)
class LikelihoodOptions:
    """The options of the bound's computation.

    Attributes:
      reference: the images, as `data.path`; '' = those that the run keeps out of training, or the
        training images if it keeps none.
      num_samples: use this many of the images, drawn at random; None = all.
      variance: fixed_small, fixed_large or learned; None = learned if the model has it, else
        fixed_small.
      respacing: guided-diffusion's timestep_respacing; None = every timestep.
      clip: clip the predicted x_0 to [−1, 1].
      batch_size: images at a time, over all devices.
      seed: of the noise and of the choice of images.
      backend: as `config.backend`; None = the run's.
    """

    reference: str = ''
    num_samples: int | None = None
    variance: str | None = None
    respacing: str | None = None
    clip: bool = True
    batch_size: int = 64
    seed: int = 0
    backend: str | None = None


@dataclass(frozen=True)
class Bound:
    """The bound with one average.

    Attributes:
      result: the mean over the images.
      terms: the terms of the bound for each image.
      timesteps: the timesteps visited.
    """

    result: Result
    terms: Terms
    timesteps: Int[np.ndarray, ' timesteps']


def measure_likelihood(
    path: str, averages: Sequence[str], options: LikelihoodOptions, **given: Any
) -> Iterator[Bound]:
    """Yields the bound with each average.

    Args:
      path: a workdir, one checkpoint in it, or a weight file.
      averages: as `--ema` of `jaxunet.sample`.
      given: what a weight file leaves open about its model, as in `load_model`.

    Raises:
      UserError: a model or images that cannot be read, options that do not suit the model, or a
        model without such a bound.
    """
    prepared: _Prepared | None = None
    for ema in averages:
        model = load_model(path, ema=ema, **given)
        # The averages of a run share config, images and compiled program.
        prepared = prepared or _prepare(path, model, options)
        likelihood, rows = prepared.likelihood, prepared.rows
        with progress_bar(total=len(rows), unit='image', desc='nll', leave=False) as bar:
            terms = likelihood(
                likelihood.put(model.params),
                prepared.source,
                rows,
                seed=options.seed,
                progress=bar.update,
            )
        protocol = {'weights': model.note, **prepared.protocol}
        yield Bound(_result(terms, protocol), terms, likelihood.timesteps)


class _Prepared(NamedTuple):
    """The values that all averages of a run share."""

    likelihood: Likelihood
    source: Source
    rows: Int[np.ndarray, ' images']
    protocol: Protocol


def _prepare(path: str, model: Model, options: LikelihoodOptions) -> _Prepared:
    """Returns the program, the images and their indices, and the fields that describe them."""
    config = model.config
    if options.backend is not None:
        config = config.replace(backend=options.backend)
    check_has_bound(config)
    diffusion = make_diffusion(config.diffusion)
    variance = resolve_variance(options.variance, diffusion)
    timesteps = np.arange(diffusion.steps, dtype=np.int32)
    if options.respacing is not None:
        timesteps = respaced_timesteps(diffusion.alphas_cumprod, options.respacing)
    source = _images(path, model, options.reference)
    held_out = '' if options.reference or not config.data.holdout else ', held out of training'
    check_count(options.num_samples, source, source.name, held_out)
    rows = drawn_rows(len(source), options.num_samples, options.seed)
    likelihood = Likelihood(
        config,
        timesteps,
        variance=variance,
        clip=options.clip,
        batch_size=min(options.batch_size, len(rows)),
        devices=jax.local_devices(),
    )
    protocol: Protocol = {
        'images': source.name,
        'num_images': len(rows),
        'timesteps': len(timesteps),
        'variance': variance,
        'clip': options.clip,
        'seed': options.seed,
    }
    return _Prepared(likelihood, source, rows, protocol)


def save_terms(path: Path, measured: Bound) -> None:
    """Writes an `.npz`: `bpd` and `prior` of each image, and arrays by timestep.

    These are `timesteps`, and as in guided-diffusion's image_nll the means over the images of the
    bound's terms (`vb`) and of both errors (`xstart_mse`, `mse`).

    Raises:
      UserError: the file cannot be written.
    """
    terms = measured.terms
    with written(path, '--terms') as partial, partial.open('wb') as file:
        np.savez(
            file,
            bpd=terms.total,
            prior=terms.prior,
            timesteps=measured.timesteps,
            vb=terms.bound.mean(axis=0),
            xstart_mse=terms.x0_error.mean(axis=0),
            mse=terms.noise_error.mean(axis=0),
        )


def _images(path: str, model: Model, reference: str) -> Source:
    """Returns the images to measure, in the shape of the model."""
    config = model.config
    if not reference and not config.data.path:
        raise UserError(f'--reference: missing; {path} does not name its training images')
    if reference:
        source = open_source(
            reference,
            image_shape=config.image_shape,
            labels=config.data.labels,
            reading=Reading.of(config),
        )
        classes = config.data.classes or model.class_names
        if config.model.num_classes and source.class_names and classes:
            source = Selection(source, classes, '--reference')
    else:
        source = with_class_order(open_images(config), model.class_names)
        source = source.held_out or source
    expected, found = config.model.num_classes, len(source.class_names)
    if expected and (source.labels.min() < 0 or source.labels.max() >= expected):
        raise UserError(
            f'{source.name}: expected images in the {expected} classes of the model, found {found} '
            'classes; give them labels (docs/training.md, "Labels")'
        )
    return source


def _result(terms: Terms, protocol: Protocol) -> Result:
    """Returns the mean of the bound, with that of its parts."""
    count, total = len(terms.prior), terms.total
    parts: Protocol = {
        'unit': 'bits per dimension',
        'prior': float(terms.prior.mean()),
        'transitions': float(terms.bound[:, 1:].sum(axis=1).mean()),
        'decoder': float(terms.bound[:, 0].mean()),
    }
    if count > 1:
        parts['standard_error'] = float(total.std(ddof=1) / count**0.5)
    return Result('nll', float(total.mean()), None, parts | protocol)
