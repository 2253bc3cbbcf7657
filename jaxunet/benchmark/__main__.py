"""Times the network and whole training steps of a config on several backends and PyTorch.

    python -m jaxunet.benchmark --config configs/elephants64.py --backends xla,auto \\
      --batch_sizes 32,256 --peers pytorch
    python -m jaxunet.benchmark --config configs/elephants64.py --directions sample \\
      --batch_sizes 256
    python -m jaxunet.benchmark --table benchmark.jsonl
    python -m jaxunet.benchmark --config configs/elephants64.py --synthetic --choose

Each backend or peer (PyTorch) is a side. The sides take turns on one device, so a drift of its
speed does not change their ratios. Each row is appended to `--output` as a JSON line, and a table
is printed at the end. A side that cannot run gets a row with its error; the exit status is then 1.

The direction `sample` draws `--sampled_images` images by DDIM in `--sampling_steps` steps, in
batches of the batch size. In turns with it, the same number of evaluations of the network alone is
timed; the row says what share of the sampling time they take.

`--choose` finds the fastest backend of every op in whole training steps, and writes it to a file
that backend=auto follows on this kind of device, with these versions and this precision.

PyTorch needs memory on the same GPU: with `--peers`, JAX allocates on demand
(XLA_PYTHON_CLIENT_PREALLOCATE=false, unless that variable is set). Neither JAX nor PyTorch returns
memory while a case runs, so all sides must fit in memory together.

To measure many cases soon, start a command for each at once, with the same `--lock FILE`:
they compile beside each other, and each measures alone. Only `compile s` becomes longer.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import os
import shlex
import sys
from collections.abc import Sequence

import jax
from absl import flags

from jaxunet.benchmark import choose
from jaxunet.benchmark.cases import DIRECTIONS, Benchmark, Sampling, make_plan
from jaxunet.benchmark.jax_side import synthetic_source
from jaxunet.benchmark.run import run
from jaxunet.benchmark.table import markdown
from jaxunet.benchmark.timing import MIN_STEPS, TURN_SECONDS
from jaxunet.config import Config, cli
from jaxunet.config.unused import check_used
from jaxunet.data.automatic import complete
from jaxunet.data.source import Source
from jaxunet.data.sources import open_images
from jaxunet.ops import backends, choices
from jaxunet.runtime import command, rows
from jaxunet.runtime.errors import UserError, printable_lines
from jaxunet.runtime.paths import of_user
from jaxunet.runtime.whole_files import check_file

CONFIG = cli.define_config()
BACKENDS = flags.DEFINE_list(
    'backends', [], "Backends to compare; default: the config's. Ratios are to the first."
)
PEERS = flags.DEFINE_list(
    'peers', [], 'pytorch (all three), or some of pytorch-eager, pytorch-compiled, pytorch-best.'
)
BATCH_SIZES = flags.DEFINE_list('batch_sizes', [], "Batch sizes; default: the config's.")
PRECISIONS = flags.DEFINE_list('precisions', [], "Compute types; default: the config's.")
DIRECTION = flags.DEFINE_list(
    'directions', [], f'Some of {", ".join(DIRECTIONS)}; default: all but sample.'
)
SAMPLED_IMAGES = flags.DEFINE_integer(
    'sampled_images', 2048, 'Images that a turn of the direction sample draws.', lower_bound=1
)
SAMPLING_STEPS = flags.DEFINE_integer(
    'sampling_steps', 50, 'Steps of DDIM of the direction sample.', lower_bound=1
)
ROUNDS = flags.DEFINE_integer(
    'rounds', 10, 'Turns of each side; medians and quartiles are over them.'
)
STEPS = flags.DEFINE_integer(
    'steps',
    None,
    'Steps of one turn, rounded up to whole calls; default: half a second of the fastest side, at '
    'most two seconds of the slowest, at least 10 steps.',
)
SYNTHETIC = flags.DEFINE_bool(
    'synthetic', False, 'Random images instead of data.path: times do not depend on pixels.'
)
OUTPUT = flags.DEFINE_string('output', 'benchmark.jsonl', 'File that rows are appended to.')
LOCK = flags.DEFINE_string(
    'lock',
    '',
    'File that several benchmarks on one GPU share: they compile beside each other, and each '
    'measures alone.',
)
TABLE = flags.DEFINE_string('table', None, 'Print the table of this file of rows, and exit.')
CHOOSE = flags.DEFINE_bool(
    'choose',
    False,
    'Find the fastest backend of every op on this machine; backend=auto follows it. '
    f'{choices.VARIABLE} names the file; default: choices.json in the cache folder.',
)
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print the cases, and exit.')
of_user(OUTPUT, LOCK, TABLE)


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark or prints the table of `--table`; returns the exit status."""
    if TABLE.value is not None:
        print(printable_lines(markdown(rows.read(TABLE.value))))
        return 0
    config = complete(CONFIG.value)
    check_used(config)
    plan = make_plan(
        _name(config),
        config,
        backends=BACKENDS.value,
        peers=PEERS.value,
        precisions=PRECISIONS.value,
        batch_sizes=BATCH_SIZES.value,
        directions=DIRECTION.value,
        rounds=ROUNDS.value,
        steps=STEPS.value,
        sampling=Sampling(SAMPLED_IMAGES.value, SAMPLING_STEPS.value),
        lock=LOCK.value,
    )
    command = shlex.join(['python', '-m', 'jaxunet.benchmark', *sys.argv[1:]])
    if CHOOSE.value:
        check_choose_flags(config)
        keep_choices(plan, command)
        return 0
    check_sampling_flags(plan)
    check_file(OUTPUT.value, '--output')
    if LOCK.value:
        check_file(LOCK.value, '--lock')
    if DRY_RUN.value:
        dry_run(plan)
        return 0
    if len(plan.sides) == 1:
        # With a single side there is nothing to compare, so a missing backend is an error at once.
        backends.choose(plan.sides[0], plan.precisions[0])
    if PEERS.value:
        os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
    # A program from the cache would show no compile time.
    jax.config.update('jax_enable_compilation_cache', False)
    measured = []
    for row in run(plan, images(plan), command):
        rows.append(OUTPUT.value, row)
        measured.append(row)
    print(markdown(measured))
    failed = [row for row in measured if row['error'] is not None]
    for row in failed:
        print(
            f'error: {row["backend"]}, {row["precision"]}, batch {row["batch_size"]}, '
            f'{row["direction"]}: {row["error"]}',
            file=sys.stderr,
            flush=True,
        )
    return 1 if failed else 0


def _name(config: Config) -> str:
    """Returns the config's name, with the size of the images if the command line sets it."""
    if 'data.image_size' not in cli.named_fields(CONFIG):
        return cli.config_name()
    return f'{cli.config_name()} {"x".join(map(str, config.image_shape[:2]))}'


def images(plan: Benchmark) -> Source:
    """Returns the images that the flags ask for."""
    return synthetic_source(plan.config) if SYNTHETIC.value else open_images(plan.config)


def check_sampling_flags(plan: Benchmark) -> None:
    """Raises `UserError` for a flag of the direction sample if that is not measured."""
    for flag in (SAMPLED_IMAGES, SAMPLING_STEPS):
        if flag.present and 'sample' not in plan.directions:
            raise UserError(
                f'--{flag.name}: only the direction sample draws images; add it to --directions, '
                f'or leave --{flag.name} out'
            )


def check_choose_flags(config: Config) -> None:
    """Raises `UserError` for a flag or field that --choose does not read, for chosen kernels, and
    for a file of choices that cannot be written.
    """
    choose.check_kernels()
    if config.backend != 'auto':
        raise UserError(
            f'backend: found {config.backend}; --choose times every backend that runs here, and '
            'only backend=auto follows its file; set it to auto'
        )
    for flag in (BACKENDS, PEERS, DIRECTION, OUTPUT, LOCK, SAMPLED_IMAGES, SAMPLING_STEPS):
        if flag.present:
            raise UserError(
                f'--{flag.name}: --choose times whole steps of every backend that runs here, and '
                f'{choices.VARIABLE} names its file; leave --{flag.name} out'
            )
    if len(BATCH_SIZES.value) > 1:
        raise UserError(
            f'--batch_sizes: --choose measures one, found {",".join(BATCH_SIZES.value)}'
        )
    check_file(choices.path(), choices.VARIABLE)


def keep_choices(plan: Benchmark, command: str) -> None:
    """Measures this machine and writes the file that backend=auto follows."""
    kind = jax.devices()[0].device_kind
    if not backends.runnable():
        print(f'only xla runs on this machine ({kind}): nothing to choose')
        return
    if DRY_RUN.value:
        names = ', '.join(['xla', *(backend.name for backend in backends.runnable())])
        for precision in plan.precisions:
            print(
                f'{plan.name}, {precision}, batch {plan.batch_sizes[0]}, step: {names}, then the '
                f'quickest with one op at a time from each other; {plan.rounds} rounds'
            )
        return
    for entry in choose.choose(plan, images(plan), command):
        choices.write(choices.path(), entry)
        ops = ', '.join(f'{op}={name}' for op, name in entry['ops'].items())
        print(f'{kind}, {entry["precision"]}: {ops}')
        for name, milliseconds in sorted(entry['measured'].items(), key=lambda item: item[1]):
            print(f'  {milliseconds:8.2f} ms  {name}')
        print(f'kept in {choices.path()}; backend=auto follows it')


def dry_run(plan: Benchmark) -> None:
    """Prints one line for each measurement, in order."""
    turn = (
        f'{plan.steps} steps'
        if plan.steps
        else f'about {TURN_SECONDS:g} s, at least {MIN_STEPS} steps'
    )
    for precision, size in plan.cases():
        for direction in plan.directions:
            print(
                f'{plan.name}, {precision}, batch {size}, {direction}: {", ".join(plan.sides)}; '
                f'{plan.rounds} rounds of {turn}'
            )


if __name__ == '__main__':
    command.run(main)
