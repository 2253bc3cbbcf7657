"""The interface of loggers: what a run tells them, and when."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxunet.config import Config, by_path
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import shown_path
from jaxunet.runtime.whole_files import replacing


@dataclass(frozen=True)
class RunStart:
    """The start of a run, or of a part of it.

    Fields:
      workdir: folder of the run. What a logger needs to go on with the same run lies there.
      step: the step that it starts from; later steps, which a killed run may have logged, follow
        once more.
      columns: names of the values that are logged with a step, in the order of metrics.csv.
      optional: further names that earlier steps of the run may have.
    """

    config: Config
    workdir: pathlib.Path
    step: int
    columns: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, object]:
        """The fields of the config by their paths, such as data.path; URLs without passwords."""
        return {
            path: shown_path(value) if isinstance(value, str) else value
            for path, value in by_path(self.config).items()
        }

    def kept_name(self, file: str) -> str:
        """Returns the line in a file of the workdir; '' if there is none."""
        try:
            return (self.workdir / file).read_text(encoding='utf-8').strip()
        except FileNotFoundError:
            return ''

    def keep_name(self, file: str, name: str) -> None:
        """Writes a line to a file of the workdir, for `kept_name` of a later start."""
        with replacing(self.workdir / file) as partial:
            partial.write_text(f'{name}\n', encoding='utf-8')


class Logger:
    """Takes what a run logs; process 0 makes one without arguments.

    Each method does nothing unless a subclass overrides it. An exception is reported once, and does
    not end the run.

    Attributes:
      in_loop: the training loop calls the methods itself, which must then return at once and handle
        their own errors. Otherwise a thread calls them, beside the steps.

    Raises:
      UserError: a package or a setting is missing.
    """

    in_loop = False

    def start(self, run: RunStart) -> None:
        """Begins, or goes on with, the log of a run; called before all other methods."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Takes values after a step by the names of their curves.

        Names begin with `train/` or `held_out/` every `train.log_every` steps, and with
        `evaluation/` after an evaluation.
        """

    def image(self, step: int, name: str, picture: np.ndarray) -> None:
        """Takes a grid of samples: uint8 (height, width, channels)."""

    def table(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Takes a whole table of results at the end of the run."""

    def close(self) -> None:
        """Ends the log, or this part of it."""


def imported(package: str) -> Any:
    """Returns the package of an extra of the same name.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f'cannot be imported ({error}); pip install "jaxunet[{package}]", or leave it out'
        ) from None
