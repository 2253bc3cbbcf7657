"""Training methods by name: each sets a few fields of the config."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.sweep.points import make_axis, set_field

BASELINE = 'uniform'
# Values of fields that a method does not set itself. All other fields keep the config's values.
DEFAULTS: dict[str, object] = {'loss.weighting': 'uniform', 'timesteps.sampler': 'uniform'}
# name -> the fields that make the method. `weighting`, `timesteps`, `timestep_policy`,
# `information_rate` and `levels` of jaxunet.diffusion explain them, and docs/training.md the rest.
METHODS: dict[str, dict[str, object]] = {
    BASELINE: {},
    'v_cosine': {'diffusion.objective': 'v', 'diffusion.schedule': 'cosine'},
    # Only objectives with timesteps have a schedule; 'linear', the default, also means none.
    'edm': {'diffusion.objective': 'edm', 'diffusion.schedule': 'linear'},
    'flow': {'diffusion.objective': 'flow', 'diffusion.schedule': 'linear'},
    'min_snr': {'loss.weighting': 'min_snr'},
    'soft_min_snr': {'loss.weighting': 'soft_min_snr'},
    'p2': {'loss.weighting': 'p2'},
    'speed': {'loss.weighting': 'speed', 'timesteps.sampler': 'speed'},
    'speed_code': {'loss.weighting': 'p2', 'timesteps.sampler': 'speed_code'},
    'uncertainty': {'loss.weighting': 'uncertainty'},
    'loss_second_moment': {'timesteps.sampler': 'loss_second_moment'},
    'policy': {'timesteps.sampler': 'policy'},
    'infonoise': {'timesteps.sampler': 'infonoise'},
    'immiscible': {'data.noise_candidates': 8},
    'immiscible_assignment': {'data.noise_assignment': 'batch'},
    'muon': {'optimizer.name': 'muon'},
    'high_rate': {'optimizer.learning_rate': 8e-4},  # four times that of DDPM on CIFAR-10
    'adaptive': {'loss.weighting': 'min_snr', 'timesteps.sampler': 'adaptive'},
    'adaptive_uniform': {'timesteps.sampler': 'adaptive'},
}
Number = TypeVar('Number', int, float)
FORM = 'NAME, NAME+NAME or NAME:field=value+field=value'
# Fields, and sections ending in a dot, that are the same for all methods.
OWN = (
    'seed',
    'init_from',
    'train.',
    'evaluation.',
    'data.path',
    'data.labels',
    'data.classes',
    'data.image_size',
    'optimizer.schedule',
)


@dataclass(frozen=True)
class Method:
    """A training method: `fields` maps the paths of config fields to the values that it sets."""

    name: str
    fields: Mapping[str, object]

    def apply(self, config: Config) -> Config:
        """Returns the config with the fields of the method.

        Raises:
          UserError: a value does not fit the config.
        """
        values = to_dict(config)
        for path, value in self.fields.items():
            set_field(values, path, value)
        try:
            return resolve(values)
        except UserError as error:
            raise UserError(f'--methods {self.name}: {error}') from None


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Parses the methods of `--methods`.

    Each text is a name of `METHODS`, several names joined by +, or either of them with further
    fields, `NAME:field=value+field=value`. A new name starts from the fields of the baseline.

    Raises:
      UserError: no methods, an unknown name without fields, a name given twice, names that do not
        go together, a field that all methods share, or a field or value that the config does not
        have.
    """
    methods: list[Method] = []
    for text in texts:
        name, colon, given = text.partition(':')
        if not name or not re.fullmatch(r'[\w-]+(\+[\w-]+)*', name):
            raise UserError(
                f'--methods: expected {FORM}, with names of letters, digits, _ and -, found '
                f'{text!r}'
            )
        if name in [method.name for method in methods]:
            raise UserError(
                f'--methods: {name} is given twice; give one of them another name, as in {FORM}'
            )
        known = name in METHODS or '+' in name or not colon
        advice = f'; to define your own, write {FORM}'
        fields = named_fields(name, '--methods', advice) if known else dict(DEFAULTS)
        for assignment in given.split('+') if colon else []:
            field, value = _parse_field(name, assignment)
            fields[field] = value
        methods.append(Method(name, fields))
    if not methods:
        raise UserError(f'--methods: expected some of {", ".join(METHODS)}, found none')
    return methods


def named_fields(name: str, place: str, advice: str = '') -> dict[str, object]:
    """Returns the fields of a method: a name of `METHODS`, or several that are joined by +.

    Args:
      place: begins the messages: the flag, or the file and the key.
      advice: ends the message for an unknown name.

    Raises:
      UserError: an unknown name, or two that set one field to different values.
    """
    fields: dict[str, object] = {}
    owner: dict[str, str] = {}
    for part in name.split('+'):
        if part not in METHODS:
            raise UserError(
                f'{place}: {part!r} is not one of {", ".join(METHODS)}'
                f'{near_misses(part, METHODS)}{advice}'
            )
        for field, value in METHODS[part].items():
            if fields.get(field, value) != value:
                raise UserError(
                    f'{place}: {name}: {owner[field]} and {part} do not go together: '
                    f'{field} is {fields[field]} in one and {value} in the other; leave one out'
                )
            fields[field], owner[field] = value, part
    return DEFAULTS | fields


def _parse_field(name: str, assignment: str) -> tuple[str, object]:
    """Returns path and value of one `field=value` of the method `name`."""
    field, equals, value = assignment.partition('=')
    if not equals:
        raise UserError(f'--methods {name}: expected {FORM}, found {assignment!r}')
    if field in OWN or field.startswith(tuple(own for own in OWN if own.endswith('.'))):
        raise UserError(
            f'--methods {name}: {field} must be the same for all methods; set '
            f'--config.{field}=... instead'
        )
    try:
        return field, make_axis(field, [value]).values[0]
    except UserError as error:
        raise UserError(str(error).replace('--vary', f'--methods {name}:')) from None


def numbers_by_method(
    flag: str, texts: Sequence[str], names: Sequence[str], default: Number
) -> dict[str, Number]:
    """Parses numbers by method: `NUMBER` holds for all methods, `NAME=NUMBER` for one.

    Args:
      flag: name of the flag, for error messages.
      texts: values of the flag.
      names: names of all methods.
      default: number of methods without one; the others have its type.

    Raises:
      UserError: a text is not a positive number, a method is unknown, or one has two numbers.
    """
    kind, what = type(default), 'COUNT' if isinstance(default, int) else 'SECONDS'
    numbers: dict[str, Number] = {}
    for text in texts:
        name, equals, given = text.rpartition('=')
        try:
            number = kind(given)
        except ValueError:
            number = kind(0)
        if not 0 < number < math.inf or (equals and name not in names):
            raise UserError(
                f'{flag}: expected {what} or NAME={what}, with {what} above 0 and names of '
                f'{", ".join(names)}, found {text!r}'
            )
        if name in numbers:
            raise UserError(
                f'{flag}: there are two numbers for {name or "all methods"}, {numbers[name]:g} and '
                f'{number:g}; leave one of them out'
            )
        numbers[name] = number
    return dict.fromkeys(names, numbers.pop('', default)) | numbers
