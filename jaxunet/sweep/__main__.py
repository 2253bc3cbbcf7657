"""Measures the training step over a grid of configs, and tells what each option is worth.

    python -m jaxunet.sweep --config configs/elephants64.py --vary precision=float32,bfloat16 --vary data.batch_size=32,64,128
    python -m jaxunet.sweep --config configs/elephants64.py --preset devices_batch [--vary parallel.devices=1,2]
    python -m jaxunet.sweep --output runs/sweep --plot_only

`--vary` takes any field of the config, and `jit=on,off` and `batch_per_device=32,64` besides. Every point runs in a process of its own:
one that crashes, hangs (--timeout) or runs out of memory is a row with its reason. Steps are those of `jaxunet.train`, input included,
sampling and checkpoints left out. Compiling is told apart; set JAX_ENABLE_COMPILATION_CACHE=false to compile anew. On a machine without
GPU, a point of several devices gets them from XLA's --xla_force_host_platform_device_count, on the same cores.

The same command again goes on where it was, and measures nothing twice. `OUTPUT` gets

  results.jsonl   one line a point: numbers, config, commit, device, versions
  results.csv, AXIS.png, report.md      the table, a plot an axis (needs the extra `plots`; operations.png of profiles), and the report
  logs/           what each point's process printed, after the command that repeats it
"""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from jaxunet.config import Config, cli, resolve
from jaxunet.data.sources import open_images
from jaxunet.runtime.errors import UserError
from jaxunet.sweep import folder, report, runner
from jaxunet.sweep.points import Point, expand, merge, parse_axes
from jaxunet.sweep.presets import PRESETS

CONFIG = cli.define_config()
VARY = flags.DEFINE_multi_string(
    'vary', [], 'NAME=VALUE,VALUE,...: an axis of the grid; the first value is the baseline.'
)
PRESET = flags.DEFINE_enum(
    'preset', None, list(PRESETS), 'A ready sweep; --vary replaces its axes, or adds some.'
)
OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder for results and report; default: runs/sweep, or runs/sweep_PRESET.'
)
STEPS = flags.DEFINE_integer(
    'steps',
    None,
    'Steps to time at every point; default: 100, or what the preset says.',
    lower_bound=1,
)
WARMUP = flags.DEFINE_integer(
    'warmup', None, 'Steps before them; default: 10, or what the preset says.', lower_bound=1
)
MAX_SECONDS = flags.DEFINE_float(
    'max_seconds',
    60.0,
    'End the timed steps of a point after this (5 calls of the compiled step at least).',
    lower_bound=0.0,
)
TIMEOUT = flags.DEFINE_float(
    'timeout', 900.0, 'Seconds after which the process of a point is ended.', lower_bound=0.1
)
RETRY_FAILED = flags.DEFINE_bool('retry_failed', False, 'Run points again that failed before.')
COMPILE_JOBS = flags.DEFINE_integer(
    'compile_jobs',
    0,
    'First compile all points into the compilation cache, so many at a time; their compile times then show as cached. On a GPU the '
    'compiler picks kernels by timing them, which neighbours disturb: leave it at 0 for numbers to rely on.',
    lower_bound=0,
)
SIDE_BY_SIDE = flags.DEFINE_bool(
    'side_by_side',
    False,
    'Points of fewer GPUs than the machine has run beside each other, each on GPUs of its own. They share the host: leave it out '
    'where that is what you measure, as for data.num_workers.',
)
PLOT_ONLY = flags.DEFINE_bool(
    'plot_only', False, 'Write the report of what OUTPUT holds, without running anything.'
)
PLOT = flags.DEFINE_bool('plot', True, 'Draw the plots.')


def main(argv: Sequence[str]) -> None:
    directory = pathlib.Path(
        OUTPUT.value or f'runs/sweep{"_" + PRESET.value if PRESET.value else ""}'
    )
    if PLOT.value:
        report.check_plots()
    if not PLOT_ONLY.value:
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # a point must not outlive the sweep
        try:
            measure(directory)
        except KeyboardInterrupt:
            print('\nstopped; the same command goes on from here', file=sys.stderr, flush=True)
            sys.exit(130)
    sweep = folder.load(directory)
    paths = report.write(sweep, directory, plot=PLOT.value)
    text = report.markdown(sweep, [], directory)
    print(f'\n{text}\n{", ".join(map(str, paths))}', flush=True)


def measure(directory: pathlib.Path) -> None:
    """Runs the grid that the flags describe."""
    config = resolve(CONFIG.value)
    preset = PRESETS[PRESET.value] if PRESET.value else None
    axes = merge(parse_axes(preset.axes if preset else ()), parse_axes(VARY.value))
    options = runner.Options(
        steps=STEPS.value or (preset or runner.Options).steps,
        warmup=WARMUP.value or (preset or runner.Options).warmup,
        max_seconds=MAX_SECONDS.value,
        timeout=TIMEOUT.value,
        compile_jobs=COMPILE_JOBS.value,
        retry_failed=RETRY_FAILED.value,
        side_by_side=SIDE_BY_SIDE.value,
        tool=preset.tool if preset else runner.STEP,
    )
    machine = runner.probe()
    points, notes = expand(config, axes, machine)
    if options.tool == runner.PROFILE and not all(point.jit for point in points):
        raise UserError(
            f'--vary jit: --preset {PRESET.value} traces compiled steps, so off has no meaning; leave jit out'
        )
    if options.tool == runner.PROFILE and any(
        not p.problem and resolve(p.raw).train.steps_per_call > 1 for p in points
    ):
        raise UserError(
            f'train.steps_per_call: --preset {PRESET.value} traces steps one by one; set it to 0 or 1'
        )
    check_data(points)
    for note in notes:
        print(f'note: {note}')
    spec = {
        'title': f'Sweep: {PRESET.value}. {preset.question}'
        if preset
        else 'Sweep of ' + ', '.join(axis.name for axis in axes),
        'command': shlex.join(folder.config_arguments(sys.argv[1:])),
        'axes': [dataclasses.asdict(axis) for axis in axes],
        'keys': [runner.key(point, options, machine) for point in points],
        'notes': notes,
    }
    folder.save(directory, spec)
    runner.run(points, directory, options, machine, say=lambda line: print(line, flush=True))


def check_data(points: Sequence[Point]) -> None:
    """Opens the images of every point that can run, so that a wrong path is told before the first."""
    seen: set[tuple[Any, ...]] = set()
    for point in points:
        if point.problem:
            continue
        config: Config = point.config
        images = (config.data.path, config.image_shape, config.data.classes)
        if images not in seen:
            seen.add(images)
            open_images(config)


if __name__ == '__main__':
    cli.run(main)
