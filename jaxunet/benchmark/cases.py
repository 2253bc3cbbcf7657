"""What a benchmark compares: sides (backends of jaxunet, and peers) in cases (precision, batch size), each in several directions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from jaxunet.benchmark.timing import Run
from jaxunet.config import PRECISIONS, Config, split_backend
from jaxunet.runtime.errors import UserError, near_misses

# The loss of a batch; its gradients too; a whole training step with data, gradient clipping, optimizer and average.
DIRECTIONS = ('forward', 'forward+backward', 'step')
# eager: as written. compiled: torch.compile. best: also channels_last, fused AdamW, and the whole call in one CUDA graph.
PYTORCH = ('pytorch-eager', 'pytorch-compiled', 'pytorch-best')
PEERS = {'pytorch': PYTORCH} | {name: (name,) for name in PYTORCH}


class Prepared(NamedTuple):
    """A side that is ready to be timed in one direction, and what is known of it without timing."""

    run: Run
    lower_s: (
        float | None
    )  # seconds of tracing and lowering; None where it cannot be told apart from compiling
    compile_s: (
        float  # seconds of compiling (for PyTorch: of the first calls, graph capture included)
    )
    bytes_moved: int | None  # of one step, see `bytes_source`; None: not known
    peak_bytes: int | None  # of device memory, see `peak_source`; None: not known
    notes: dict[
        str, str
    ]  # bytes_source, peak_source, and for jaxunet ops: which backend every op got
    close: Callable[[], None]  # gives back what only this direction needs
    unit: int = 1  # steps of one call, of which `run` takes multiples
    concurrent: bool = False  # whether kernels run at once where none waits for another


class Side(Protocol):
    """One backend or peer in one case."""

    def prepare(self, direction: str) -> Prepared:
        """Compiles one of `DIRECTIONS` and runs it once."""
        ...


class Plan(NamedTuple):
    """A whole run. `sides` are names of backends and peers; ratios are to the first."""

    name: str
    config: Config
    sides: tuple[str, ...]
    precisions: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    directions: tuple[str, ...]
    rounds: int
    steps: int | None  # None: as `timing.turn_steps` says

    def cases(self) -> Iterator[tuple[str, int]]:
        """(precision, batch size) in the order of the run."""
        for precision in self.precisions:
            for size in self.batch_sizes:
                yield precision, size


def make_plan(
    name: str,
    config: Config,
    *,
    backends: list[str],
    peers: list[str],
    precisions: list[str],
    batch_sizes: list[str],
    directions: list[str],
    rounds: int,
    steps: int | None,
) -> Plan:
    """The plan of these flags; empty lists stand for the config's own value, of directions for all.

    Raises:
      UserError: an unknown name, a number out of range, steps that are no multiple of train.steps_per_call, PyTorch asked for and not
        installed, or a config that spreads a batch over several devices or micro-batches.
    """
    backends = backends or [config.backend]
    for backend in backends:
        split_backend(backend, '--backends')
    _check('peers', peers, tuple(PEERS))
    _check('precisions', precisions, PRECISIONS)
    _check('directions', directions, DIRECTIONS)
    for flag, value in (('rounds', rounds), ('steps', steps)):
        if value is not None and value < 1:
            raise UserError(f'--{flag}: expected 1 or more, found {value}')
    if steps is not None and config.train.steps_per_call and steps % config.train.steps_per_call:
        raise UserError(
            f'--steps: {steps} is not a multiple of train.steps_per_call ({config.train.steps_per_call})'
        )
    for size in batch_sizes:
        if not size.isdecimal() or int(size) == 0:
            raise UserError(
                f'--batch_sizes: expected numbers of 1 or more separated by commas, found {size!r}'
            )
    if peers and importlib.util.find_spec('torch') is None:
        raise UserError(
            '--peers: PyTorch is not installed; pip install "jaxunet[peers]", or leave --peers out'
        )
    return Plan(
        name=name,
        config=benchmark_config(config),
        sides=tuple(dict.fromkeys([*backends, *(mode for peer in peers for mode in PEERS[peer])])),
        precisions=tuple(dict.fromkeys(precisions or [config.precision])),
        batch_sizes=tuple(dict.fromkeys(map(int, batch_sizes or [str(config.data.batch_size)]))),
        directions=tuple(d for d in DIRECTIONS if not directions or d in directions),
        rounds=rounds,
        steps=steps,
    )


def benchmark_config(config: Config) -> Config:
    """The config that is timed: one device, endless, and random weights in the last layers too.

    Those layers start at zero otherwise, and a network of zeros takes a GPU less power, so it clocks higher than a trained one.

    Raises:
      UserError: the config spreads a batch over several devices or micro-batches.
    """
    if config.parallel.devices > 1:
        raise UserError(
            f'parallel.devices: a benchmark runs on one device, found {config.parallel.devices}; set it to 1'
        )
    if config.optimizer.accumulate_steps > 1:
        raise UserError(
            f'optimizer.accumulate_steps: a benchmark needs undivided batches (1), found {config.optimizer.accumulate_steps}; '
            'set it to 1 and choose --batch_sizes that fit'
        )
    return config.replace(
        parallel={'devices': 1}, model={'zero_init': False}, train={'steps': 10**9}, init_from=''
    )


def _check(flag: str, found: list[str], allowed: tuple[str, ...]) -> None:
    for name in found:
        if name not in allowed:
            raise UserError(
                f'--{flag}: expected some of {", ".join(allowed)}, found {name!r}{near_misses(name, allowed)}'
            )
