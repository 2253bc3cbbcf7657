"""Times steps with kernels one after another, and with concurrent kernels, in turns, by batch size.

    python tools/gpu/overlap.py configs/elephants64.py 32,64,128 rows.jsonl

The result shows up to which batch size concurrent kernels are faster, which
`jaxunet.ops.backends.OVERLAP_PIXELS` states. Images are random, the backend is auto. Appends a row
for each batch size to the file.
"""

from __future__ import annotations

import pathlib
import runpy
import shlex
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from jaxunet.benchmark.cases import benchmark_config  # noqa: E402
from jaxunet.benchmark.jax_side import JaxSide, synthetic_source  # noqa: E402
from jaxunet.benchmark.run import steps_of_turn  # noqa: E402
from jaxunet.benchmark.timing import interleave, summarise  # noqa: E402
from jaxunet.checkpoint.state import fresh_state  # noqa: E402
from jaxunet.config import Config, resolve  # noqa: E402
from jaxunet.ops import backends  # noqa: E402
from jaxunet.runtime import rows  # noqa: E402
from jaxunet.runtime.rows import Row, origin  # noqa: E402

ROUNDS = 7


def measure(config: Config) -> Row:
    """Returns the times of both kinds of step, in milliseconds, and their peak memory in bytes."""
    source, state = synthetic_source(config), fresh_state(config)
    sides = {
        name: JaxSide(
            config.replace(parallel={'concurrent_kernels': name == 'overlap'}), source, state
        ).prepare('step')
        for name in ('alone', 'overlap')
    }
    unit = sides['alone'].unit
    runs = {name: side.run for name, side in sides.items()}
    times = interleave(runs, rounds=ROUNDS, steps=steps_of_turn(runs, None, unit))
    row: Row = {'batch_size': config.data.batch_size, 'steps_per_call': unit}
    for name, side in sides.items():
        taken, alone = times[name], times['alone']
        if isinstance(taken, Exception):
            raise taken
        timing = summarise(taken, alone)
        row |= {
            f'{name}_ms': timing.median_ms,
            f'{name}_quartiles_ms': list(timing.quartiles_ms),
            f'{name}_ratio': timing.ratio,
            f'{name}_peak_bytes': side.peak_bytes,
            f'{name}_concurrent': side.concurrent,
        }
        side.close()
    return row


def main() -> None:
    """Runs the command."""
    name, batches, output = sys.argv[1:]
    shared = origin('overlap', shlex.join(['python', 'tools/gpu/overlap.py', *sys.argv[1:]]))
    shared['config'] = pathlib.Path(name).stem
    backends.OVERLAP_PIXELS = 2**60  # no limit: the limit is to be found
    for batch in map(int, batches.split(',')):
        config = benchmark_config(resolve(runpy.run_path(name)['get_config']()))
        row = shared | measure(config.replace(data={'batch_size': batch}))
        rows.append(output, row)
        gib = [(row[f'{side}_peak_bytes'] or 0) / 2**30 for side in ('alone', 'overlap')]
        print(
            f'{row["config"]} batch {batch}: {row["alone_ms"]:.3f} ms one after another, '
            f'{row["overlap_ms"]:.3f} at once ({row["overlap_ratio"]:.3f}); '
            f'peak {gib[0]:.2f} and {gib[1]:.2f} GiB',
            flush=True,
        )


if __name__ == '__main__':
    main()
