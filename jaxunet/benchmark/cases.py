"""The plan of a benchmark: which sides are timed, in which cases and directions.

A side is a backend of jaxunet or a peer (PyTorch). A case is a precision and a batch size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from jaxunet.benchmark.timing import Run
from jaxunet.config import PRECISIONS, Config, split_backend
from jaxunet.runtime.errors import UserError, near_misses

# forward: the loss of a batch. forward+backward: its gradients too. step: a whole training step,
# with data, gradient clipping, optimizer and averages. sample: a batch of images drawn by DDIM;
# it is timed only if --directions names it.
DIRECTIONS = ('forward', 'forward+backward', 'step', 'sample')
DEFAULT_DIRECTIONS = DIRECTIONS[:3]
# eager: as written. compiled: torch.compile. best: also channels_last, fused AdamW, and the whole
# call in one CUDA graph.
PYTORCH = ('pytorch-eager', 'pytorch-compiled', 'pytorch-best')
PEERS = {'pytorch': PYTORCH} | {name: (name,) for name in PYTORCH}


class Prepared(NamedTuple):
    """A side that is compiled for one direction and ready to be timed.

    Fields:
      run: runs a number of steps, a multiple of `unit`, and waits for the device.
      lower_s: seconds of tracing and lowering; None if compiling includes them.
      compile_s: seconds of compiling; for PyTorch, of the first calls and graph capture.
      bytes_moved: bytes that one step moves; None if unknown. `notes['bytes_source']` says how.
      peak_bytes: peak device memory; None if unknown. `notes['peak_source']` says how.
      notes: `bytes_source`, `peak_source`, and for jaxunet `ops`, the backend of every op.
      close: frees what only this direction needs.
      unit: steps of one compiled call; for `sample`, the batches that make the images asked for.
      concurrent: True if independent kernels may run at once.
      alone: for `sample`, runs the evaluations of the network that this many steps need, without
        the sampler; None for other directions.
      evaluations: for `sample`, evaluations of the network in a step.
    """

    run: Run
    lower_s: float | None
    compile_s: float
    bytes_moved: int | None
    peak_bytes: int | None
    notes: dict[str, str]
    close: Callable[[], None]
    unit: int = 1
    concurrent: bool = False
    alone: Run | None = None
    evaluations: int = 1


class Sampling(NamedTuple):
    """The images that `sample` draws, and its number of DDIM steps."""

    images: int = 2048
    steps: int = 50


class Competitor(Protocol):
    """One backend or peer in one case."""

    def prepare(self, direction: str) -> Prepared:
        """Compiles one of `DEFAULT_DIRECTIONS` and runs it once."""
        ...


class Benchmark(NamedTuple):
    """A whole benchmark.

    Fields:
      sides: names of backends and peers; ratios are to the first.
      rounds: turns of each side.
      steps: steps of one turn; None: chosen by `timing.turn_steps`.
      sampling: what the direction `sample` draws.
      lock: file that benchmarks on this GPU share (`sharing`); '' if none does.
    """

    name: str
    config: Config
    sides: tuple[str, ...]
    precisions: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    directions: tuple[str, ...]
    rounds: int
    steps: int | None
    sampling: Sampling = Sampling()
    lock: str = ''

    def cases(self) -> Iterator[tuple[str, int]]:
        """Yields (precision, batch size) in the order of the run."""
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
    sampling: Sampling = Sampling(),  # noqa: B008 (it cannot change)
    lock: str = '',
) -> Benchmark:
    """Returns the plan of these flags.

    An empty list means the config's value, or `DEFAULT_DIRECTIONS`.

    Raises:
      UserError: an unknown name, a number out of range, `steps` that are not a multiple of
        train.steps_per_call, PyTorch asked for but not installed or to draw samples, or a config
        that splits a batch over several devices or micro-batches.
    """
    backends = backends or [config.backend]
    for backend in backends:
        split_backend(backend, '--backends')
    check_names('peers', peers, PEERS)
    check_names('precisions', precisions, PRECISIONS)
    check_names('directions', directions, DIRECTIONS)
    for flag, value in (('rounds', rounds), ('steps', steps)):
        if value is not None and value < 1:
            raise UserError(f'--{flag}: expected 1 or more, found {value}')
    if steps is not None and config.train.steps_per_call and steps % config.train.steps_per_call:
        raise UserError(
            f'--steps: {steps} is not a multiple of train.steps_per_call '
            f'({config.train.steps_per_call})'
        )
    if peers and 'sample' in directions:
        raise UserError('--directions: the peers draw no samples; leave --peers or sample out')
    sizes = parse_batch_sizes(batch_sizes or [str(config.data.batch_size)])
    if peers and importlib.util.find_spec('torch') is None:
        raise UserError(
            '--peers: PyTorch is not installed; pip install "jaxunet[peers]", or leave --peers out'
        )
    return Benchmark(
        name=name,
        config=benchmark_config(config),
        sides=tuple(dict.fromkeys([*backends, *(mode for peer in peers for mode in PEERS[peer])])),
        precisions=tuple(dict.fromkeys(precisions or [config.precision])),
        batch_sizes=sizes,
        directions=tuple(d for d in DIRECTIONS if d in (directions or DEFAULT_DIRECTIONS)),
        rounds=rounds,
        steps=steps,
        sampling=sampling,
        lock=lock,
    )


def parse_batch_sizes(sizes: Sequence[str]) -> tuple[int, ...]:
    """Returns the numbers of the flag --batch_sizes, each once.

    Raises:
      UserError: there is none, or one is not a whole number of 1 or more.
    """
    for size in sizes or ['none']:
        if not size.isdecimal() or int(size) == 0:
            shown = repr(size) if sizes else size
            raise UserError(
                f'--batch_sizes: expected numbers of 1 or more separated by commas, found {shown}'
            )
    return tuple(dict.fromkeys(map(int, sizes)))


def benchmark_config(config: Config) -> Config:
    """Returns the config that is timed: one device, endless steps, random last layers.

    With last layers of zeros, as training starts, the GPU draws less power and clocks higher than
    with a trained network.

    Raises:
      UserError: the config splits a batch over several devices or micro-batches.
    """
    if config.parallel.devices > 1:
        raise UserError(
            f'parallel.devices: a benchmark runs on one device, found {config.parallel.devices}; '
            'set it to 1'
        )
    if config.optimizer.accumulate_steps > 1:
        raise UserError(
            'optimizer.accumulate_steps: a benchmark needs undivided batches (1), found '
            f'{config.optimizer.accumulate_steps}; '
            'set it to 1 and choose --batch_sizes that fit'
        )
    return config.replace(
        parallel={'devices': 1}, model={'zero_init': False}, train={'steps': 10**9}, init_from=''
    )


def check_names(flag: str, names: Sequence[str], allowed: Collection[str]) -> None:
    """Raises `UserError` if a name that a flag gives is not among the allowed ones."""
    for name in names:
        if name not in allowed:
            raise UserError(
                f'--{flag}: expected some of {", ".join(allowed)}, found '
                f'{name!r}{near_misses(name, allowed)}'
            )
