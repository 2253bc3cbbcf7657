"""Profiles steady training steps: shows where their time goes on the device and the host.

    # One backend, five steps, with overrides of the config:
    python -m jaxunet.profile --config configs/elephants64.py [--config.section.field=value ...] \\
      [--steps 5] [--top 10]
    # The operations of two backends side by side:
    python -m jaxunet.profile --config configs/elephants64.py --backends xla,pallas
    # The operations beside those of an earlier profile:
    python -m jaxunet.profile --config configs/elephants64.py --compare before/xla.csv

The steps are those of `jaxunet.train`: input, forward, backward, optimizer and averages, without
sampling and checkpoints. For each backend the command prints the device time by phase, the longest
operations (time, share, count, backend of the kernel), the kernel launches per step, the idle
share of the device, and how much of the gradient all-reduce overlaps with other work. It writes to
`OUTPUT`:

  BACKEND.csv             every operation of the device and the host
  BACKEND.trace.json.gz   a Chrome trace with the phases as tracks, for ui.perfetto.dev or
                          chrome://tracing
  BACKEND.xplane.pb       the same trace for XProf and TensorBoard
  profile.png             bar charts (needs the extra `plots`)
  profile.jsonl           one appended line per backend: commit, device, versions, config, numbers

A fusion counts towards the phase and module of its result. Kernels are counted one by one, even
when one call launches a whole CUDA graph. For kernels in a graph the trace names only the graph;
`jaxunet.profile.align` finds their instructions from the schedule of the program.
XLA_FLAGS=--xla_gpu_enable_command_buffer= turns graphs off: the phase and module of every kernel
are then exact, but the host takes more time.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Sequence

from absl import flags

from jaxunet.config import Config, cli, resolve, to_dict
from jaxunet.config.unused import check_used
from jaxunet.data.automatic import complete
from jaxunet.data.source import Source
from jaxunet.data.sources import open_images
from jaxunet.ops.backends import Kernels, choose
from jaxunet.profile import report
from jaxunet.profile.capture import Capture, capture
from jaxunet.profile.chrome import write_trace
from jaxunet.profile.summary import Summary, summarise
from jaxunet.runtime import command, compiled_cache, rows
from jaxunet.runtime.errors import printable_lines
from jaxunet.runtime.paths import of_user
from jaxunet.runtime.plots import check_plots
from jaxunet.runtime.whole_files import check_file, written
from jaxunet.training.parallel import Parallel
from jaxunet.training.workdir import check_makeable

CONFIG = cli.define_config()
STEPS = flags.DEFINE_integer('steps', 5, 'Training steps to trace.', lower_bound=1)
WARMUP = flags.DEFINE_integer(
    'warmup', 5, 'Steps before the trace, so that it shows a steady state.', lower_bound=1
)
TOP = flags.DEFINE_integer(
    'top', 10, 'Operations of device and host to print and draw.', lower_bound=1
)
BACKENDS = flags.DEFINE_list(
    'backends', [], "Backends to profile in turn, e.g. xla,pallas; default: the config's."
)
COMPARE = flags.DEFINE_string(
    'compare',
    None,
    'CSV of an earlier profile; its device operations are printed beside the new ones.',
)
OUTPUT = flags.DEFINE_string('output', 'profile', 'Folder that the files are written to.')
PLOT = flags.DEFINE_bool('plot', True, 'Draw profile.png.')
of_user(COMPARE, OUTPUT)


def main(argv: Sequence[str]) -> None:
    """Profiles every backend of the flags, and prints and draws the comparison.

    Raises:
      UserError: a wrong flag, config or earlier profile, or an error of `profile`.
    """
    config = complete(CONFIG.value)
    check_used(config)
    names = BACKENDS.value or [config.backend]
    configs = {name: resolve(to_dict(config.replace(backend=name))) for name in names}
    # Find every mistake before anything runs.
    if PLOT.value:
        check_plots()
    tables = (
        [(str(COMPARE.value), report.read_csv(pathlib.Path(COMPARE.value)))]
        if COMPARE.value
        else []
    )
    kernels = {name: choose(name, resolved.precision) for name, resolved in configs.items()}
    Parallel(config, next(iter(kernels.values())))
    output = pathlib.Path(OUTPUT.value)
    check_makeable(output, '--output')
    output.mkdir(parents=True, exist_ok=True)
    check_file(output / 'profile.jsonl', '--output')
    source = open_images(config)
    compiled_cache.enable_compilation_cache()

    profiles = [
        (name, profile(name, resolved, kernels[name], source, output))
        for name, resolved in configs.items()
    ]
    tables += [(name, summary.rows) for name, summary in profiles]
    if len(tables) > 1:
        print(printable_lines(report.side_by_side(tables, TOP.value)), end='\n\n')
    if PLOT.value:
        charts = [
            report.Chart(name, s.busy_ms, s.launches, s.phase_ms, s.rows) for name, s in profiles
        ]
        report.plot(output / 'profile.png', charts, TOP.value)
    print(f'{output}: {", ".join(sorted(path.name for path in output.iterdir()))}', flush=True)


def profile(
    name: str, config: Config, kernels: Kernels, source: Source, output: pathlib.Path
) -> Summary:
    """Profiles one backend, prints its profile and writes its files to `output`.

    Args:
      name: the backend as the flags name it; the files get this name.
      config: the resolved config with this backend.
      kernels: those of the backend.
      source: the training images.
      output: folder of the files.

    Raises:
      UserError: the backend, data or profiler does not work, or a file cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        print(f'{name}: {kernels}', flush=True)
        captured = capture(
            config, source, pathlib.Path(folder), steps=STEPS.value, warmup=WARMUP.value
        )
        summary = summarise(captured.trace, captured.steps)
        print(
            report.text(
                name,
                summary,
                step_ms=captured.step_ms,
                traced_step_ms=captured.traced_step_ms,
                top=TOP.value,
            ),
            end='\n\n',
            flush=True,
        )
        report.write_csv(output / f'{name}.csv', summary.rows)
        with written(output / f'{name}.trace.json.gz', '--output') as partial:
            write_trace(captured.trace_file, captured.trace, partial)
        with written(output / f'{name}.xplane.pb', '--output') as partial:
            shutil.copyfile(captured.xplane_file, partial)
    rows.append(output / 'profile.jsonl', row(name, config, kernels, captured, summary))
    return summary


def row(
    name: str, config: Config, kernels: Kernels, captured: Capture, summary: Summary
) -> rows.Row:
    """Returns the row of a profile in profile.jsonl."""
    numbers = {
        k: v for k, v in dataclasses.asdict(summary).items() if k not in ('rows', 'idle_share')
    }
    return {
        **rows.provenance(),
        'backend': name,
        'ops': str(kernels),
        **numbers,
        'idle_share': report.untraced_idle(summary, captured.step_ms),
        'traced_idle_share': summary.idle_share,
        'step_ms': captured.step_ms,
        'traced_step_ms': captured.traced_step_ms,
        'compile_s': captured.compile_s,
        'config': to_dict(config),
    }


if __name__ == '__main__':
    command.run(main)
