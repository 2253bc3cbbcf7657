"""The run of a classifier of noisy images, for the training loop.

A workdir gets checkpoints/, metrics.csv, tensorboard/ and classifier.pt, which is written before
every checkpoint. The run has one process, on one or all of its devices.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from absl import logging
from tqdm import tqdm

from jaxunet.checkpoint.meta import RunFacts
from jaxunet.checkpoint.newest import newest_classes
from jaxunet.checkpoint.resumable import FIXED_FIELDS, fixed_changes, other_run
from jaxunet.checkpoint.state import TrainState
from jaxunet.checkpoint.store import Checkpoints
from jaxunet.config import Config
from jaxunet.data.source import Source, with_class_order
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.jax_settings import fixed_jax_settings
from jaxunet.runtime.out_of_memory import memory_for
from jaxunet.training.classifier_accuracy import COLUMNS, KINDS, Accuracy, columns, sentence
from jaxunet.training.clock import due
from jaxunet.training.loggers.interface import RunStart
from jaxunet.training.loggers.logs import Logs
from jaxunet.training.logs import step_row
from jaxunet.training.loop import Loop
from jaxunet.training.noisy_classifier import (
    FILE,
    ClassifierSession,
    draw_state,
    network_config,
    starting_state,
)
from jaxunet.training.preemption import Caller
from jaxunet.training.resume import StartingPoint, adapted, log_labels
from jaxunet.training.rollback import TooManySkippedError
from jaxunet.training.step import Metrics
from jaxunet.training.subject import Due, Outputs, Subject
from jaxunet.training.workdir import opened
from jaxunet.weights import write_classifier

NETWORK = 'classifier of noisy images'
ACCURACY_MEMORY = (
    'measuring the accuracy',
    'raise optimizer.accumulate_steps or set train.holdout_every=0',
)
LOGGED = ('step', 'loss', 'learning_rate', 'grad_norm', 'step_ms', 'skipped_steps')


@fixed_jax_settings()
def train_classifier(
    config: Config, workdir: pathlib.Path, source: Source, caller: Caller | None = None
) -> int:
    """Trains until `train.steps`, or until the caller asks it to stop.

    Args:
      config: passed by `check_trainable`. `model` is the classifier's network, with the number of
        classes; `diffusion` the process of the models that it will guide.
      workdir: a run that it holds is resumed.
      source: the images (`jaxunet.data.sources.open_images`), whose classes `check_classes` found
        to fit.
      caller: as for `jaxunet.training.loop.train`.

    Returns the step reached, which is saved.

    Raises:
      UserError: the workdir holds another run, the config or the data does not fit, too many steps
        in a row were not finite, or classifier.pt or the last checkpoint could not be written.
      OutOfMemoryError: as `jaxunet.training.loop.train`.
    """
    source = with_class_order(source, newest_classes(workdir))
    with opened(workdir) as lock, caller or Caller() as preemption:
        return Loop(ClassifierSubject(config, workdir, source), lock, preemption).run()


class ClassifierSubject(Subject):
    """A classifier of noisy images in training."""

    session: ClassifierSession

    def __init__(self, config: Config, workdir: pathlib.Path, source: Source) -> None:
        self.config, self.workdir, self.source = config, workdir, source
        self.session = ClassifierSession(config, source)
        self.checkpoints = Checkpoints(
            workdir,
            keep=config.train.keep,
            keep_every=config.train.keep_every,
            draw=draw_state,
            network=NETWORK,
        )

    def start(self, failed: TooManySkippedError | None) -> StartingPoint:
        """Returns the newest checkpoint, or the state before step 0; there are no rollbacks.

        Raises:
          UserError: the run in the workdir is another one, no checkpoint can be read, or the run
            cannot start from `init_from`.
        """
        config, names = self.config, self.source.class_names
        restored, facts = self.checkpoints.restore(), RunFacts(class_names=names)
        log_labels(config, names)
        if restored is None:
            if config.init_from:
                return StartingPoint.of(starting_state(config), facts)
            return StartingPoint.fresh(config, facts, draw_state)
        # A classifier has no averages of its weights.
        fixed = tuple(name for name in FIXED_FIELDS if not name.startswith('ema.'))
        changed = fixed_changes(restored.config, config, fixed)
        if (found := restored.facts.class_names) != names:
            changed.append(f'classes: {found} -> {names}')
        if changed:
            raise other_run(self.workdir, changed)
        logging.info('resuming %s at step %d', self.workdir, int(restored.state.step))
        return StartingPoint.of(adapted(restored, config), restored.facts)

    def due(self, step: int) -> Due:
        train = self.config.train
        return Due(held_out=due(train.holdout_every, step, train.steps))

    def finish(self, begin: StartingPoint) -> None:
        """Writes classifier.pt, which a full disk may have refused."""
        self.write(begin.state())

    def weights(self, state: TrainState) -> Params:
        return state.params

    def open_outputs(self, begin: StartingPoint, bar: tqdm, caller: Caller) -> ClassifierOutputs:
        return ClassifierOutputs(self, begin.step, bar)

    def write(self, state: TrainState) -> None:
        """Writes classifier.pt; raises `UserError` if it cannot be written."""
        network, classes = network_config(self.config), self.config.model.num_classes
        write_classifier(self.workdir / FILE, state.params, network, classes)


class ClassifierOutputs(Outputs):
    """The outputs of a classifier's run.

    Args:
      start: the step that the run starts from; later rows of its log files are dropped.
      bar: the progress bar, above which messages are printed.
    """

    def __init__(self, subject: ClassifierSubject, start: int, bar: tqdm) -> None:
        self._subject, self._bar = subject, bar
        self._accuracy: Accuracy | None = None
        if subject.config.train.holdout_every:
            session = subject.session
            device = session.parallel.local_devices[0]
            self._accuracy = Accuracy(session.config, session.network, subject.source, device)
        extra = COLUMNS if self._accuracy else ()
        run = RunStart(
            subject.config, subject.workdir, start, (*LOGGED[1:], *extra), optional=COLUMNS
        )
        self._logs = Logs(run, COLUMNS)
        self._measured: dict[int, dict[str, float]] = {}  # by step, until the step is logged
        self._failure: UserError | None = None  # of the last attempt to write classifier.pt

    @memory_for(*ACCURACY_MEMORY)
    def measure_held_out(self, step: int, weights: Params) -> None:
        """Measures the accuracy for the log of this step."""
        assert self._accuracy is not None
        scores = self._accuracy.measure(weights)
        self._measured[step] = columns(scores)
        self._bar.write(f'step {step}: {sentence(scores[KINDS[0]])}')

    def log(
        self, step: int, metrics: Metrics, seconds_per_step: float, training_seconds: float
    ) -> None:
        """Writes the metrics of one step to the log files and the progress bar."""
        row = step_row(step, metrics, seconds_per_step)
        self._logs.row(row | self._measured.pop(step, {}))
        self._bar.set_postfix_str(f'loss={row["loss"]:.4f}, {row["step_ms"]:.1f} ms/step')

    def before_checkpoint(self, state: Callable[[], TrainState]) -> None:
        """Writes classifier.pt; a failure is a warning, and the next checkpoint tries again."""
        self._failure = None
        try:
            self._subject.write(state())
        except UserError as error:
            self._failure = error
            self._bar.write(f'warning: {error}')

    def check(self) -> None:
        """Raises the error if classifier.pt could not be written at the last checkpoint."""
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Tries once more to write the rows that a full disk refused."""
        self._logs.close()
