"""Times the Pallas and CUDA kernels beside XLA, op by op, on the shapes of our networks.

    python -m jaxunet.benchmark.kernels [--ops conv3x3,attention] [--batch_sizes 32,256] \\
      [--cases 64x64] [--peers cudnn,tokamax,pytorch] [--seconds 120]
    python -m jaxunet.benchmark.kernels --table docs/results/kernels/rows.jsonl
    python -m jaxunet.benchmark.kernels --roofline --config configs/elephants64.py \\
      [--config.section.field=value ...] [--batch_sizes 32,256]
    python -m jaxunet.benchmark.kernels --roofline --table roofline.jsonl

A case on one backend is a side. Groups of cases compile in parallel, in the order of batch sizes,
and the sides of a group are timed in one trace. A time is the GPU time of a side's kernels, as the
median over calls in shuffled order. Each result is appended to `--output` as a JSON line. At the
end, a summary is printed, and a list of the cases that there was no time for. The summary says
whether each group of cases meets the bars of `jaxunet.benchmark.kernels.verdict`. The exit status
is 1 if a side failed or its results differ from XLA's. Backends whose kernels cannot run here are
skipped; one line says why.

`--peers` also times other libraries in the same trace (`jaxunet.benchmark.kernels.peers`), and
prints all times in one table.

On Hopper, separate processes lower the Pallas kernels if the package flatbuffers is installed,
which saves minutes.

`--roofline` instead measures the kernels of whole training steps of a config. For each class of
kernels, and for each level of the network, it reports launches, FLOPs, bytes, the floor, the time
of the kernels, and their time above the floor. The floor is the least time that these FLOPs and
bytes can take at the device's measured rates (`jaxunet.benchmark.roofline.work`). The classes with
the most time above their floor come first. The rows go to `--output`, by default `roofline.jsonl`.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Sequence

import jax
from absl import flags, logging

from jaxunet.benchmark.cases import parse_batch_sizes
from jaxunet.benchmark.device import measure_rates
from jaxunet.benchmark.kernels import lowering, peers
from jaxunet.benchmark.kernels import measure as kernels
from jaxunet.benchmark.kernels import table as kernel_table
from jaxunet.benchmark.kernels.lowering import KINDS
from jaxunet.benchmark.roofline import run as roofline
from jaxunet.benchmark.roofline import table as roofline_table
from jaxunet.config import cli
from jaxunet.config.unused import check_used
from jaxunet.data.automatic import complete
from jaxunet.ops.backends import installed, runnable
from jaxunet.runtime import command, compiled_cache, device, rows
from jaxunet.runtime.errors import UserError, printable_lines
from jaxunet.runtime.measurement import Measurement
from jaxunet.runtime.paths import of_user
from jaxunet.runtime.whole_files import check_file

OPS = flags.DEFINE_list('ops', [], f'Some of {", ".join(KINDS)}; default: all.')
BATCH_SIZES = flags.DEFINE_list(
    'batch_sizes',
    ['32', '256'],
    "Batch sizes, the most important first; with --roofline, the default is the config's.",
)
DIRECTIONS = flags.DEFINE_list(
    'directions',
    [],
    'Some of the directions that the ops are measured in, such as forward; default: all.',
)
CASES = flags.DEFINE_string(
    'cases', '', 'Regular expression that is searched for in the names of cases; default: all.'
)
PEERS = flags.DEFINE_list(
    'peers', [], f'Other libraries beside the kernels: some of {", ".join(peers.PEERS)}.'
)
SECONDS = flags.DEFINE_float(
    'seconds', 120, 'Nothing is compiled after this; what is then missing is listed.', lower_bound=0
)
OUTPUT = flags.DEFINE_string(
    'output',
    None,
    'File that rows are appended to; default: kernels.jsonl, or roofline.jsonl with --roofline.',
)
TABLE = flags.DEFINE_string('table', None, 'Print the tables of this file of rows, and exit.')
ROOFLINE = flags.DEFINE_bool(
    'roofline', False, 'Measure the kernels of training steps of --config against their floors.'
)
CONFIG = cli.define_optional_config('With --roofline, the config whose steps are measured.')
of_user(OUTPUT, TABLE)
OF_OPS = ('ops', 'directions', 'cases', 'peers', 'seconds')  # flags that --roofline does not read


def main(argv: Sequence[str]) -> int:
    """Runs the measurements or prints the tables of `--table`; returns the exit status.

    Raises:
      UserError: a wrong flag, file of rows or config, or a machine that cannot measure.
    """
    if TABLE.value is not None:
        tables = roofline_table.markdown if ROOFLINE.value else kernel_table.tables
        print(printable_lines(tables(rows.read(TABLE.value))))
        return 0
    output = OUTPUT.value or ('roofline.jsonl' if ROOFLINE.value else 'kernels.jsonl')
    check_file(output, '--output')
    if ROOFLINE.value:
        return measure_roofline(output)
    if CONFIG.value is not None:
        raise UserError('--config: only --roofline measures a config; add it, or leave it out')
    if PEERS.value:  # PyTorch needs memory on the same GPU
        os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
    backends = [*runnable(), *peers.backends(PEERS.value)]
    wanted = kernels.select(OPS.value, BATCH_SIZES.value, CASES.value, backends, DIRECTIONS.value)
    try:
        target = device.target()
    except device.UnsupportedDeviceError as error:
        raise UserError(f'{error}; a benchmark of the kernels needs one') from None
    for backend in installed():
        if missing := backend.unavailable():
            logging.info('without the %s: %s', backend.title, missing)
    wanted = kernels.comparable(wanted, PEERS.value)
    measured, late = measure_ops(wanted, target, output)
    failed = [row for row in measured if row['error']]
    if len(failed) < len(measured):
        parts = [kernel_table.summary(measured)]  # '' of other libraries alone
        if PEERS.value:
            parts.append(kernel_table.beside_peers(measured))
        print('\n\n'.join(filter(None, parts)))
    if late:
        print(f'\nNot compiled within {SECONDS.value:g} s, {len(late)} of {len(wanted)}:')
        print('\n'.join(f'  {measurement.name}' for measurement in late))
    for row in failed:
        where = f'{row["op"]} {row["direction"]}, {row["case"]}, batch {row["batch"]}'
        print(f'error: {where}: {row["error"]}', file=sys.stderr)
    return 1 if failed else 0


def measure_ops(
    wanted: Sequence[Measurement], target: device.Target, output: str
) -> tuple[list[rows.Row], list[Measurement]]:
    """Measures kernels; returns the rows, also in `output`, and the cases left out for time."""
    # A program from the cache would show no compile time.
    jax.config.update('jax_enable_compilation_cache', False)
    # Lowering is Python code, and its threads slow each other down if they switch often.
    sys.setswitchinterval(0.05)
    origin = rows.origin('kernel', _command()) | measure_rates(kernels.DTYPE).columns()
    measured: list[rows.Row] = []
    late: list[Measurement] = []
    stop = time.monotonic() + SECONDS.value
    apart = target is device.Target.HOPPER and importlib.util.find_spec('flatbuffers') is not None
    pool = lowering.pool() if apart else None
    try:
        elsewhere = (
            lowering.start(pool, wanted, kernels.DTYPE, jax.devices()[0].device_kind)
            if pool
            else {}
        )
        for result in kernels.measure(wanted, stop=stop, elsewhere=elsewhere):
            if isinstance(result, Measurement):
                late.append(result)
                continue
            row = origin | result
            rows.append(output, row)
            measured.append(row)
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    return measured, late


def measure_roofline(output: str) -> int:
    """Measures the steps of `--config`, appends their rows to `output` and prints their tables.

    Raises:
      UserError: see `main`.
    """
    if CONFIG.value is None:
        raise UserError('--roofline: needs --config FILE, such as configs/elephants64.py')
    if given := [f'--{name}' for name in OF_OPS if flags.FLAGS[name].present]:
        raise UserError(f'{given[0]}: chooses among single ops; not with --roofline')
    sizes = parse_batch_sizes(BATCH_SIZES.value) if flags.FLAGS['batch_sizes'].present else ()
    roofline.check_gpu()
    compiled_cache.enable_compilation_cache()
    config = complete(CONFIG.value)
    check_used(config)
    measured = []
    for row in roofline.run(cli.config_name(), config, sizes, _command()):
        rows.append(output, row)
        measured.append(row)
    print(roofline_table.markdown(measured))
    return 0


def _command() -> str:
    return shlex.join(['python', '-m', 'jaxunet.benchmark.kernels', *sys.argv[1:]])


if __name__ == '__main__':
    command.run(main)
