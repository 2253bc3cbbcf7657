"""Trains several methods for the same wall-clock time and reports which reaches a quality first.

    python -m jaxunet.compare --file docs/results/methods/methods.toml --data data/ \\
      --devices 0,1 --limit 1200 --output runs/methods
    python -m jaxunet.compare --config configs/cifar10.py --methods uniform,min_snr,adaptive \\
      --seconds 300 --seeds 2 --devices 0,1,2,3
    python -m jaxunet.compare --output runs/compare --plot_only

With `--file`, a comparison file states everything: methods, seeds, times, how samples are drawn and
measured, and the protocol (`jaxunet.compare.comparison_file` lists its keys). Each entry of
`--devices` gets a process, and the processes divide the runs among themselves; two share a device
that is listed twice. A run that crashes its process fails alone. The same command continues
where the last one stopped, even in the middle of a run, so the work can be spread over several
sessions (`--limit`). FILE:METHODS runs only these methods. The command writes report.md,
quality.png, rows.jsonl and stretches.jsonl to `OUTPUT`; the report lists the missing runs and the
device time spent. `--plot_only` writes these files again without running anything, and can include
the results of other folders (`--add`).

Without `--file`, the flags state a comparison with one sampler. A method is a name from
`jaxunet.compare.methods`, several names joined by + such as `flow+muon`, or your own, such as
`mine:timesteps.sampler=adaptive+timesteps.adaptive_bins=64` (a known name keeps its other fields).
`uniform` trains with uniform timesteps and weights, and with the config's objective. The first
method is the baseline. Runs with the same seed start from the same weights and see the same images
in the same order. The learning rate is constant after the config's warm-up. The clock counts only
training steps, without compiling and measuring. Averaged weights are measured at `--evaluations`
equally spaced times, as `config.evaluation` says. The command writes the comparison to
OUTPUT/compare.toml, with its config beside it, and makes the runs of that file.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import math
import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from jaxunet.compare import BEGAN, flags_comparison, report, runner
from jaxunet.compare.comparison import Comparison
from jaxunet.compare.comparison_file import read_comparison
from jaxunet.compare.jobs import base_config, completed
from jaxunet.compare.methods import FORM, METHODS, numbers_by_method, parse_methods
from jaxunet.config import cli
from jaxunet.config.unused import check_used
from jaxunet.runtime import command, compiled_cache
from jaxunet.runtime.errors import UserError, printable_lines
from jaxunet.runtime.interrupt import interrupt_when_terminated
from jaxunet.runtime.paths import of_user
from jaxunet.runtime.plots import check_plots
from jaxunet.sweep.runner import probe
from jaxunet.training.workdir import opened

CONFIG = cli.define_config()
METHOD_NAMES = flags.DEFINE_list(
    'methods',
    ['uniform', 'adaptive'],
    f'Methods to compare: some of {", ".join(METHODS)}, or as {FORM}.',
)
SECONDS = flags.DEFINE_list(
    'seconds',
    ['300'],
    'Seconds of training of each run; NAME=SECONDS for single methods, e.g. 300,policy=150.',
)
SEEDS = flags.DEFINE_list(
    'seeds',
    ['1'],
    'Runs of each method; NAME=COUNT for single methods, e.g. 1,uniform=2,adaptive=2.',
)
EVALUATIONS = flags.DEFINE_list(
    'evaluations',
    ['5'],
    'Equally spaced times at which each run is measured; NAME=COUNT for single methods, e.g. '
    '1,uniform=5.',
)
FILE = flags.DEFINE_string(
    'file', '', 'Comparison file, or FILE:METHODS, such as methods.toml:uniform,flow+muon.'
)
DATA = flags.DEFINE_string('data', '.', 'With --file: folder of the archives of images.')
LIMIT = flags.DEFINE_float(
    'limit',
    24 * 3600.0,
    'With --file: time limit of the command in seconds from its start; training stops before it.',
    lower_bound=1,
)
RESERVE = flags.DEFINE_float(
    'reserve',
    30.0,
    'With --file: seconds of the limit to reserve for compiling, and for saving or measuring.',
    lower_bound=0,
)
RESUME = flags.DEFINE_bool(
    'resume', True, 'With --file: save runs on the way, and go on with those that are not done.'
)
ADD = flags.DEFINE_list(
    'add', [], 'With --file and --plot_only: folders of further results, as from other machines.'
)
DEVICES = flags.DEFINE_list(
    'devices',
    [],
    'GPUs for simultaneous runs, one each, such as 0,1,2,3; default: one run at a time. With '
    '--file, 0,0,1,1 has two runs on each of two GPUs, and 0+1,2+3 has two data-parallel runs on '
    'two GPUs each. Without a GPU, the runs divide the CPU cores.',
)
STEP_COST = flags.DEFINE_bool(
    'step_cost',
    False,
    'Also time the steps of all methods in one process, on the first of the devices.',
)
TRAIN = flags.DEFINE_bool('train', True, 'Do the runs; --notrain does only --step_cost.')
TIMEOUT = flags.DEFINE_float(
    'timeout', 24 * 3600.0, 'Seconds after which the process of a run is killed.', lower_bound=0.1
)
OUTPUT = flags.DEFINE_string('output', 'runs/compare', 'Folder of the comparison.')
PLOT_ONLY = flags.DEFINE_bool(
    'plot_only', False, 'Write the report of the results in OUTPUT without running anything.'
)
PLOT = flags.DEFINE_bool('plot', True, 'Draw the plot.')
of_user(FILE, DATA, ADD, OUTPUT)
# Flags that --file replaces (`STATED`), and flags that need it (`WITH_FILE`).
STATED = ('config', 'methods', 'seconds', 'seeds', 'evaluations', 'step_cost', 'train', 'timeout')
WITH_FILE = ('data', 'limit', 'reserve', 'resume', 'add')


def main(argv: Sequence[str]) -> int:
    """Runs the comparison of the file or the flags, unless `--plot_only`, and writes its report.

    Returns:
      The exit status: 1 if a run failed, or was left out.

    Raises:
      UserError: a flag or a file is wrong.
    """
    _check_flags()
    if PLOT.value:
        check_plots()
    directory = pathlib.Path(OUTPUT.value)
    path, _, part = FILE.value.partition(':')
    comparison = read_comparison(path) if path else None
    problems: list[str] = []
    stopped = False
    if PLOT_ONLY.value:
        comparison = comparison or flags_comparison.load(directory)
    else:
        # A run must not outlive the comparison, and its work so far gets a row.
        interrupt_when_terminated()
        compiled_cache.enable_compilation_cache()
        by_flags = None if comparison else _by_flags()
        try:
            with opened(directory, '--output'):
                if by_flags:
                    comparison, problems = _prepare(by_flags, directory)
                if comparison and TRAIN.value:
                    problems += runner.run(comparison, _options(part, directory), _command_line())
        except KeyboardInterrupt:
            stopped = True
    if comparison:
        results = runner.collect(comparison, directory, list(map(pathlib.Path, ADD.value)))
        about = report.about_file(comparison, directory, _command_line())
        text, paths = report.write(results, directory, about, plot=PLOT.value)
        print(f'\n{printable_lines(text)}\n{", ".join(map(str, paths))}', flush=True)
    for problem in problems:
        print(problem, file=sys.stderr, flush=True)
    if stopped:
        print('\nstopped; the same command goes on from here', file=sys.stderr, flush=True)
        return 130
    return 1 if problems else 0


def _check_flags() -> None:
    """Raises UserError for a flag that would be ignored, or devices that cannot be timed."""
    file, devices = FILE.value, DEVICES.value
    for name in flags.FLAGS:
        if flags.FLAGS[name].present and file and name.partition('.')[0] in STATED:
            raise UserError(f'--{name}: the comparison file states this; change it there')
        if flags.FLAGS[name].present and not file and name in WITH_FILE:
            raise UserError(f'--{name}: is for a comparison file; give --file, too')
    if not all(devices):
        raise UserError(
            f'--devices: expected names of GPUs, such as 0,1, found {",".join(devices)!r}'
        )
    # With a file, they are checked with its step times.
    if not file and (groups := [device for device in devices if '+' in device]):
        raise UserError(f'--devices: {groups[0]}: several GPUs for a run need --file')
    if not file and (shared := [device for device in devices if devices.count(device) > 1]):
        raise UserError(
            f'--devices: {shared[0]} is named twice; runs that share a GPU slow each other down, '
            'and their training time is measured. Name it once, or give --file with step_ms'
        )
    if ADD.value and not PLOT_ONLY.value:
        raise UserError('--add: gathers results, and runs nothing; give --plot_only, too')
    if missing := [folder for folder in ADD.value if not pathlib.Path(folder).is_dir()]:
        raise UserError(f'--add: no folder {missing[0]}')
    if PLOT_ONLY.value and ':' in file:
        raise UserError(
            '--file: the methods after the colon are those to run, and --plot_only runs nothing; '
            'leave one of them out'
        )


def _command_line() -> str:
    return shlex.join(['python', '-m', 'jaxunet.compare', *sys.argv[1:]])


def _options(part: str, directory: pathlib.Path) -> runner.Options:
    """Returns the options of the flags; a comparison of flags always runs in processes."""
    by_flags = not FILE.value
    return runner.Options(
        part=part,
        data=DATA.value,
        output=directory,
        devices=tuple(DEVICES.value) or (('',) if by_flags else ()),
        limit=math.inf if by_flags else LIMIT.value,
        reserve=RESERVE.value,
        resume=RESUME.value,
        began=BEGAN,
        timeout=TIMEOUT.value if by_flags else math.inf,
        by_flags=by_flags,
    )


def _by_flags() -> flags_comparison.FlagsComparison:
    """Returns the comparison that the flags state.

    Raises:
      UserError: a flag or the config is wrong, or a field has no effect.
    """
    config = base_config(completed(CONFIG.value))
    methods = parse_methods(METHOD_NAMES.value)
    configs = [method.apply(config) for method in methods]
    if not (
        pathlib.Path(OUTPUT.value) / flags_comparison.FILE
    ).exists():  # otherwise they are logged
        check_used(*configs)
    names, count = [method.name for method in methods], len(DEVICES.value)
    shared = count > 1 and TRAIN.value and probe().platform == 'cpu'
    return flags_comparison.FlagsComparison(
        config,
        methods,
        numbers_by_method('--seconds', SECONDS.value, names, float(SECONDS.default[0])),
        numbers_by_method('--seeds', SEEDS.value, names, int(SEEDS.default[0])),
        numbers_by_method('--evaluations', EVALUATIONS.value, names, int(EVALUATIONS.default[0])),
        _command_line(),
        f'Note: {count} runs at a time divided the cores of one CPU, so each did fewer steps in '
        'its seconds than it would do alone.'
        if shared
        else '',
    )


def _prepare(
    by_flags: flags_comparison.FlagsComparison, directory: pathlib.Path
) -> tuple[Comparison, list[str]]:
    """Writes the comparison to its folder and times its steps, as far as the flags ask for it.

    Returns the comparison, and what went wrong. Without training, a comparison that the folder
    holds stays as it is.

    Raises:
      UserError: the folder holds other runs.
    """
    keep = not TRAIN.value and (directory / flags_comparison.FILE).exists()
    comparison = None if keep else flags_comparison.write(by_flags, directory)
    if by_flags.note:
        print(f'note: this machine has no GPU. {by_flags.note}', flush=True)
    problem = ''
    if STEP_COST.value:
        device = next(iter(DEVICES.value), '')
        problem = flags_comparison.measure_step_costs(by_flags, directory, device, TIMEOUT.value)
    return comparison or flags_comparison.load(directory), [problem] if problem else []


if __name__ == '__main__':
    command.run(main)
