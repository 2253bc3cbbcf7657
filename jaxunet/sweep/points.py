"""The grid of a sweep: parses `--vary NAME=VALUE,VALUE,...` into axes, and expands axes to points.

It finds mistakes, and points that cannot run, before anything runs.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.checks import INVALID
from jaxunet.config.fields import similar_fields
from jaxunet.config.schema import Fields
from jaxunet.runtime.errors import UserError, plural
from jaxunet.runtime.rows import Row

JIT = 'jit'
BATCH_PER_DEVICE = 'batch_per_device'
# jit: the step runs as one compiled program (on) or operation by operation from Python (off).
# batch_per_device: images per device; sets data.batch_size to this times the devices.
OWN_AXES = (JIT, BATCH_PER_DEVICE)
SEPARATOR = re.compile(r',(?![^(]*\))')  # a comma outside parentheses
DEVICES, BATCH, WORKERS, CACHE = (
    'parallel.devices',
    'data.batch_size',
    'data.num_workers',
    'data.cache',
)


@dataclass(frozen=True)
class Axis:
    """One thing that a sweep varies.

    Fields:
      name: path of a config field, or one of `OWN_AXES`.
      values: in the order given; the first is the baseline.
    """

    name: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class Machine:
    """The machine that the points run on.

    Fields:
      platform: cpu, gpu, ...
      devices: number of devices that JAX sees.
      provenance: device, versions and commit for every row (`runtime.rows.provenance`).
      auto: the backend that `backend=auto` takes for each op, by precision; empty where it follows
        no measurements of this kind of device.
    """

    platform: str
    devices: int
    provenance: Row = field(default_factory=dict)
    auto: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """One cell of the grid.

    Fields:
      values: axis -> value, in the order of the axes.
      raw: the config as nested dicts.
      jit: True if the step is compiled as one program.
      problem: reason for which the point cannot run; '' if it can.
    """

    values: dict[str, object]
    raw: Fields
    jit: bool = True
    problem: str = ''

    @property
    def config(self) -> Config:
        """The resolved config. Raises UserError if it is not valid."""
        return resolve(self.raw)

    @property
    def label(self) -> str:
        """The values in one short line."""
        return label(self.values)


def show(value: object) -> str:
    """Returns a value as text, in the form of `--vary`."""
    if isinstance(value, list | tuple):
        return f'({",".join(map(str, value))}{"," if len(value) == 1 else ""})'
    return str(value)


def label(values: Mapping[str, object]) -> str:
    """Returns values by axis as short text, such as `precision=float32 devices=2`."""
    return ' '.join(f'{name.split(".")[-1]}={show(value)}' for name, value in values.items())


def named(values: Mapping[str, object]) -> str:
    """Returns values by axis as text, such as `precision=float32, parallel.devices=2`."""
    return ', '.join(f'{name}={show(value)}' for name, value in values.items())


def parse_axes(texts: Iterable[str]) -> list[Axis]:
    """Parses axes, one `NAME=VALUE,VALUE,...` each.

    Raises:
      UserError: an unknown field, a value of another type than the field's, or a value or axis
        given twice.
    """
    axes: list[Axis] = []
    for text in texts:
        name, equals, values = text.partition('=')
        if not equals or not values:
            raise UserError(
                f'--vary {text}: expected NAME=VALUE,VALUE,..., e.g. --vary '
                'precision=float32,bfloat16'
            )
        axes.append(make_axis(name.strip(), [v.strip() for v in SEPARATOR.split(values)]))
        if name.strip() in [axis.name for axis in axes[:-1]]:
            raise UserError(f'--vary {name}: given twice; list all its values after one --vary')
    return axes


def make_axis(name: str, texts: Sequence[str]) -> Axis:
    """Returns the axis `name` with its values parsed from text.

    Raises:
      UserError: an unknown field, a value of another type than the field's, or a value given twice.
    """
    kind = _kind(name)
    values = tuple(_parse(name, kind, text) for text in texts)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise UserError(f'--vary {name}: {texts[i]} is given twice')
    return Axis(name, values)


def merge(preset: Sequence[Axis], given: Sequence[Axis]) -> list[Axis]:
    """Returns the axes of a preset; given axes replace those of the same name, or are added."""
    named = {axis.name: axis for axis in given}
    return [named.pop(axis.name, axis) for axis in preset] + list(named.values())


def _fields(cls: type, prefix: str = '') -> dict[str, object]:
    """Returns path -> type of every field."""
    fields: dict[str, object] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            fields |= _fields(typing.cast(type, hint), f'{name}.')
        else:
            fields[prefix + name] = hint
    return fields


def _kind(name: str) -> object:
    """Returns the type of an axis' values, or `JIT`. Raises UserError if there is no such field."""
    if name == JIT:
        return JIT
    if name == BATCH_PER_DEVICE:
        return int
    known = _fields(Config)
    if name in known:
        return known[name]
    sections = {path.split('.')[0] for path in known if '.' in path}
    if name in sections:
        example = next(path for path in known if path.startswith(f'{name}.'))
        raise UserError(f'--vary {name}: is a section; vary one of its fields, e.g. {example}')
    hint = similar_fields(name, [*known, *OWN_AXES])
    raise UserError(
        f'--vary {name}: unknown field{hint}'
        + ('' if hint else f'; expected a field of the config, or {" or ".join(OWN_AXES)}')
    )


def _parse(name: str, kind: object, text: str) -> object:
    """Parses a value of type `kind` (`_kind`). Raises UserError if the text is not of this type."""
    if kind is str:
        return text
    if kind == JIT:
        expected = 'on or off'
        if text in ('on', 'off'):
            return text
    elif kind is bool:
        expected = 'true or false'
        if text.lower() in ('true', 'false'):
            return text.lower() == 'true'
    else:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = None
        if kind is int or kind is float:
            expected = 'int' if kind is int else 'float'
            if type(value) is kind or (kind is float and type(value) is int):
                return value
        else:
            expected = 'a tuple such as (1,2) or (8,)'
            if isinstance(value, tuple):
                return value  # the config checks its elements
    raise UserError(f'--vary {name}: expected {expected}, found {text!r}')


def expand(base: Config, axes: Sequence[Axis], machine: Machine) -> tuple[list[Point], list[str]]:
    """Returns all points of the grid, and notes on what was changed or left out.

    The first axis varies slowest. A point that cannot run keeps its `problem`, and the others run.
    A value with which no point can run is an error.

    Args:
      base: the config that the axes change.
      axes: the axes; at least one.
      machine: the machine that the points will run on.

    Raises:
      UserError: no axes, axes that contradict each other, or a value that no point can have.
    """
    names = [axis.name for axis in axes]
    if not axes:
        raise UserError('--vary: nothing to vary; give --vary NAME=VALUE,VALUE,... or --preset')
    if BATCH in names and BATCH_PER_DEVICE in names:
        raise UserError(
            f'--vary: {BATCH} and {BATCH_PER_DEVICE} set the same field; vary one of them'
        )
    notes = []
    if WORKERS in names and CACHE not in names and base.data.cache == 'auto':
        base = base.replace(data={'cache': 'stream'})
        notes.append(
            f'{CACHE}: stream instead of auto, as a set that lies in device memory needs no workers'
        )
    points: list[Point] = []
    merged = 0
    for values in itertools.product(*(axis.values for axis in axes)):
        point = _point(base, dict(zip(names, values, strict=True)), machine)
        twins = [p for p in points if (p.raw, p.jit) == (point.raw, point.jit)]
        merged += len(twins)
        points += [] if twins else [point]
    if merged:
        notes.append(
            f'{plural(merged, "point")} left out: {WORKERS} changes nothing while {CACHE}=device'
        )
    for axis in axes:
        for value in axis.values:
            those = [p for p in points if p.values[axis.name] == value]
            if not those:
                raise UserError(
                    f'--vary {axis.name}: {show(value)} has no effect, as {CACHE}=device; set '
                    f'--config.{CACHE}=stream'
                )
            if all(p.problem for p in those):
                raise UserError(
                    f'--vary {axis.name}: no point with {show(value)} can run: {those[0].problem}'
                )
    return points, notes


def _point(base: Config, values: dict[str, object], machine: Machine) -> Point:
    raw = to_dict(base)
    for name, value in values.items():
        if name not in OWN_AXES:
            set_field(raw, name, value)
    devices = raw['parallel']['devices'] or machine.devices
    per_device = values.get(BATCH_PER_DEVICE)
    if isinstance(per_device, int):
        set_field(raw, BATCH, per_device * devices)
    if raw['data']['cache'] == 'device' and WORKERS in values:
        set_field(raw, WORKERS, 0)  # points that differ only in idle workers are then equal
    jit = values.get(JIT, 'on') == 'on'
    return Point(values, raw, jit, _problem(raw, jit, devices, machine))


def set_field(raw: Fields, path: str, value: object) -> None:
    """Sets the field with this dotted path in a config as nested dicts; adds missing sections.

    A path that no config has is set too; the check of the config then reports it.
    """
    section, dot, name = path.partition('.')
    inside = raw.setdefault(section, {}) if dot else None
    if isinstance(inside, dict):
        inside[name] = value
    else:
        raw[path] = value


def _problem(raw: Fields, jit: bool, devices: int, machine: Machine) -> str:
    """Returns a reason, known before it runs, for which a point cannot run; '' if there is none."""
    try:
        config = resolve(raw)
    except UserError as error:
        return ' '.join(str(error).removeprefix(INVALID).split())
    if machine.platform != 'cpu' and devices > machine.devices:
        return f'{DEVICES}: {devices} asked for, but this machine has {machine.devices}'
    micro = config.data.batch_size // config.optimizer.accumulate_steps
    if micro % devices:
        return f'{BATCH}: {micro} images at a time do not divide among {devices} devices'
    if not jit and config.train.steps_per_call > 1:
        return (
            f'{JIT}=off: runs steps one by one, found '
            f'train.steps_per_call={config.train.steps_per_call}; set it to 0 or 1'
        )
    if not jit and (devices > 1 or config.parallel.mode == 'pmap'):
        return (
            f'{JIT}=off: runs on one device, without pmap, which always compiles; set '
            '--config.parallel.devices=1'
        )
    return ''
