"""The questions of the training loop to a network: where its run starts, and what it writes."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tqdm import tqdm

from jaxunet.checkpoint.state import TrainState
from jaxunet.checkpoint.store import Checkpoints
from jaxunet.config import Config
from jaxunet.data.source import Source
from jaxunet.model.unet import Params
from jaxunet.training.preemption import Caller
from jaxunet.training.resume import StartingPoint
from jaxunet.training.rollback import TooManySkippedError
from jaxunet.training.session import Session
from jaxunet.training.step import Metrics


class Due(NamedTuple):
    """The outputs of a step that are due; all False for most steps."""

    samples: bool = False
    metrics: bool = False
    held_out: bool = False


class Outputs(Protocol):
    """Writes what a run produces beside its checkpoints, on process 0."""

    def start_compiling(self) -> None:
        """Compiles what runs between steps; called once the training step is compiled."""
        return

    def measure_held_out(self, step: int, weights: Params) -> None:
        """Measures the held-out images, for the log of this step."""

    def log(
        self, step: int, metrics: Metrics, seconds_per_step: float, training_seconds: float
    ) -> None:
        """Writes the metrics of one step."""

    def before_checkpoint(self, state: Callable[[], TrainState]) -> None:
        """Writes what lies beside a checkpoint; `state` returns its numpy arrays."""
        return

    def show(self, step: int, due: Due, weights: Params, training_seconds: float) -> None:
        """Draws and measures the samples that are due after this step."""
        return

    def check(self) -> None:
        """Raises the error of an output without which the run is not complete."""
        return

    def close(self) -> None:
        """Tries once more to write what a full disk refused."""


class Subject(Protocol):
    """A network in training, as the loop sees it.

    Attributes:
      config: of the run.
      workdir: folder of the run.
      source: the training images.
      session: runs its steps.
      checkpoints: those of the workdir.
    """

    config: Config
    workdir: pathlib.Path
    source: Source
    session: Session
    checkpoints: Checkpoints

    def start(self, failed: TooManySkippedError | None) -> StartingPoint:
        """Returns where the run starts; `failed` as in `starting_point`."""

    def due(self, step: int) -> Due:
        """Returns the outputs that are due after a step, the same on all processes."""

    def missing(self, step: int) -> Due:
        """Returns the outputs that a run lacks if it died between a step's checkpoint and them."""
        return Due()

    def finish(self, begin: StartingPoint) -> None:
        """Writes again what a run that has no steps left may lack."""
        return

    def weights(self, state: TrainState) -> Params:
        """Returns those weights of a state that are measured and drawn from."""

    def open_outputs(self, begin: StartingPoint, bar: tqdm, caller: Caller) -> Outputs:
        """Opens the outputs of a run; lines for the user go above the bar."""
