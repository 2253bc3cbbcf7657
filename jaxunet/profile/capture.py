"""Runs a config's training steps as `jaxunet.train` does, and traces some of them once they run steadily."""

from __future__ import annotations

import collections
import pathlib
import time
from dataclasses import dataclass
from typing import Any

import jax

from jaxunet.benchmark.timing import garbage_set_aside
from jaxunet.checkpoint.state import fresh_state, make_optimizer
from jaxunet.config import Config
from jaxunet.data import pipeline
from jaxunet.data.sources import Source
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import load_ops
from jaxunet.profile.events import Trace, read_trace
from jaxunet.profile.hlo import read_hlo
from jaxunet.runtime.errors import UserError
from jaxunet.training.loop import IN_FLIGHT
from jaxunet.training.parallel import Parallel
from jaxunet.training.step import make_train_step

HOST_STEP, HOST_DATA, HOST_DISPATCH, HOST_WAIT = (
    'step',
    'step: data',
    'step: dispatch',
    'step: wait for the device',
)
TIMED = 3  # how many times more steps are timed without the tracer than are traced


@dataclass(frozen=True)
class Capture:
    """A traced run.

    Fields:
      steps: how many were traced.
      step_ms: wall-clock time of a step without the tracer. traced_step_ms: the same with it.
      compile_s: seconds that compiling took.
      trace_file: the Chrome trace (gzip JSON) as jax wrote it; xplane_file: the same as protocol buffer, for XProf and TensorBoard.
    """

    trace: Trace
    steps: int
    step_ms: float
    traced_step_ms: float
    compile_s: float
    trace_file: pathlib.Path
    xplane_file: pathlib.Path


class Steps:
    """The training step of a config, compiled, with its state and data: input, optimizer and averages included.

    Raises:
      UserError: the backend is not there, the data or batch do not fit, or several steps are one call.
    """

    def __init__(self, config: Config, source: Source) -> None:
        if config.train.steps_per_call > 1:
            raise UserError(
                f'train.steps_per_call: a profile is of steps one by one, found {config.train.steps_per_call}; set it to 0 or 1'
            )
        load_ops(config.backend, config.precision)
        # No end, however short the run. Last layers that start at zero would take a GPU less power than those of a trained network.
        config = config.replace(model={'zero_init': False}, train={'steps': 10**9})
        self.parallel = Parallel(config)
        self._state = self.parallel.replicate(fresh_state(config))
        self._batches: pipeline.Stream | None = None
        if pipeline.choose_cache(config, source) == 'device':
            images, labels = pipeline.load_all(source, progress=False)
            self._data = self.parallel.replicate({'images': images, 'labels': labels})
        else:
            self._batches = pipeline.stream(source, config, 0, self.parallel.local_rows)
            self._data = self.parallel.put_batch(next(self._batches))
        model = build_unet(config, load_ops(config.backend, config.precision))
        diffusion, optimizer = make_diffusion(config.diffusion), make_optimizer(config)
        began = time.perf_counter()
        self._compiled: Any = self.parallel.compile(
            lambda axis: make_train_step(config, model, diffusion, optimizer, axis_name=axis),
            self._state,
            self._data,
        )
        self.compile_s = time.perf_counter() - began

    def hlo_text(self) -> str:
        """The compiled program."""
        return self._compiled.as_text()

    def run(self, count: int) -> float:
        """Does `count` steps, at most `IN_FLIGHT` of them queued, and waits for them; returns seconds a step."""
        queue: collections.deque[Any] = collections.deque()
        began = time.perf_counter()
        for number in range(count):
            with jax.profiler.StepTraceAnnotation(HOST_STEP, step_num=number):
                if self._batches is not None:
                    with jax.profiler.TraceAnnotation(HOST_DATA):
                        self._data = self.parallel.put_batch(next(self._batches))
                with jax.profiler.TraceAnnotation(HOST_DISPATCH):
                    self._state, metrics = self._compiled(self._state, self._data)
                queue.append(self.parallel.local(metrics))
                if len(queue) > IN_FLIGHT:
                    with jax.profiler.TraceAnnotation(HOST_WAIT):
                        int(queue.popleft()['bad_steps'])
        with jax.profiler.TraceAnnotation(HOST_WAIT):
            jax.block_until_ready(self._state)
        return (time.perf_counter() - began) / count

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def capture(
    config: Config, source: Source, folder: pathlib.Path, *, steps: int = 5, warmup: int = 5
) -> Capture:
    """Compiles, warms up, times and then traces `steps` training steps; the trace's files go to `folder`.

    Raises:
      UserError: as `Steps`, or the tracer saw nothing of the device.
    """
    with Steps(config, source) as run:
        run.run(warmup)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = (
            0  # each Python call would be an event, and slow the host down
        )
        with garbage_set_aside():
            step_s = run.run(TIMED * steps)
            with jax.profiler.trace(str(folder), profiler_options=options):
                traced_s = run.run(steps)
        text = run.hlo_text()
        compile_s = run.compile_s
    xplane, trace_file = newest(folder, '*.xplane.pb'), newest(folder, '*.trace.json.gz')
    trace = read_trace(xplane, read_hlo(text), steps)
    check(trace, xplane)
    return Capture(trace, steps, step_s * 1e3, traced_s * 1e3, compile_s, trace_file, xplane)


def check(trace: Trace, path: pathlib.Path) -> None:
    """Raises UserError if the trace shows nothing of JAX's device."""
    platform = jax.default_backend()
    if not trace.ops or (platform == 'gpu' and trace.platform != 'gpu'):
        raise UserError(
            f'{path}: the trace has no operations of the {platform} device; on NVIDIA GPUs the profiler needs CUPTI (installed with '
            'jax[cuda12] or jax[cuda13]) and the permission to use it (NVreg_RestrictProfilingToAdminUsers=0, or root)'
        )


def newest(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    """The last file of that name anywhere in the folder, where each trace has a folder of its own.

    Raises:
      UserError: there is none.
    """
    found = max(folder.rglob(pattern), key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        raise UserError(
            f'{folder}: the profiler of jax {jax.__version__} wrote no {pattern}; is the disk full?'
        )
    return found
