"""Profiles steady training steps: where the time of a step goes, on the device and on the host.

    python -m jaxunet.profile --config configs/elephants64.py [--config.section.field=value ...] [--steps 5] [--top 10]
    python -m jaxunet.profile --config configs/elephants64.py --backends xla,pallas        # the operations side by side
    python -m jaxunet.profile --config configs/elephants64.py --compare before/xla.csv     # beside an earlier profile

Steps are those of `jaxunet.train`: input, forward, backward, optimizer and averages; sampling and checkpoints are left out. Prints, per
backend, the device time by phase, the operations that took the longest (with time, share, count and the backend that wrote the kernel),
kernel launches a step, the device's idle share and how much of the gradient all-reduce other work hides. `OUTPUT` gets

  BACKEND.csv             every operation of device and host
  BACKEND.trace.json.gz   a Chrome trace with the phases as tracks: open it in ui.perfetto.dev or chrome://tracing
  BACKEND.xplane.pb       the same for XProf and TensorBoard
  profile.png             bar charts (needs the extra `plots`)
  profile.jsonl           one more line a backend: commit, device, versions, config, and the numbers above

An operation made of several (a fusion) counts for the phase and module of its result. A GPU's kernels are counted one by one also where
one call launches a whole CUDA graph of them; the trace then names the graph only, and a kernel's place is found from the program's schedule
(`jaxunet.profile.align`). With XLA_FLAGS=--xla_gpu_enable_command_buffer= there are no graphs: exact places, but more time on the host.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Sequence

from absl import flags

from jaxunet.config import Config, cli, resolve, to_dict
from jaxunet.data.source import Source
from jaxunet.data.sources import open_images
from jaxunet.ops.backends import describe, load_ops
from jaxunet.profile import report
from jaxunet.profile.capture import Capture, capture
from jaxunet.profile.chrome import write_trace
from jaxunet.profile.summary import Summary, summarise
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError
from jaxunet.training.parallel import Parallel

CONFIG = cli.define_config()
STEPS = flags.DEFINE_integer('steps', 5, 'Training steps to trace.', lower_bound=1)
WARMUP = flags.DEFINE_integer(
    'warmup', 5, 'Steps before, so that what is traced runs steadily.', lower_bound=1
)
TOP = flags.DEFINE_integer(
    'top', 10, 'How many operations of device and host to print and draw.', lower_bound=1
)
BACKENDS = flags.DEFINE_list(
    'backends',
    [],
    "Backends to profile one after the other, e.g. xla,pallas; default: the config's.",
)
COMPARE = flags.DEFINE_string(
    'compare',
    None,
    'A CSV of an earlier profile, whose device operations are printed beside the new ones.',
)
OUTPUT = flags.DEFINE_string('output', 'profile', 'Folder for the files.')
PLOT = flags.DEFINE_bool('plot', True, 'Draw profile.png.')


def main(argv: Sequence[str]) -> None:
    config = resolve(CONFIG.value)
    names = BACKENDS.value or [config.backend]
    configs = [
        (name, resolve(to_dict(config.replace(backend=name)))) for name in dict.fromkeys(names)
    ]
    # All that can be wrong is found before anything runs.
    if PLOT.value:
        report.check_plots()
    tables = (
        [(str(COMPARE.value), report.read_csv(pathlib.Path(COMPARE.value)))]
        if COMPARE.value
        else []
    )
    for name, resolved in configs:
        load_ops(name, resolved.precision)
    Parallel(config)
    output = pathlib.Path(OUTPUT.value)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'--output: {output} cannot be made: {error.strerror or error}') from None
    source = open_images(config)
    cli.enable_compilation_cache()

    profiles = []
    for name, one in configs:
        summary = profile(name, one, source, output)
        profiles.append((name, summary))
    tables += [(name, summary.rows) for name, summary in profiles]
    if len(tables) > 1:
        print(report.side_by_side(tables, TOP.value), end='\n\n')
    if PLOT.value:
        charts = [
            report.Chart(name, s.busy_ms, s.launches, s.phase_ms, s.rows) for name, s in profiles
        ]
        report.plot(output / 'profile.png', charts, TOP.value)
    print(f'{output}: {", ".join(sorted(path.name for path in output.iterdir()))}', flush=True)


def profile(name: str, config: Config, source: Source, output: pathlib.Path) -> Summary:
    """Profiles one backend, prints what came out and writes its files, which are named after it.

    Raises:
      UserError: the backend, data or profiler does not work, or a file cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        print(f'{name}: {describe(config.backend, config.precision)}', flush=True)
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
        try:
            report.write_csv(output / f'{name}.csv', summary.rows)
            write_trace(captured.trace_file, captured.trace, output / f'{name}.trace.json.gz')
            shutil.copyfile(captured.xplane_file, output / f'{name}.xplane.pb')
        except OSError as error:
            raise UserError(
                f'--output: {error.filename or output} cannot be written: {error.strerror or error}'
            ) from None
    rows.append(output / 'profile.jsonl', row(name, config, captured, summary))
    return summary


def row(name: str, config: Config, captured: Capture, summary: Summary) -> rows.Row:
    """The JSON line of a profile."""
    numbers = {
        k: v for k, v in dataclasses.asdict(summary).items() if k not in ('rows', 'idle_share')
    }
    return {
        **rows.provenance(),
        'backend': name,
        'ops': describe(config.backend, config.precision),
        **numbers,
        'idle_share': report.untraced_idle(summary, captured.step_ms),
        'traced_idle_share': summary.idle_share,
        'step_ms': captured.step_ms,
        'traced_step_ms': captured.traced_step_ms,
        'compile_s': captured.compile_s,
        'config': to_dict(config),
    }


if __name__ == '__main__':
    cli.run(main)
