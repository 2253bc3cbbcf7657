"""Training methods by name: each is a few fields of the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.sweep.points import make_axis

BASELINE = 'uniform'
# name -> fields; what `jaxunet.diffusion.weighting`, `jaxunet.diffusion.timesteps` and `jaxunet.diffusion.timestep_policy` explain.
METHODS: dict[str, dict[str, str]] = {
    BASELINE: {'loss.weighting': 'uniform', 'timesteps.sampler': 'uniform'},
    'min_snr': {'loss.weighting': 'min_snr', 'timesteps.sampler': 'uniform'},
    'soft_min_snr': {'loss.weighting': 'soft_min_snr', 'timesteps.sampler': 'uniform'},
    'p2': {'loss.weighting': 'p2', 'timesteps.sampler': 'uniform'},
    'speed': {'loss.weighting': 'speed', 'timesteps.sampler': 'speed'},
    'uncertainty': {'loss.weighting': 'uncertainty', 'timesteps.sampler': 'uniform'},
    'loss_second_moment': {'loss.weighting': 'uniform', 'timesteps.sampler': 'loss_second_moment'},
    'policy': {'loss.weighting': 'uniform', 'timesteps.sampler': 'policy'},
    'adaptive': {'loss.weighting': 'min_snr', 'timesteps.sampler': 'adaptive'},
}
Number = TypeVar('Number', int, float)
FORM = 'NAME or NAME:field=value+field=value'
# A comparison sets these itself.
OWN = (
    'seed',
    'init_from',
    'train.',
    'evaluation.',
    'data.path',
    'data.classes',
    'data.image_size',
    'optimizer.schedule',
)


@dataclass(frozen=True)
class Method:
    """A name, and the config fields that it sets."""

    name: str
    fields: dict[str, Any]

    def apply(self, config: Config) -> Config:
        """Raises UserError: values that do not fit the config."""
        values = to_dict(config)
        for path, value in self.fields.items():
            *section, last = path.split('.')
            (values[section[0]] if section else values)[last] = value
        try:
            return resolve(values)
        except UserError as error:
            raise UserError(f'--methods {self.name}: {error}') from None


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """`NAME` of `METHODS`, or `NAME:field=value+field=value`: those fields besides its own; any new name starts from the baseline.

    Raises:
      UserError: an unknown name without fields, one twice, or a field or value that the config has not.
    """
    methods: list[Method] = []
    for text in texts:
        name, colon, given = text.partition(':')
        if not name or not name.replace('_', '').replace('-', '').isalnum():
            raise UserError(
                f'--methods: expected {FORM}, with names of letters, digits, _ and -, found {text!r}'
            )
        if name not in METHODS and not colon:
            raise UserError(
                f'--methods: {name!r} is none of {", ".join(METHODS)}{near_misses(name, METHODS)}; to name your own, write {FORM}'
            )
        if name in [method.name for method in methods]:
            raise UserError(
                f'--methods: {name} is there twice; give one of them another name, as in {FORM}'
            )
        fields: dict[str, Any] = dict(METHODS.get(name, METHODS[BASELINE]))
        for assignment in given.split('+') if colon else []:
            field, equals, value = assignment.partition('=')
            if not equals:
                raise UserError(f'--methods {name}: expected {FORM}, found {assignment!r}')
            if field in OWN or field.startswith(tuple(own for own in OWN if own.endswith('.'))):
                raise UserError(
                    f'--methods {name}: {field} must be the same for all methods; set --config.{field}=... instead'
                )
            try:
                fields[field] = make_axis(field, [value]).values[0]
            except UserError as error:
                raise UserError(str(error).replace('--vary', f'--methods {name}:')) from None
        methods.append(Method(name, fields))
    if not methods:
        raise UserError(f'--methods: expected some of {", ".join(METHODS)}, found none')
    return methods


def parse_counts(
    flag: str, texts: Sequence[str], names: Sequence[str], default: int
) -> dict[str, int]:
    """Of each method, from `COUNT` for all and `NAME=COUNT`. Raises UserError: no counts, or a method that is not compared."""

    def read(text: str) -> int:
        return int(text) if text.isascii() and text.isdigit() else 0

    return _by_method(flag, 'COUNT', texts, names, default, read)


def parse_seconds(
    flag: str, texts: Sequence[str], names: Sequence[str], default: float
) -> dict[str, float]:
    """Of each method, from `SECONDS` for all and `NAME=SECONDS`. Raises UserError: no times, or a method that is not compared."""

    def read(text: str) -> float:
        try:
            return float(text) if math.isfinite(float(text)) else 0.0
        except ValueError:
            return 0.0

    return _by_method(flag, 'SECONDS', texts, names, default, read)


def _by_method(
    flag: str,
    what: str,
    texts: Sequence[str],
    names: Sequence[str],
    default: Number,
    read: Callable[[str], Number],
) -> dict[str, Number]:
    """`read` gives 0 for what is no number above 0."""
    told: dict[str, Number] = {}
    for text in texts:
        name, equals, given = text.rpartition('=')
        number = read(given)
        if number <= 0 or (equals and name not in names):
            raise UserError(
                f'{flag}: expected {what} or NAME={what}, with names of {", ".join(names)}, found {text!r}'
            )
        if name in told:
            raise UserError(
                f'{flag}: there are two numbers for {name or "all methods"}, {told[name]:g} and {number:g}; leave one of them out'
            )
        told[name] = number
    return dict.fromkeys(names, told.pop('', default)) | told
