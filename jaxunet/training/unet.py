"""The run of a diffusion UNet, for the training loop."""

from __future__ import annotations

import pathlib

import jax
from tqdm import tqdm

from jaxunet.checkpoint.state import TrainState
from jaxunet.checkpoint.store import Checkpoints
from jaxunet.config import Config
from jaxunet.data.source import Source
from jaxunet.model.unet import Params
from jaxunet.training.clock import due
from jaxunet.training.evaluation import Evaluator, is_evaluated
from jaxunet.training.outputs import UNetOutputs, samples_path
from jaxunet.training.parallel import Data
from jaxunet.training.preemption import Caller
from jaxunet.training.resume import StartingPoint, starting_point
from jaxunet.training.rollback import TooManySkippedError
from jaxunet.training.session import Session
from jaxunet.training.subject import Due, Subject


class UNetSubject(Subject):
    """A diffusion UNet in training.

    Args:
      initial: numpy state for a workdir without checkpoints; None starts with fresh weights.
      images: as for `Session`.
    """

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        source: Source,
        initial: TrainState | None,
        images: Data | None = None,
    ) -> None:
        self.config, self.workdir, self.source = config, workdir, source
        self._initial, train = initial, config.train
        self.session = Session(config, source, images)
        self._evaluator = (
            Evaluator(config, source, self.session.parallel.local_devices)
            if train.evaluate_every and jax.process_index() == 0
            else None
        )
        self.checkpoints = Checkpoints(
            workdir,
            keep=train.keep,
            keep_every=train.keep_every,
            keep_best=train.keep_best,
            scores=self._evaluator.scores_of(workdir) if self._evaluator else dict,
        )

    def start(self, failed: TooManySkippedError | None) -> StartingPoint:
        names = self.source.class_names
        return starting_point(
            self.config, self.workdir, self.checkpoints, names, self._initial, failed
        )

    def due(self, step: int) -> Due:
        train = self.config.train
        times = (train.sample_every, train.evaluate_every, train.holdout_every)
        return Due(*(due(every, step, train.steps) for every in times))

    def missing(self, step: int) -> Due:
        samples, metrics, _ = self.due(step)
        return Due(
            samples and not samples_path(self.workdir, step).exists(),
            metrics and not is_evaluated(self.workdir, step),
        )

    def weights(self, state: TrainState) -> Params:
        """Returns the average that sampling uses."""
        return state.ema[str(self.config.ema.rates[0])]

    def open_outputs(self, begin: StartingPoint, bar: tqdm, caller: Caller) -> UNetOutputs:
        return UNetOutputs(self, self._evaluator, begin, bar, caller)
