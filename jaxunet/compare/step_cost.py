"""Times a training step of each method in one process on one device.

The methods take turns, so that a drift of the machine affects all of them alike. Those that differ
only in their learning rates take one turn together.

    # CONFIGS.json maps names to configs. Prints one JSON row; everything else goes to stderr.
    python -m jaxunet.compare.step_cost CONFIGS.json
    # The cases of a file of jobs, for `step_ms` of a comparison file or --step_ms of
    # jaxunet.compare.queue. DATA is the folder of the images, as its --data.
    python -m jaxunet.compare.step_cost FILE:PART DATA >> step_ms.jsonl

A config field without an effect is an error. With `--begun`, for a comparison that has already
started with such a field, it is only logged.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import json
import math
import sys
from collections.abc import Iterable, Sequence

from absl import flags

from jaxunet.benchmark import timing
from jaxunet.benchmark.jax_side import JaxSide
from jaxunet.checkpoint.state import fresh_state
from jaxunet.compare.comparison_file import check_configs_used, read_jobs
from jaxunet.config import Config, resolve
from jaxunet.data.pipeline import decoded
from jaxunet.data.sources import open_images
from jaxunet.runtime import command, compiled_cache, rows
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import check_fields, read_json

BEGUN = flags.DEFINE_bool(
    'begun', False, 'A comparison began with these configs: log fields without an effect.'
)
ROUNDS = 11
STEPS = 8  # least number of steps of a turn


def measure(configs: dict[str, Config], rounds: int = ROUNDS) -> rows.Row:
    """Times the steps of all methods.

    Args:
      configs: name of the method -> its config; ratios are to the first.
      rounds: turns of each method.

    Returns:
      A row. `costs` has, for each method, `ms` (milliseconds per step), `ratio` (to the first
      method) and `quartiles` of the ratio; they are medians and quartiles over rounds.

    Raises:
      UserError: the data or a config does not fit, or a step failed.
    """
    first = next(iter(configs.values()))
    source = decoded(open_images(first))
    alike: dict[Config, str] = {}  # the first method with such a step
    measured_as = {name: alike.setdefault(_step_of(c), name) for name, c in configs.items()}
    sides, units = {}, []
    for name, config in configs.items():
        if measured_as[name] != name:
            continue
        # No last layers of zeros: they would make a GPU draw less power than a trained network.
        prepared = JaxSide(
            config, source, fresh_state(config.replace(model={'zero_init': False}))
        ).prepare('step')
        sides[name] = prepared.run
        units.append(prepared.unit)
        print(f'{name}: compiled', file=sys.stderr, flush=True)
    steps = steps_of_a_turn(configs.values(), units)
    for run in sides.values():
        run(steps)
    times = timing.interleave(sides, rounds=rounds, steps=steps)
    base, costs = times[next(iter(configs))], {}
    for name, method in measured_as.items():
        seconds = times[method]
        if isinstance(seconds, Exception) or isinstance(base, Exception):
            raise UserError(f'{name}: {seconds}')
        summary = timing.summarise(seconds, base)
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


def _step_of(config: Config) -> Config:
    """Returns the config without what changes only the learning rate, not the cost of a step."""
    same = {'learning_rate': 1.0, 'schedule': 'constant', 'warmup_steps': 0}
    return config.replace(seed=0, optimizer=same)


def steps_of_a_turn(configs: Iterable[Config], units: Iterable[int]) -> int:
    """Returns the steps of a turn: at least `STEPS`, in whole calls and policy updates.

    Args:
      configs: the configs; a turn is a multiple of every `timesteps.policy_every` of a policy.
      units: steps of one compiled call of each method; a turn is a multiple of all of them.
    """
    least = math.lcm(
        *units, *(c.timesteps.policy_every for c in configs if c.timesteps.sampler == 'policy')
    )
    return least * -(-STEPS // least)


def read_configs(named: str, data: str = '', *, begun: bool = False) -> dict[str, Config]:
    """Returns the configs of CONFIGS.json, or of the cases of a file of jobs, by name.

    Args:
      named: the file, or FILE:PART of jobs.
      data: folder of the images, for jobs.
      begun: as for `check_configs_used`.

    Raises:
      UserError: the file or a config is wrong, or a field has no effect in any of them.
    """
    if named.endswith('.json'):
        advice = 'expected the name of each method and its config'
        values = read_json(named, advice=advice)
        check_fields(values, {'*': dict}, named, advice=advice)
        configs = {name: resolve(value) for name, value in values.items()}
        check_configs_used(named, list(configs.values()), begun=begun)
        return configs
    configs = {}
    for job in read_jobs(named, data, begun=begun):
        if job.case not in configs:
            configs[job.case] = job.load_config()
    return configs


def main(argv: Sequence[str]) -> None:
    """Times the methods of the file on the command line and prints the row.

    Raises:
      UserError: a wrong number of arguments, or an error of `read_configs` or `measure`.
    """
    arguments = argv[1:]
    if not 1 <= len(arguments) <= 2:
        raise UserError(
            'expected CONFIGS.json, or FILE:PART of jobs and the folder of their images; found '
            f'{len(arguments)} arguments'
        )
    compiled_cache.enable_compilation_cache()
    print(json.dumps(measure(read_configs(*arguments, begun=BEGUN.value))))


if __name__ == '__main__':
    command.run(main, arguments=True)
