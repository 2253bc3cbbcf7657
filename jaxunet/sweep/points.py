"""The grid of a sweep: `--vary NAME=VALUE,VALUE,...` to axes, axes to points, and what is wrong with them before anything runs."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError, near_misses

JIT = 'jit'
BATCH_PER_DEVICE = 'batch_per_device'
OWN_AXES = {
    JIT: 'on | off: the step as one compiled program, or called from Python, an operation at a time',
    BATCH_PER_DEVICE: 'sets data.batch_size to this many images times the devices',
}
DEVICES, BATCH, WORKERS, CACHE = (
    'parallel.devices',
    'data.batch_size',
    'data.num_workers',
    'data.cache',
)


@dataclass(frozen=True)
class Axis:
    """What a sweep varies: a config field by its path, or one of `OWN_AXES`; values in the order given, the first is the baseline."""

    name: str
    values: tuple[Any, ...]

    @property
    def title(self) -> str:
        """Short, for tables."""
        return self.name.split('.')[-1]


@dataclass(frozen=True)
class Machine:
    """What there is to run on."""

    platform: str  # cpu, gpu, ...
    devices: int  # how many JAX sees
    provenance: dict[str, Any] = field(default_factory=dict)  # of every row that is measured here


@dataclass(frozen=True)
class Point:
    """One cell of the grid."""

    values: dict[str, Any]  # axis to value, in the order of the axes
    raw: dict[str, Any]  # the config as nested dicts
    jit: bool = True
    problem: str = ''  # why it cannot run; empty = it can

    @property
    def config(self) -> Config:
        return resolve(self.raw)

    @property
    def label(self) -> str:
        return ' '.join(
            f'{name.split(".")[-1]}={show(value)}' for name, value in self.values.items()
        )


def show(value: Any) -> str:
    """A value as one types it in `--vary`."""
    return (
        f'({",".join(map(str, value))}{"," if len(value) == 1 else ""})'
        if isinstance(value, list | tuple)
        else str(value)
    )


def parse_axes(texts: Iterable[str]) -> list[Axis]:
    """`NAME=VALUE,VALUE,...`, one axis a text.

    Raises:
      UserError: an unknown field, a value that is not of the field's type, a value or an axis given twice.
    """
    axes: list[Axis] = []
    for text in texts:
        name, equals, values = text.partition('=')
        if not equals or not values:
            raise UserError(
                f'--vary {text}: expected NAME=VALUE,VALUE,..., e.g. --vary precision=float32,bfloat16'
            )
        axes.append(make_axis(name.strip(), [v.strip() for v in _split(values)]))
        if name.strip() in [axis.name for axis in axes[:-1]]:
            raise UserError(f'--vary {name}: given twice; list all its values after one --vary')
    return axes


def make_axis(name: str, texts: Sequence[str]) -> Axis:
    """An axis from its values as text."""
    kind = _kind(name)
    values = tuple(_parse(name, kind, text) for text in texts)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise UserError(f'--vary {name}: {texts[i]} is given twice')
    return Axis(name, values)


def merge(preset: Sequence[Axis], given: Sequence[Axis]) -> list[Axis]:
    """The preset's axes with those values that were given, then the other axes."""
    named = {axis.name: axis for axis in given}
    return [named.pop(axis.name, axis) for axis in preset] + list(named.values())


def _split(values: str) -> list[str]:
    """At the commas that are outside of parentheses."""
    parts, depth = [''], 0
    for character in values:
        depth += {'(': 1, ')': -1}.get(character, 0)
        if character == ',' and depth == 0:
            parts.append('')
        else:
            parts[-1] += character
    return parts


def _fields(cls: type, prefix: str = '') -> dict[str, Any]:
    """Path to type of every field."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= _fields(typing.cast(type, hint), f'{name}.')
        else:
            found[prefix + name] = hint
    return found


def _kind(name: str) -> Any:
    if name == JIT:
        return JIT
    if name == BATCH_PER_DEVICE:
        return int
    known = _fields(Config)
    if name in known:
        return known[name]
    sections = {path.split('.')[0] for path in known if '.' in path}
    if name in sections:
        raise UserError(
            f'--vary {name}: is a section; vary one of its fields, e.g. {next(p for p in known if p.startswith(name + "."))}'
        )
    last = name.rsplit('.', 1)[-1]
    same = [path for path in known if path.split('.')[-1] == last]
    hint = (
        f'; did you mean {" or ".join(same)}?' if same else near_misses(name, [*known, *OWN_AXES])
    )
    raise UserError(
        f'--vary {name}: unknown field{hint}'
        + ('' if hint else f'; expected a field of the config, or {" or ".join(OWN_AXES)}')
    )


def _parse(name: str, kind: Any, text: str) -> Any:
    switches = (
        {'on': True, 'off': False}
        if kind == JIT
        else {'true': True, 'false': False}
        if kind is bool
        else {}
    )
    try:
        if kind == JIT:
            switches[text]
            return text
        if kind is bool:
            return switches[text.lower()]
        if kind is str:
            return text
        value = ast.literal_eval(text)
        if kind in (int, float):
            if type(value) is kind or (kind is float and type(value) is int):
                return value
        elif isinstance(value, tuple):
            return value  # the config checks its elements
    except (KeyError, ValueError, SyntaxError):
        pass
    expected = ' or '.join(switches) or (
        kind.__name__ if kind in (int, float) else 'a tuple such as (1,2) or (8,)'
    )
    raise UserError(f'--vary {name}: expected {expected}, found {text!r}')


def expand(base: Config, axes: Sequence[Axis], machine: Machine) -> tuple[list[Point], list[str]]:
    """All points of the grid, the first axis slowest, and notes on what was changed or left out.

    A point that cannot run carries its `problem`, and the others run. But a value with which no point can run is a mistake.

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
        notes.append(f'{merged} points left out: {WORKERS} changes nothing while {CACHE}=device')
    for axis in axes:
        for value in axis.values:
            those = [p for p in points if p.values[axis.name] == value]
            if not those:
                raise UserError(
                    f'--vary {axis.name}: {show(value)} has no effect, as {CACHE}=device; set --config.{CACHE}=stream'
                )
            if all(p.problem for p in those):
                raise UserError(
                    f'--vary {axis.name}: no point with {show(value)} can run: {those[0].problem}'
                )
    return points, notes


def _point(base: Config, values: dict[str, Any], machine: Machine) -> Point:
    raw = to_dict(base)
    for name, value in values.items():
        if name not in OWN_AXES:
            _set(raw, name, value)
    devices = raw['parallel']['devices'] or machine.devices
    if BATCH_PER_DEVICE in values:
        _set(raw, BATCH, values[BATCH_PER_DEVICE] * devices)
    if raw['data']['cache'] == 'device' and WORKERS in values:
        _set(raw, WORKERS, 0)  # so that points which would do the same are the same
    jit = values.get(JIT, 'on') == 'on'
    return Point(values, raw, jit, _problem(raw, jit, devices, machine))


def _set(raw: dict[str, Any], path: str, value: Any) -> None:
    *section, name = path.split('.')
    (raw[section[0]] if section else raw)[name] = value


def _problem(raw: dict[str, Any], jit: bool, devices: int, machine: Machine) -> str:
    """Why a point cannot run, as far as that can be told without running it."""
    try:
        config = resolve(raw)
    except UserError as error:
        return ' '.join(str(error).removeprefix('the config is not valid:\n').split())
    if machine.platform != 'cpu' and devices > machine.devices:
        return f'{DEVICES}: {devices} asked for, but this machine has {machine.devices}'
    micro = config.data.batch_size // config.optimizer.accumulate_steps
    if micro % devices:
        return f'{BATCH}: {micro} images at a time do not divide among {devices} devices'
    if config.parallel.concurrent_kernels and (not jit or devices > 1 or machine.platform != 'gpu'):
        return f'parallel.concurrent_kernels: needs one GPU and {JIT}=on; set it to False'
    if not jit and config.train.steps_per_call > 1:
        return f'{JIT}=off: runs steps one by one, found train.steps_per_call={config.train.steps_per_call}; set it to 0 or 1'
    if not jit and (devices > 1 or config.parallel.mode == 'pmap'):
        return f'{JIT}=off: runs on one device, without pmap, which always compiles; set --config.parallel.devices=1'
    return ''
