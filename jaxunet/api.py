"""jaxunet from Python: load, sample, train and evaluate, without a command line.

    import jaxunet

    run = jaxunet.train('photos.zip', workdir='runs/photos')
    images = run.model.sample(64)

Mistakes are exceptions (`UserError`) with the messages of the commands. Nothing here ends the
process, reads the command line or touches a signal handler, and any thread may call it. Where a
function takes images, it takes arrays as well as paths.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import queue
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from jaxunet.checkpoint.load import load_initial
from jaxunet.checkpoint.newest import saved_steps
from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config, resolve, to_dict
from jaxunet.data.arrays import NAME, source_of
from jaxunet.data.reading import Reading
from jaxunet.data.source import Source
from jaxunet.data.sources import open_images
from jaxunet.metrics.evaluation import Result, check_metrics, compute
from jaxunet.metrics.features import FeatureNetwork, load_features
from jaxunet.metrics.sides import image_side, open_side
from jaxunet.metrics.table import ImageSummary, check_reference, with_reference
from jaxunet.runtime.background import WAIT_SECONDS, Background
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.guarded import guarded
from jaxunet.runtime.paths import check_path, expanded
from jaxunet.runtime.progress import hidden
from jaxunet.sampling.arguments import as_progress, as_type, as_whole
from jaxunet.sampling.model import Model, load
from jaxunet.training import loop
from jaxunet.training.evaluation import FEATURE_BATCH, Colour, Evaluator
from jaxunet.training.logs import FILE as METRICS
from jaxunet.training.logs import read_metrics
from jaxunet.training.preemption import Caller
from jaxunet.training.start import chosen_config, open_checked
from jaxunet.training.values import Recipe, chosen_values, fields_by_path, plain_value

__all__ = ['Model', 'Run', 'UserError', 'evaluate', 'load', 'train', 'train_rows']

PathLike: TypeAlias = str | os.PathLike[str]
Row: TypeAlias = dict[str, float]


class Run:
    """A run of training, in its folder.

    Attributes:
      workdir: holds checkpoints/, metrics.csv, samples/ and the rest, as that of the command.
      step: the step that was reached, which is saved.
    """

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        self.workdir, self.step = workdir, step
        self._model: Model | None = None

    def __repr__(self) -> str:
        return f'<jaxunet run in {self.workdir}, step {self.step}>'

    @property
    def model(self) -> Model:
        """The trained model, with the first average of its weights."""
        if self._model is None:
            self._model = load(self.workdir)
        return self._model

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The columns of metrics.csv by name, float64 (rows,); NaN where a cell is empty.

        There are none if train.loggers leaves out csv.
        """
        path = self.workdir / METRICS
        with guarded('the metrics'):
            rows = read_metrics(path) if path.exists() else []
        names = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
        return {name: np.array([float(row[name] or 'nan') for row in rows]) for name in names}


def train(
    images: object = None,
    *,
    workdir: PathLike,
    steps: int | None = None,
    labels: object = None,
    class_names: Sequence[str] | None = None,
    config: Recipe = 'images',
    progress: bool | Callable[[Row], object] = True,
    **fields: object,
) -> Run:
    """Trains a model, or goes on with the run that a folder holds.

    Ctrl-C, and whatever `progress` raises, stop the run: it finishes the steps that have begun,
    saves them and raises. A second Ctrl-C raises at once, while the run saves in its thread. The
    same call goes on from there.

    Args:
      images: a path, as the field data.path; or arrays (n, height, width[, channels]) of one size,
        uint8, uint16, floats from 0 to 1, or in `data.range`; None = the path that `config` names.
      workdir: the folder of the run.
      steps: optimizer steps in all, as the field train.steps; None = the choice of `config`.
      labels: with arrays: a class for each image, as whole numbers from 0 or as names. The model is
        then class-conditional unless model.num_classes is set. With a path: the field data.labels.
      class_names: names of the labels 0, 1, ...
      config: name of a recipe, a config file or a config. What it leaves open is chosen from the
        images.
      progress: show a bar; or a function of each logged row, a dict by the columns of metrics.csv.
        It runs in the caller's thread. If it returns False, the run stops.
      fields: fields of the config, by their names, such as objective='flow', or by their paths,
        **{'data.batch_size': 8}, or sections, data={'batch_size': 8}.

    Raises:
      UserError: the config, the images or the workdir do not fit, or the run cannot go on. What was
        trained is saved.
    """
    progress = as_progress(progress)
    rows = train_rows(
        images,
        workdir=workdir,
        steps=steps,
        labels=labels,
        class_names=class_names,
        config=config,
        bar=progress is True,
        **fields,
    )
    with contextlib.closing(rows):
        while True:
            try:
                row = next(rows)
            except StopIteration as end:
                return end.value
            try:
                if callable(progress) and progress(row) is False:
                    break
            except BaseException as error:
                rows.throw(error)  # saves and raises it
    return Run(pathlib.Path(expanded(workdir)), max(saved_steps(pathlib.Path(expanded(workdir)))))


def train_rows(
    images: object = None,
    *,
    workdir: PathLike,
    steps: int | None = None,
    labels: object = None,
    class_names: Sequence[str] | None = None,
    config: Recipe = 'images',
    bar: bool = False,
    **fields: object,
) -> Generator[Row, None, Run]:
    """Trains as `train`, and yields each row of metrics.csv once it is logged.

    Training goes on while the caller works with a row. Closing the generator, as the end of a loop
    with `break` does, stops the run and saves.

    Args:
      bar: show a progress bar.

    Returns the `Run`; raises as `train`.
    """
    check_path(workdir, 'workdir')
    bar = as_type('bar', bar, bool)
    given = None
    if images is not None and not isinstance(images, str | os.PathLike):
        given = source_of(images, labels, class_names)
    elif isinstance(labels, str) and class_names is None:
        fields['data.labels'] = labels
    elif labels is not None or class_names is not None:
        raise UserError(
            'labels, class_names: belong to arrays of images, found a path; its labels are named '
            "by labels='COLUMN', 'names' or 'folders'"
        )
    folder = pathlib.Path(expanded(workdir))
    if steps is not None:
        fields['train.steps'] = steps
    if images is not None:
        fields['data.path'] = NAME if given is not None else os.fspath(images)  # type: ignore[call-overload]
    with guarded('this run'), contextlib.nullcontext() if bar else hidden():
        values = chosen_values(config, fields, given)
        named = [path for path, _ in fields_by_path(fields)]
        made, _ = chosen_config(values, named, folder, given)
        source, _ = open_checked(made, given)
        initial = None if saved_steps(folder) else load_initial(made, source.class_names)
    caller = _Thread()
    try:
        task = caller.start(made, folder, source, initial, bar=bar)
        yield from caller.rows()
    except BaseException as error:
        caller.stop(error)
        raise
    return Run(folder, task.wait())


class _Thread(Caller):
    """The caller of a run that trains in a thread of its own.

    So an exception such as KeyboardInterrupt comes to the caller's thread, never into a step or a
    checkpoint, where it would lose the state.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: queue.SimpleQueue[Row | UserError | None] = queue.SimpleQueue()
        self._task: Background[int] | None = None

    def start(
        self,
        config: Config,
        workdir: pathlib.Path,
        source: Source,
        initial: TrainState | None,
        *,
        bar: bool,
    ) -> Background[int]:
        """Starts training; returns the thread, whose result is the step reached."""

        def work() -> int:
            try:
                with guarded('this run'), contextlib.nullcontext() if bar else hidden():
                    return loop.train(config, workdir, source, initial, caller=self)
            finally:
                gc.unfreeze()  # the loop froze what existed; a program may drop it
                self._told.put(None)

        self._task = Background(work)
        return self._task

    def logged(self, row: Mapping[str, float]) -> None:
        """Hands a row on to `rows`."""
        self._told.put(dict(row))

    def stalled(self, error: UserError) -> None:
        """Makes `rows` raise the error, as the thread waits for the devices."""
        self._told.put(error)

    def rows(self) -> Iterator[Row]:
        """Yields the rows until the thread ends."""
        while (row := self._next()) is not None:
            if isinstance(row, UserError):
                assert self._task is not None
                self._task.abandon()
                self._task = None
                raise row
            yield row

    def _next(self) -> Row | UserError | None:
        """Waits for what is told, in parts: Linux may hand Ctrl-C to a thread of JAX's.

        That does not wake this thread, which alone raises KeyboardInterrupt.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                return self._told.get(timeout=WAIT_SECONDS)

    def stop(self, error: BaseException) -> None:
        """Asks the run to stop, and waits until it has saved."""
        self.requested = True
        if self._task is None:
            return
        if isinstance(error, KeyboardInterrupt):
            print(
                '\ninterrupted: finishing the steps that have begun, then saving; a further '
                'interrupt does not wait for that',
                file=sys.stderr,
                flush=True,
            )
        try:
            self._task.result(lambda: True)
        except Exception as failure:
            if isinstance(error, GeneratorExit):  # the caller left a loop
                raise
            error.add_note(f'and the run could not be saved: {failure}')


def evaluate(
    model: Model | object,
    reference: object = None,
    metrics: Sequence[str] = ('fid',),
    *,
    num_samples: int | None = None,
    features: PathLike = 'inception',
    seed: int = 0,
    **fields: object,
) -> dict[str, float]:
    """Measures a model, or images, against real images.

    Args:
      model: a `Model`, which draws the samples as the section `evaluation` of its config says; or
        samples, as a path or arrays.
      reference: real images of one size, as a path or arrays, or an .npz of statistics; None = the
        training images of the model.
      metrics: some of fid, sfid, kid, precision, recall, copies, inception_score.
      num_samples: images to draw of a model; None = its field evaluation.samples.
      features: inception (downloads its weights once), or a file of features, as --features of
        `jaxunet.evaluate`.
      seed: of the samples and all other random choices.
      fields: with a model, other fields of `evaluation`: sampler, steps, guidance_scale,
        batch_size, ...

    Returns the values by the names of the metrics.

    Raises:
      UserError: images that do not fit or are too few, or unknown metrics or features.
    """
    if model is None:
        raise UserError('model: expected a Model, or samples as a path or arrays, found None')
    check_path(features, 'features', 'the name or the path of a feature network')
    features, seed = os.fspath(features), as_whole('seed', seed, 0)
    metrics = (metrics,) if isinstance(metrics, str) else metrics or ()
    if not isinstance(metrics, Iterable):
        raise UserError(f'metrics: expected names of metrics, found {metrics!r}')
    metrics = tuple(metrics)
    with guarded('this evaluation'):
        if isinstance(model, Model):
            path = os.fspath(reference) if isinstance(reference, str | os.PathLike) else ''
            changes = {'metrics': metrics, 'features': features, 'reference': path}
            changes |= fields | ({} if num_samples is None else {'samples': num_samples})
            changes = {name: plain_value(value) for name, value in changes.items()}
            base = to_dict(model.config) | {'seed': seed}
            config = resolve(base | {'evaluation': base['evaluation'] | changes})
            source = _reference(config, reference, path)
            results = Evaluator(config, source, jax.local_devices()).measure(model.params)
        else:
            if fields or num_samples is not None:
                name = 'num_samples' if num_samples is not None else next(iter(fields))
                raise UserError(f'{name}: needs a Model, which draws samples')
            results = _compared(model, reference, metrics, features, seed)
    return {result.label: result.value for result in results}


def _reference(config: Config, images: object, path: str) -> Source | None:
    """Returns the images that an `Evaluator` needs beside `evaluation.reference`."""
    if images is None or (path and config.model.low_res_size):
        if config.data.path in ('', NAME):
            raise UserError(
                'reference: missing; the model does not name the files of its training images'
            )
        return open_images(config)
    if path:
        return None
    if config.picture_path:
        raise UserError(
            'reference: the model draws from the pictures of its images (data.condition); expected '
            'a path of real images, or none for its own, found arrays'
        )
    source = source_of(images)
    if not config.model.low_res_size:
        return source
    return source.at(config.image_shape, Reading.of(config))


def _compared(
    samples: object, reference: object, metrics: Sequence[str], features: str, seed: int
) -> list[Result]:
    """Returns the metrics of images."""
    check_metrics(metrics, option='metrics')
    compared = with_reference(metrics)
    if compared and reference is None:
        raise UserError(f'reference: missing; needed by {", ".join(compared)}')
    network = load_features(features)
    check_metrics(metrics, network, 'metrics')
    known = _side(reference, compared, network, 'reference') if compared else None
    return compute(metrics, network, _side(samples, metrics, network, 'samples'), known, seed=seed)


def _side(
    images: object, metrics: Sequence[str], network: FeatureNetwork, option: str
) -> ImageSummary:
    is_reference = option == 'reference'
    if isinstance(images, str | os.PathLike):
        with open_side(
            os.fspath(images),
            metrics,
            network,
            option,
            batch_size=FEATURE_BATCH,
            is_reference=is_reference,
        ) as opened:
            return opened.compute()
    source = source_of(images)
    if is_reference:
        check_reference(len(source), metrics, option)
    return image_side(option, Colour(source), metrics, network, batch_size=FEATURE_BATCH)
