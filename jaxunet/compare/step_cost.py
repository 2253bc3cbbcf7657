"""What a step of each method costs: all in this process on one device, turn by turn, so that a machine's drift meets all alike.

python -m jaxunet.compare.step_cost CONFIGS.json      # name -> config; prints one JSON row, and all else to stderr
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from jaxunet.benchmark import timing
from jaxunet.benchmark.jax_side import JaxSide
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config, cli, resolve
from jaxunet.data.sources import open_images
from jaxunet.runtime import rows
from jaxunet.runtime.errors import USER_ERROR, UserError

ROUNDS = 11
STEPS = 8  # of a turn, at least


def measure(
    configs: dict[str, Config], steps: int | None = None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Milliseconds a step of each, and the ratio to the first: medians over rounds with quartiles.

    Args:
      steps: of a turn; default: `steps_of_a_turn`, so that each turn has its share of the policies' measurements.
    """
    first = next(iter(configs.values()))
    source = open_images(first)
    sides, units = {}, []
    for name, config in configs.items():
        # Random weights in the last layers too: a network of zeros takes a GPU less power.
        prepared = JaxSide(
            config, source, fresh_state(config.replace(model={'zero_init': False}))
        ).prepare('step')
        sides[name] = prepared.run
        units.append(prepared.unit)
        print(f'{name}: compiled', file=sys.stderr, flush=True)
    steps = steps or steps_of_a_turn(configs.values(), units)
    for run in sides.values():
        run(steps)
    times = timing.interleave(sides, rounds=rounds, steps=steps)
    costs = {}
    for name, found in times.items():
        if isinstance(found, Exception):
            raise UserError(f'{name}: {found}')
        base = times[next(iter(configs))]
        assert not isinstance(base, Exception)
        summary = timing.summarise(found, base)
        costs[name] = {
            'ms': summary.median_ms,
            'ratio': summary.ratio,
            'quartiles': list(summary.ratio_quartiles),
        }
    return {
        'costs': costs,
        'rounds': rounds,
        'steps': steps,
        'batch': first.data.batch_size,
        **rows.provenance(),
    }


def steps_of_a_turn(configs: Iterable[Config], units: Iterable[int]) -> int:
    """At least `STEPS`, and a multiple of every policy's `policy_every` and of `units`, what each runs in one call."""
    least = math.lcm(
        *units, *(c.timesteps.policy_every for c in configs if c.timesteps.sampler == 'policy')
    )
    return least * -(-STEPS // least)


def main() -> None:
    cli.enable_compilation_cache()
    try:
        configs = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding='utf-8'))
        print(json.dumps(measure({name: resolve(values) for name, values in configs.items()})))
    except UserError as error:
        print(f'error: {error}', file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)


if __name__ == '__main__':
    main()
