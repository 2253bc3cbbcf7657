"""Runs training steps as `jaxunet.train` does, and traces some of them in the steady state."""

from __future__ import annotations

import collections
import pathlib
import time
from dataclasses import dataclass

import jax
import numpy as np

from jaxunet.config import Config
from jaxunet.data.source import Source
from jaxunet.profile.events import Trace, read_trace
from jaxunet.profile.hlo import read_hlo
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.garbage import garbage_set_aside
from jaxunet.training.session import Session
from jaxunet.training.step import Metrics

# Names in the trace of what the host does in a step.
HOST_STEP = 'step'
HOST_DATA = 'step: data'
HOST_DISPATCH = 'step: dispatch'
HOST_WAIT = 'step: wait for the device'
TIMED_PER_TRACED = 3  # steps timed without the tracer for each traced step


@dataclass(frozen=True)
class Capture:
    """A traced run.

    Fields:
      trace: the operations and events of the traced steps.
      steps: number of traced steps.
      step_ms: wall-clock milliseconds per step without the tracer.
      traced_step_ms: the same with the tracer.
      compile_s: seconds of compiling.
      hlo: the compiled program (`compiled.as_text()`).
      trace_file: the Chrome trace (gzip JSON) as JAX wrote it.
      xplane_file: the same trace as protocol buffer, for XProf and TensorBoard.
    """

    trace: Trace
    steps: int
    step_ms: float
    traced_step_ms: float
    compile_s: float
    hlo: str
    trace_file: pathlib.Path
    xplane_file: pathlib.Path


def single_steps(config: Config, source: Source) -> Session:
    """Returns a session of random weights whose calls run one step each, without end.

    Raises:
      UserError: the backend is missing, the data or batch do not fit, or `train.steps_per_call` is
        larger than 1.
    """
    if config.train.steps_per_call > 1:
        raise UserError(
            'train.steps_per_call: a profile is of steps one by one, found '
            f'{config.train.steps_per_call}; set it to 0 or 1'
        )
    # A profile may need more steps than a short run has, and steps_per_call=0 may choose more than
    # one.
    session = Session(config.replace(train={'steps': 10**9, 'steps_per_call': 1}), source)
    session.load_random()
    session.open_stream()
    return session


def run(session: Session, count: int) -> float:
    """Runs `count` steps with as many queued as in training, and waits for all of them.

    Returns the seconds per step.
    """
    data = session.data
    queue: collections.deque[Metrics] = collections.deque()
    began = time.perf_counter()
    for number in range(count):
        with jax.profiler.StepTraceAnnotation(HOST_STEP, step_num=number):
            if not session.resident:
                with jax.profiler.TraceAnnotation(HOST_DATA):
                    data = session.next_data()
            with jax.profiler.TraceAnnotation(HOST_DISPATCH):
                metrics = session.call(data)
            queue.append(session.parallel.shards(metrics))
            if len(queue) > session.calls_ahead:
                with jax.profiler.TraceAnnotation(HOST_WAIT):
                    int(np.ravel(queue.popleft()['bad_steps'])[0])
    with jax.profiler.TraceAnnotation(HOST_WAIT):
        jax.block_until_ready(session.state)
    return (time.perf_counter() - began) / count


def capture(
    config: Config, source: Source, folder: pathlib.Path, *, steps: int = 5, warmup: int = 5
) -> Capture:
    """Compiles the training step, warms up, times it, and then traces `steps` steps.

    Args:
      folder: gets the files of the trace.

    Raises:
      UserError: an error of `single_steps`, or the trace has no operations of the device.
    """
    with single_steps(config, source) as session:
        began = time.perf_counter()
        compiled = session.compile()
        compile_s = time.perf_counter() - began
        run(session, warmup)
        options = jax.profiler.ProfileOptions()
        # Otherwise each Python call would be an event, which slows the host down.
        options.python_tracer_level = 0
        with garbage_set_aside():
            step_s = run(session, TIMED_PER_TRACED * steps)
            with jax.profiler.trace(str(folder), profiler_options=options):
                traced_s = run(session, steps)
    text = compiled.as_text()
    assert text is not None
    xplane, trace_file = newest(folder, '*.xplane.pb'), newest(folder, '*.trace.json.gz')
    trace = read_trace(xplane, read_hlo(text), steps)
    check(trace, xplane)
    return Capture(trace, steps, step_s * 1e3, traced_s * 1e3, compile_s, text, trace_file, xplane)


def check(trace: Trace, path: pathlib.Path) -> None:
    """Checks that the trace shows JAX's device.

    Raises:
      UserError: it has no operations of the device.
    """
    platform = jax.default_backend()
    if not trace.ops or (platform == 'gpu' and trace.platform != 'gpu'):
        raise UserError(
            f'{path}: the trace has no operations of the {platform} device; on NVIDIA GPUs the '
            'profiler needs CUPTI (installed with jax[cuda12] or jax[cuda13]) and permission to '
            'use it (NVreg_RestrictProfilingToAdminUsers=0, or root)'
        )


def newest(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    """Returns the newest file whose name matches `pattern`, at any depth of `folder`.

    Raises:
      UserError: there is no such file.
    """
    latest = max(folder.rglob(pattern), key=lambda path: path.stat().st_mtime, default=None)
    if latest is None:
        raise UserError(
            f'{folder}: the profiler of jax {jax.__version__} wrote no {pattern}; is the disk full?'
        )
    return latest
