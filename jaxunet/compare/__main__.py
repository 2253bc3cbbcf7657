"""Trains several methods for the same wall-clock time and reports which reaches a quality first.

    python -m jaxunet.compare --config configs/cifar10.py --methods uniform,min_snr,adaptive \\
      --seconds 300 --seeds 2 --devices 0,1,2,3
    python -m jaxunet.compare --output runs/compare --plot_only

A method is a name of `jaxunet.compare.methods`, several of them such as `flow+muon`, or your own,
such as `mine:timesteps.sampler=adaptive+timesteps.adaptive_bins=64` (a known name keeps its other
fields). `uniform` trains with uniform timesteps and weights, and with the config's objective.
The first method is the baseline. Runs of one seed start from the same weights and see the same
images in the same order. The learning rate is constant until the time is over. The clock counts
only training steps, without compiling and measuring. At `--evaluations` times the averaged weights
are kept; they are measured after the training, as `config.evaluation` says.

Every run has its own process; a failed run becomes a line of the report with its reason. The same
command resumes an interrupted comparison. It writes compare.csv, quality.png (needs the extra
`plots`), report.md and runs/ to `OUTPUT`.
"""

from __future__ import annotations

import pathlib
import shlex
import signal
import sys
from collections.abc import Sequence

import jax
from absl import flags

from jaxunet.compare import report, runner
from jaxunet.compare.methods import (
    FORM,
    METHODS,
    Method,
    parse_counts,
    parse_methods,
    parse_seconds,
)
from jaxunet.config import Config, cli, to_dict
from jaxunet.data.automatic import complete
from jaxunet.profile.report import check_plots
from jaxunet.training.evaluation import evaluation_network

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
DEVICES = flags.DEFINE_list(
    'devices',
    [],
    'GPUs for simultaneous runs, one each, such as 0,1,2,3; default: one run at a time.',
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


def main(argv: Sequence[str]) -> int:
    """Does the comparison of the flags (not with `--plot_only`), and writes its report.

    Returns:
      The exit status: 1 if a run failed.
    """
    directory = pathlib.Path(OUTPUT.value)
    if PLOT.value:
        check_plots()
    if not PLOT_ONLY.value:
        # A run must not outlive the comparison.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            runner.save_failures(compare(directory), directory)
        except KeyboardInterrupt:
            print('\nstopped; the same command goes on from here', file=sys.stderr, flush=True)
            sys.exit(130)
    spec, failures = runner.load(directory), runner.load_failures(directory)
    written = report.write(spec, directory, failures, plot=PLOT.value)
    print(f'\n{written.text}\n{", ".join(map(str, written.paths))}', flush=True)
    return 1 if failures and not PLOT_ONLY.value else 0


def compare(directory: pathlib.Path) -> dict[str, str]:
    """Does the comparison of the flags; returns the reasons of failures, by folder of the run.

    A failure to time the steps is called `step_cost`.

    Raises:
      UserError: a flag, the config or the data is wrong, or the folder holds other runs.
    """
    config = runner.base_config(complete(CONFIG.value))
    methods = parse_methods(METHOD_NAMES.value)
    jax.config.update('jax_platforms', 'cpu')  # the other devices belong to the runs
    # Find mistakes in the evaluation before anything runs.
    network = evaluation_network(config) if TRAIN.value else None
    spec = make_spec(config, methods)
    todo = runner.tasks(spec, config)
    if network:
        runner.check_features(todo, directory, network.name)
    # --notrain adds step costs to an existing comparison.
    if TRAIN.value or not (directory / runner.SPEC).exists():
        runner.save(spec, directory)
    devices = DEVICES.value or ['']
    failures: dict[str, str] = {}
    if not TRAIN.value:
        failures |= runner.load_failures(directory)
        failures.pop('step_cost', None)
    if STEP_COST.value:
        problem = runner.measure_step_costs(spec, config, directory, devices[0], TIMEOUT.value, say)
        failures |= {'step_cost': problem} if problem else {}
    if TRAIN.value:
        failures |= runner.run(todo, directory, devices, TIMEOUT.value, say)
    return failures


def make_spec(config: Config, methods: Sequence[Method]) -> runner.Spec:
    """Returns the comparison of the flags. Raises UserError if a flag is wrong."""
    names = [method.name for method in methods]
    return runner.Spec(
        command=shlex.join(['python', '-m', 'jaxunet.compare', *sys.argv[1:]]),
        config=to_dict(config),
        methods={method.name: method.fields for method in methods},
        seconds=parse_seconds('--seconds', SECONDS.value, names, float(SECONDS.default[0])),
        seeds=parse_counts('--seeds', SEEDS.value, names, int(SEEDS.default[0])),
        evaluations=parse_counts(
            '--evaluations', EVALUATIONS.value, names, int(EVALUATIONS.default[0])
        ),
    )


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


if __name__ == '__main__':
    cli.run(main)
