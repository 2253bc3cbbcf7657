"""Trains by several methods for the same wall-clock time, and tells which reaches a quality sooner.

    python -m jaxunet.compare --config configs/cifar10.py --methods uniform,min_snr,adaptive --seconds 300 --seeds 2 --devices 0,1,2,3
    python -m jaxunet.compare --output runs/compare --plot_only

A method is a name of `jaxunet.compare.methods`, or one's own: `mine:timesteps.sampler=adaptive+timesteps.adaptive_bins=64` (a known name
keeps its other fields). The first is the baseline. Runs of one seed start from the same weights and see the same images in the same
order; a constant learning rate ends with the time. The clock counts training steps alone: not compiling, not measuring. At
`--evaluations` times the averaged weights are kept, and measured when the training is over, as `config.evaluation` says.

Every run has a process of its own; one that fails is a line in the table with its reason. The same command goes on where it was.
`OUTPUT` gets compare.csv, quality.png (needs the extra `plots`), report.md, and runs/.
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
from jaxunet.compare.methods import METHODS, parse_counts, parse_methods, parse_seconds
from jaxunet.config import cli, resolve, to_dict
from jaxunet.training.evaluation import evaluation_network

CONFIG = cli.define_config()
METHOD_NAMES = flags.DEFINE_list(
    'methods',
    ['uniform', 'adaptive'],
    f'Some of {", ".join(METHODS)}, or NAME:field=value+field=value.',
)
SECONDS = flags.DEFINE_list(
    'seconds', ['300'], 'Of training, each run; of some methods other ones: 300,policy=150.'
)
SEEDS = flags.DEFINE_list(
    'seeds', ['1'], 'Runs of each method; of some methods more: 1,uniform=2,adaptive=2.'
)
EVALUATIONS = flags.DEFINE_list(
    'evaluations',
    ['5'],
    'How often each run is measured, at equal distances of time; some more or less often: 1,uniform=5.',
)
DEVICES = flags.DEFINE_list(
    'devices',
    [],
    'GPUs for runs beside each other, one each, such as 0,1,2,3; default: one run at a time.',
)
STEP_COST = flags.DEFINE_bool(
    'step_cost',
    False,
    'Also time the steps of all methods in one process, on the first of the devices.',
)
TRAIN = flags.DEFINE_bool('train', True, 'Do the runs; without, only --step_cost.')
TIMEOUT = flags.DEFINE_float(
    'timeout', 24 * 3600.0, 'Seconds after which the process of a run is ended.', lower_bound=0.1
)
OUTPUT = flags.DEFINE_string('output', 'runs/compare', 'Folder of the comparison.')
PLOT_ONLY = flags.DEFINE_bool(
    'plot_only', False, 'Write the report of what OUTPUT holds, without running anything.'
)
PLOT = flags.DEFINE_bool('plot', True, 'Draw the plot.')


def main(argv: Sequence[str]) -> int:
    directory = pathlib.Path(OUTPUT.value)
    if PLOT.value:
        report.check_plots()
    if not PLOT_ONLY.value:
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # a run must not outlive the comparison
        try:
            runner.save_failures(compare(directory), directory)
        except KeyboardInterrupt:
            print('\nstopped; the same command goes on from here', file=sys.stderr, flush=True)
            sys.exit(130)
    spec, failures = runner.load(directory), runner.load_failures(directory)
    paths = report.write(spec, directory, failures, plot=PLOT.value)
    print(
        f'\n{report.markdown(spec, directory, failures)}\n{", ".join(map(str, paths))}', flush=True
    )
    return 1 if failures and not PLOT_ONLY.value else 0


def compare(directory: pathlib.Path) -> dict[str, str]:
    """Runs what the flags describe; returns what failed."""
    given = resolve(CONFIG.value)
    methods = parse_methods(METHOD_NAMES.value)
    names = [method.name for method in methods]
    config = runner.base_config(given)
    jax.config.update('jax_platforms', 'cpu')  # the other devices are the runs'
    network = (
        evaluation_network(config) if TRAIN.value else None
    )  # mistakes are told before anything runs
    spec = runner.Spec(
        command=shlex.join(['python', '-m', 'jaxunet.compare', *sys.argv[1:]]),
        config=to_dict(config),
        methods={method.name: method.fields for method in methods},
        seconds=parse_seconds('--seconds', SECONDS.value, names, float(SECONDS.default[0])),
        seeds=parse_counts('--seeds', SEEDS.value, names, int(SEEDS.default[0])),
        evaluations=parse_counts(
            '--evaluations', EVALUATIONS.value, names, int(EVALUATIONS.default[0])
        ),
    )
    todo = runner.tasks(spec, config)
    if network:
        runner.check_features(todo, directory, network.name)
    if (
        TRAIN.value or not (directory / runner.SPEC).exists()
    ):  # --notrain adds step costs to what is there
        runner.save(spec, directory)
    devices = DEVICES.value or ['']

    def say(line: str) -> None:
        print(line, flush=True)

    failures = (
        {}
        if TRAIN.value
        else {
            name: why
            for name, why in runner.load_failures(directory).items()
            if name != 'step_cost'
        }
    )
    if STEP_COST.value and (
        problem := runner.measure_step_costs(
            spec, config, directory, devices[0], TIMEOUT.value, say
        )
    ):
        failures['step_cost'] = problem
    return failures | (
        runner.run(todo, directory, devices, TIMEOUT.value, say) if TRAIN.value else {}
    )


if __name__ == '__main__':
    cli.run(main)
