"""Finds fields that have no effect, because they belong to another choice than the config's.

Examples: a field of another timestep sampler, loss weighting or objective; how to space timesteps
where none are skipped.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from absl import logging

from jaxunet.config.checks import INVALID
from jaxunet.config.samplers import evaluation_sampler
from jaxunet.config.schema import CHOICES, FACTS, Config
from jaxunet.runtime.errors import UserError, itemized

Choice = tuple[str, object]  # path of a field, and the value that it must have

SPACING = 'evaluation.skip_schedule'


def check_used(*configs: Config, earlier: Sequence[Config] = ()) -> None:
    """Checks that every value of these fields, except defaults, has an effect in some config.

    Args:
      configs: all configs of one command, so that a value may serve one point of a sweep only.
      earlier: configs with which the same run began. A value that one of them has is logged
        instead, so that the run can go on.

    Raises:
      UserError: a value has no effect; the message says to which choice it belongs.
    """
    found = [
        (path, _problems(configs, path, choice))
        for path, choices in owners().items()
        for choice in choices
    ]
    problems = []
    for path, each in [*found, (SPACING, _idle_spacings(configs))]:
        begun = [operator.attrgetter(path)(config) for config in earlier]
        for value, problem in each:
            if value in begun:
                logging.warning('%s', problem)
            else:
                problems.append(problem)
    if problems:
        raise UserError(f'{INVALID}{itemized(problems)}')


def owners() -> dict[str, tuple[Choice, ...]]:
    """Returns the fields that belong to choices, by their paths."""
    choosers: dict[str, tuple[Choice, ...]] = {}
    for chooser in (path for path, facts in FACTS.items() if facts.prefixes):
        section = chooser.partition('.')[0]
        for choice in CHOICES[chooser]:
            begins = f'{section}.{choice}_'
            choosers |= {path: ((chooser, choice),) for path in FACTS if path.startswith(begins)}
    return choosers | {path: facts.belongs_to for path, facts in FACTS.items() if facts.belongs_to}


def _problems(configs: Sequence[Config], path: str, choice: Choice) -> Iterator[tuple[object, str]]:
    """Yields each value of the field that has no effect, and a line about it."""
    chooser, needed = choice
    chosen: dict[object, list[object]] = {}  # by value of the field
    for config in configs:
        found = operator.attrgetter(chooser)(config)
        if chooser == 'diffusion.objective' and needed == config.diffusion.prediction:
            found = needed  # the noise levels in which a consistency model is trained
        chosen.setdefault(operator.attrgetter(path)(config), []).append(found)
    for value, found in chosen.items():
        if value != operator.attrgetter(path)(Config()) and needed not in found:
            others = ', '.join(dict.fromkeys(str(one) or "''" for one in found))
            yield (
                value,
                f'{path}: {value} has no effect: it belongs to {chooser}={needed}, '
                f'found {others}; leave it out',
            )


def _idle_spacings(configs: Sequence[Config]) -> Iterator[tuple[object, str]]:
    """Yields each spacing of timesteps that decides nothing, and a line about it.

    There is one way to choose all timesteps, and one way to choose a single one.
    """
    idle: dict[str, str] = {}
    used = {''}
    for config in configs:
        spacing, total = config.evaluation.skip_schedule, config.diffusion.steps
        steps = evaluation_sampler(config).steps or total
        if config.diffusion.continuous or 1 < steps < total:
            used.add(spacing)
        else:
            idle[spacing] = (
                f'{SPACING}: {spacing} has no effect on {steps} of {total} timesteps; leave it '
                f'out, or set evaluation.steps to 2 to {total - 1}'
            )
    yield from ((spacing, line) for spacing, line in idle.items() if spacing not in used)
