"""GPU time of compiled programs: kernel times in a profiler trace.

The name of the compiled module identifies a program. A program of another library has none in a
trace: its kernels are those after its `marker`. Every round calls all programs in a new order.
So a drift of the clock affects all of them equally, and no program always finds its inputs in the
cache because of the program before it.
"""

from __future__ import annotations

import collections
import functools
import glob
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

MARKER = 'before_'
# No CUDA graphs: they add kernels and gaps that do not belong to the op.
COMPILER_OPTIONS = {'xla_gpu_enable_command_buffer': ''}


class Times(NamedTuple):
    """GPU time of one program, in microseconds.

    Fields:
      kernels: time per call of each kernel: the median over its launches, times its number of
        launches per call.
      calls: time of each call, all kernels together; empty if the trace lost kernels, so that calls
        cannot be told apart.
    """

    kernels: dict[str, float]
    calls: tuple[float, ...]

    @property
    def us(self) -> float:
        """Median of the calls; the sum of the kernels if calls cannot be told apart."""
        return statistics.median(self.calls) if self.calls else sum(self.kernels.values())

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of the calls."""
        low, _, high = (
            statistics.quantiles(self.calls, n=4, method='inclusive')
            if len(self.calls) > 1
            else [self.us] * 3
        )
        return low, high


def named(
    name: str, function: Callable[..., object], donated: tuple[int, ...] = ()
) -> jax.stages.Wrapped:
    """Returns `jax.jit(function)` under a name to time it by; every program needs its own name.

    Args:
      donated: indices of the arguments whose memory the results may reuse.
    """

    def call(*arguments: object) -> object:
        return function(*arguments)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, compiler_options=_compiler_options(), donate_argnums=donated)


def marker(name: str) -> Callable[[], object]:
    """Returns a function to call right before a program that JAX does not compile.

    In a trace, the kernels of no module that follow are those of the program `name`.
    """
    program, number = named(MARKER + name, lambda x: x + 1), jnp.zeros(())
    return lambda: jax.block_until_ready(program(number))


@functools.cache
def _compiler_options() -> dict[str, str] | None:
    """Returns `COMPILER_OPTIONS` if there is a GPU whose compiler knows them."""
    if jax.default_backend() != 'gpu':
        return None
    try:
        jax.jit(lambda x: x + 1, compiler_options=COMPILER_OPTIONS).lower(
            jax.ShapeDtypeStruct((), 'float32')
        ).compile()
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(f'times include what CUDA graphs add: {error}', stacklevel=3)
        return None
    return COMPILER_OPTIONS


def trace_times(
    programs: Mapping[str, Callable[[int], object]], *, rounds: int = 8
) -> dict[str, Times]:
    """Returns the GPU time of each program, by name.

    A program whose kernels do not appear in the trace is left out.

    Args:
      programs: name -> function that runs the program compiled from `named(name, ...)`, or calls
        `marker(name)`, another library, and waits for it. Its argument is the number of the call,
        to choose among sets of inputs. Each function is called once before the trace begins.
      rounds: calls of each program that are timed.
    """
    for program in programs.values():
        jax.block_until_ready(program(0))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # otherwise each Python call is an event
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for number in range(rounds):
                order = list(programs)
                random.Random(number).shuffle(order)
                for name in order:
                    jax.block_until_ready(programs[name](number))
        (path,) = glob.glob(f'{folder}/**/*.xplane.pb', recursive=True)
        return read_times(jax.profiler.ProfileData.from_file(path), programs, rounds)


def read_times(
    profile: jax.profiler.ProfileData, names: Iterable[str], calls: int
) -> dict[str, Times]:
    """Reads the times of programs, each called `calls` times, from a trace; see `trace_times`."""
    by_name: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names}
    streams = [
        line
        for plane in profile.planes
        if plane.name.startswith('/device:GPU')
        for line in plane.lines
    ]
    launched: list[tuple[float, float, str, str]] = []
    with warnings.catch_warnings():
        # Python 3.13 warns about the type of the iterator.
        warnings.simplefilter('ignore', DeprecationWarning)
        for event in (
            event for line in streams if line.name.startswith('Stream') for event in line.events
        ):
            module = next((str(value) for key, value in event.stats if key == 'hlo_module'), '')
            program = module.split('(')[0].removeprefix('jit_')
            launched.append((event.start_ns, event.duration_ns / 1e3, event.name, program))
    marked = ''
    for start, us, kernel, program in sorted(launched):
        if program:
            marked = program.removeprefix(MARKER) if program.startswith(MARKER) else ''
        if (name := program or marked) in by_name:
            by_name[name].append((start, us, kernel))
    return {name: _times(events, calls) for name, events in by_name.items() if events}


def _times(events: list[tuple[float, float, str]], calls: int) -> Times:
    events = sorted(events)
    each = len(events) // calls
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for _, us, kernel in events:
        kernels[kernel].append(us)
    whole = len(events) == each * calls and all(
        len(times) % calls == 0 for times in kernels.values()
    )
    return Times(
        {
            kernel: statistics.median(times) * len(times) / calls
            for kernel, times in kernels.items()
        },
        tuple(sum(us for _, us, _ in events[i * each : (i + 1) * each]) for i in range(calls))
        if whole
        else (),
    )
