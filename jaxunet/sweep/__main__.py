"""Measures the training step over a grid of configs and reports the effect of each option.

    python -m jaxunet.sweep --config configs/elephants64.py --vary precision=float32,bfloat16 \\
      --vary data.batch_size=32,64,128
    python -m jaxunet.sweep --config configs/elephants64.py --preset devices_batch \\
      [--vary parallel.devices=1,2]
    python -m jaxunet.sweep --config configs/elephants64.py --preset study \\
      --config.parallel.devices=1
    python -m jaxunet.sweep --output runs/sweep --plot_only

`--vary` takes any field of the config, and also `jit=on,off` and `batch_per_device=32,64`. Every
combination of values is a point, and runs in its own process: a point that crashes, hangs
(--timeout) or runs out of memory becomes a row with the reason. The steps are those of
`jaxunet.train`, input included, without sampling and checkpoints. Compile time is a separate
column; set JAX_ENABLE_COMPILATION_CACHE=false to compile everything again. Without a GPU, XLA's
--xla_force_host_platform_device_count emulates several devices on the same cores.

The same command resumes an interrupted sweep and measures nothing twice. It writes to `OUTPUT`:

  results.jsonl   one line per point: numbers, config, commit, device, versions
  results.csv     the same as a table
  AXIS.png        one plot per axis, or operations.png for profiles (needs the extra `plots`)
  report.md       the report
  logs/           the output of each point's process, below the command that repeats it

`--preset study` runs several presets in turn, each in its own folder in OUTPUT, and writes one
report of them all.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from jaxunet.config import Config, cli, resolve
from jaxunet.config.unused import check_used
from jaxunet.data.automatic import complete
from jaxunet.data.sources import images_key, open_images
from jaxunet.runtime import command
from jaxunet.runtime.errors import UserError, printable_lines
from jaxunet.runtime.interrupt import interrupt_when_terminated
from jaxunet.runtime.paths import of_user
from jaxunet.runtime.plots import check_plots
from jaxunet.runtime.rows import Row
from jaxunet.runtime.whole_files import check_file
from jaxunet.sweep import folder, parts, report, runner
from jaxunet.sweep.points import Axis, Machine, Point, expand, merge, parse_axes
from jaxunet.sweep.presets import PRESETS, STUDY, STUDY_PARTS

CONFIG = cli.define_config()
VARY = flags.DEFINE_multi_string(
    'vary', [], 'An axis of the grid, NAME=VALUE,VALUE,...; the first value is the baseline.'
)
PRESET = flags.DEFINE_enum(
    'preset',
    None,
    [*PRESETS, STUDY],
    'A predefined sweep; --vary replaces its axes or adds new ones. study: several in one report, '
    'where --vary replaces axes.',
)
OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder of results and report; default: runs/sweep, or runs/sweep_PRESET.'
)
STEPS = flags.DEFINE_integer(
    'steps', None, "Timed steps of each point; default: the preset's, or 100.", lower_bound=1
)
WARMUP = flags.DEFINE_integer(
    'warmup', None, "Steps before the timed ones; default: the preset's, or 10.", lower_bound=1
)
MAX_SECONDS = flags.DEFINE_float(
    'max_seconds',
    60.0,
    'Time limit of the timed steps of a point; at least 5 calls of the compiled step are timed.',
    lower_bound=0.0,
)
TIMEOUT = flags.DEFINE_float(
    'timeout', 900.0, 'Seconds after which the process of a point is killed.', lower_bound=0.1
)
RETRY_FAILED = flags.DEFINE_bool('retry_failed', False, 'Run failed points again.')
SIDE_BY_SIDE = flags.DEFINE_bool(
    'side_by_side',
    False,
    'Run points that need only some of the GPUs at the same time, each on its own GPUs. They share '
    'the host: do not use this to measure the host, as with data.num_workers.',
)
PLOT_ONLY = flags.DEFINE_bool(
    'plot_only', False, 'Write the report of the results in OUTPUT without running anything.'
)
PLOT = flags.DEFINE_bool('plot', True, 'Draw the plots.')
of_user(OUTPUT)


@dataclasses.dataclass(frozen=True)
class CheckedSweep:
    """One sweep, checked and ready to run.

    Fields:
      directory: the folder of its results.
      points: the points of its grid.
      options: options of the measurement.
      spec: its description, as `folder.save` takes it.
    """

    directory: pathlib.Path
    points: list[Point]
    options: runner.Options
    spec: Row


def main(argv: Sequence[str]) -> None:
    """Runs the sweep of the flags, unless `--plot_only`; writes and prints its report."""
    directory = pathlib.Path(
        OUTPUT.value or f'runs/sweep{"_" + PRESET.value if PRESET.value else ""}'
    )
    if PLOT.value:
        check_plots()
    if not PLOT_ONLY.value:
        # A point must not outlive the sweep.
        interrupt_when_terminated()
        try:
            measure(directory)
        except KeyboardInterrupt:
            raise KeyboardInterrupt('stopped; the same command goes on from here') from None
    if PRESET.value == STUDY:
        text, paths = parts.write(directory, STUDY_PARTS, plot=PLOT.value)
    else:
        sweep = folder.load(directory)
        paths = report.write(sweep, directory, plot=PLOT.value)
        text = report.markdown(sweep, [], directory)
    print(f'\n{printable_lines(text)}\n{", ".join(map(str, paths))}', flush=True)


def measure(directory: pathlib.Path) -> None:
    """Runs the grids of the flags and writes their results to the folder.

    Raises:
      UserError: a flag, the config or the data is wrong, or the results cannot be written.
    """
    given = parse_axes(VARY.value)
    if PRESET.value == STUDY:
        parts.check_axes(given, STUDY_PARTS)
    config, machine = complete(CONFIG.value), runner.probe()
    if PRESET.value == STUDY:
        sweeps = [checked(config, machine, given, part, directory / part) for part in STUDY_PARTS]
    else:
        sweeps = [checked(config, machine, given, PRESET.value, directory)]
    for each in sweeps:
        check_file(each.directory / runner.RESULTS, '--output')

    def say(line: str) -> None:
        print(line, flush=True)

    for each in sweeps:
        folder.save(each.directory, each.spec)
        if len(sweeps) > 1:
            print(f'\n{each.spec["title"]}', flush=True)
        for note in each.spec['notes']:
            print(f'note: {note}')
        runner.Runner(each.directory, each.options, machine, say).run(each.points)


def checked(
    config: Config,
    machine: Machine,
    given: Sequence[Axis],
    name: str | None,
    directory: pathlib.Path,
) -> CheckedSweep:
    """Returns one of the sweeps that the flags ask for.

    Args:
      given: the axes of --vary.
      name: name of the preset; None = --vary alone.

    Raises:
      UserError: an axis or the data is wrong.
    """
    preset = PRESETS[name] if name else None
    usual = parse_axes(preset.axes if preset else ())
    if PRESET.value == STUDY:
        given = [axis for axis in given if axis.name in {one.name for one in usual}]
    axes = merge(usual, given)
    options = runner.Options(
        steps=STEPS.value or (preset or runner.Options).steps,
        warmup=WARMUP.value or (preset or runner.Options).warmup,
        max_seconds=MAX_SECONDS.value,
        timeout=TIMEOUT.value,
        retry_failed=RETRY_FAILED.value,
        side_by_side=SIDE_BY_SIDE.value,
        tool=preset.tool if preset else runner.STEP,
    )
    points, notes = expand(config, axes, machine)
    if options.tool == runner.PROFILE:
        check_profiled(points)
    check_data(points)
    measured = runner.latest_rows(directory)
    keys = [runner.key(point, options, machine) for point in points]
    can_run = {key: p.config for p, key in zip(points, keys, strict=True) if not p.problem}
    check_used(*can_run.values(), earlier=[can_run[key] for key in can_run if key in measured])
    spec = {
        'title': f'Sweep: {name}. {preset.question}'
        if preset
        else 'Sweep of ' + ', '.join(axis.name for axis in axes),
        'command': shlex.join(folder.config_arguments(sys.argv[1:])),
        'axes': [dataclasses.asdict(axis) for axis in axes],
        'keys': keys,
        'notes': notes,
    }
    return CheckedSweep(directory, points, options, spec)


def check_profiled(points: Sequence[Point]) -> None:
    """Raises UserError if a point runs steps that `jaxunet.profile` cannot trace."""
    if not all(point.jit for point in points):
        raise UserError(
            f'--vary jit: --preset {PRESET.value} traces compiled steps, so jit=off has no '
            'meaning; leave jit out'
        )
    if any(not p.problem and resolve(p.raw).train.steps_per_call > 1 for p in points):
        raise UserError(
            f'train.steps_per_call: --preset {PRESET.value} traces steps one by one; set it to 0 '
            'or 1'
        )


def check_data(points: Sequence[Point]) -> None:
    """Opens the images of every point that can run, to find a wrong path before the first run.

    Raises:
      UserError: the data of a point cannot be read.
    """
    seen: set[tuple[object, ...]] = set()
    for point in points:
        if point.problem:
            continue
        config: Config = point.config
        images = images_key(config)
        if images not in seen:
            seen.add(images)
            open_images(config)


if __name__ == '__main__':
    command.run(main)
