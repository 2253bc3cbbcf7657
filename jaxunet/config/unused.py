"""Finds fields that belong to another timestep sampler or loss weighting than the chosen one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from absl import logging

from jaxunet.config.checks import CHOICES, INVALID
from jaxunet.config.schema import Config, to_dict
from jaxunet.runtime.errors import UserError, itemized

# The fields that choose; the others of their sections belong to one choice each.
CHOOSERS = {'loss': 'weighting', 'timesteps': 'sampler'}
# Fields whose names do not begin with the name of their choice.
OWNERS = {'history': 'loss_second_moment', 'history_uniform': 'loss_second_moment'}


def check_used(*configs: Config, earlier: Sequence[Config] = ()) -> None:
    """Checks that every value of these fields, except defaults, has an effect in some config.

    Args:
      configs: all configs of one command, so that a value may serve one point of a sweep only.
      earlier: configs with which the same run began. A value that one of them has is logged
        instead, so that the run can go on.

    Raises:
      UserError: a value has no effect; the message says to which sampler or weighting it belongs.
    """
    problems = []
    for section, chooser in CHOOSERS.items():
        for name in _owned(section):
            begun = [to_dict(config)[section][name] for config in earlier]
            for value, problem in _problems(configs, section, chooser, name):
                if value in begun:
                    logging.warning('%s', problem)
                else:
                    problems.append(problem)
    if problems:
        raise UserError(f'{INVALID}{itemized(problems)}')


def owner(section: str, name: str) -> str:
    """Returns the weighting (section `loss`) or sampler (`timesteps`) that a field belongs to."""
    choices = CHOICES[f'{section}.{CHOOSERS[section]}']
    return OWNERS.get(name) or next(c for c in choices if name.startswith(f'{c}_'))


def _owned(section: str) -> list[str]:
    return [name for name in to_dict(Config())[section] if name != CHOOSERS[section]]


def _problems(
    configs: Sequence[Config], section: str, chooser: str, name: str
) -> Iterator[tuple[object, str]]:
    """Returns each value of the field that has no effect, and a line about it."""
    default, needed = to_dict(Config())[section][name], owner(section, name)
    chosen: dict[object, list[str]] = {}  # by value of the field
    for config in configs:
        fields = to_dict(config)[section]
        chosen.setdefault(fields[name], []).append(fields[chooser])
    for value, found in chosen.items():
        if value != default and needed not in found:
            yield (
                value,
                f'{section}.{name}: {value} has no effect: it belongs to '
                f'{section}.{chooser}={needed}, found {", ".join(dict.fromkeys(found))}; '
                'leave it out',
            )
