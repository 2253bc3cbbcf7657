"""Cases of faults: one seed is one case, and says what happens when."""

from __future__ import annotations

import contextlib
import pathlib
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

from tools.faults.injected import Faults, Report
from tools.faults.world import Ended, World

# With how often a seed chooses them. Those with 0 need --kind: the kinds of recorded seeds stay.
KINDS: dict[str, tuple[int, Callable[[Faults], None]]] = {
    'killed': (12, Faults.killed),
    'sampling killed': (2, Faults.sampling_killed),
    'signalled': (2, Faults.signalled),
    'healed': (1, Faults.healed),
    'full disk': (2, Faults.full_disk),
    'read-only disk': (1, Faults.read_only_disk),
    'folder removed': (1, Faults.folder_removed),
    'clock jumped': (1, Faults.clock_jumped),
    'process killed': (1, Faults.process_killed),
    'memory full': (0, Faults.memory_full),
}
MOUNTING = ('full disk', 'read-only disk')
PAIRS = ('process killed',)  # of processes, which cannot share a GPU


def kind_of(seed: int) -> str:
    """The kind of a case."""
    weights = [weight for weight, _ in KINDS.values()]
    return random.Random(f'kind {seed}').choices([*KINDS], weights)[0]


def run_case(world: World, seed: int, kind: str | None = None) -> Report:
    """Runs a case; returns its report, with `seed`, `kind` and `seconds`.

    Args:
      kind: default: that of the seed.
    """
    kind = kind or kind_of(seed)
    with _emptied(world.folder / f'case{seed}') as folder:
        faults, began = Faults(world, seed, folder), time.monotonic()
        try:
            KINDS[kind][1](faults)
        except (Ended, subprocess.TimeoutExpired) as error:
            faults.report['unexpected'].append(f'{type(error).__name__}: {error}'[:400])
        finally:
            world.kill_all()
        seconds = round(time.monotonic() - began, 2)
    return {'seed': seed, 'kind': kind, **faults.report, 'seconds': seconds}


def failed(report: Report) -> bool:
    """Returns whether anything of a case was not as it should be."""
    return bool(
        report['lost'] or report['differences'] or report['tracebacks'] or report['unexpected']
    )


@contextlib.contextmanager
def _emptied(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
