"""Decides which checkpoints are kept, and removes others that nobody reads at this moment."""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from absl import logging

from jaxunet.runtime.plain_path import opened_folder, plain_path

Scores: TypeAlias = Callable[[], Mapping[int, float]]


@dataclass(frozen=True)
class Keeping:
    """The checkpoints that a run keeps: any one of these reasons is enough.

    Attributes:
      newest: number of newest checkpoints.
      every: keep the multiples of this many steps; 0 = none.
      best: number of checkpoints with the highest scores.
      scores: returns the scores by step. They are looked up at each decision, because a checkpoint
        is evaluated only after it is saved; checkpoints without a score are not among the best.
    """

    newest: int
    every: int = 0
    best: int = 0
    scores: Scores = dict

    def kept(self, steps: Collection[int]) -> set[int]:
        """Returns the steps whose checkpoints are kept."""
        scores = self.scores()
        ranked = sorted((s for s in steps if s in scores), key=lambda s: (scores[s], s))
        return {
            *sorted(steps, reverse=True)[: self.newest],
            *(step for step in steps if self.every and step % self.every == 0),
            *ranked[::-1][: self.best],
        }


@contextlib.contextmanager
def reading(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Keeps `remove_unread` from removing a checkpoint during the block; changes nothing on disk.

    Yields the path of the checkpoint to read from (`plain_path`).

    Raises:
      OSError: there is no such folder, or it cannot be opened.
    """
    with opened_folder(folder) as descriptor:
        with contextlib.suppress(OSError):  # a file system without such locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a removal that has begun
        yield plain_path(folder, descriptor)


def remove_unread(folder: pathlib.Path) -> None:
    """Removes a checkpoint, unless a process is `reading` it; a failure is a warning."""
    try:
        with opened_folder(folder) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:  # a file system without such locks
                pass
            shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        logging.warning('%s: cannot be removed: %s', folder, error.strerror or error)
