"""Checks a config: field names, types, values and the relations between fields."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from typing import TypeVar

from ml_collections import ConfigDict

from jaxunet.config.relations import check_relations
from jaxunet.config.samplers import OBJECTIVE_SAMPLERS, SAMPLERS
from jaxunet.config.schema import OPS, PRECISIONS, Config, Fields, to_dict
from jaxunet.config.versions import as_now
from jaxunet.runtime import dropout_rate
from jaxunet.runtime.errors import UserError, itemized, near_misses
from jaxunet.runtime.plugins import backend_names, load_backend
from jaxunet.runtime.untrusted import plain, shown

T = TypeVar('T')

INVALID = 'the config is not valid:'  # begins the message of `resolve`
SHIPPED = ('pallas', 'cuda')  # kernel backends in this repository
CHOICES = {
    'precision': PRECISIONS,
    'init_from_order': ('', 'legacy', 'new'),
    'parallel.mode': ('jit', 'pmap'),
    'model.downsample_padding': ('symmetric', 'same'),
    'model.time_embedding': ('adm', 'ddpm'),
    'model.init': ('torch', 'ddpm'),
    'diffusion.schedule': ('linear', 'cosine'),
    'diffusion.objective': tuple(OBJECTIVE_SAMPLERS),
    'loss.weighting': ('uniform', 'min_snr', 'soft_min_snr', 'p2', 'speed', 'uncertainty'),
    'timesteps.sampler': (
        'uniform',
        'loss_second_moment',
        'speed',
        'speed_code',
        'policy',
        'adaptive',
        'infonoise',
    ),
    'evaluation.sampler': ('', *SAMPLERS),
    'evaluation.variance': ('', 'fixed_small', 'fixed_large', 'learned'),
    'evaluation.skip_schedule': ('', 'linear', 'quadratic', 'log_snr', 'karras'),
    'data.cache': ('auto', 'device', 'stream'),
    'data.augment': ('none', 'flip', 'edm'),
    'data.augment_rule': ('edm', 'earlier'),
    'data.crop': ('center', 'random'),
    'data.condition': ('image', 'grey'),
    'data.noise_assignment': ('none', 'batch'),
    'optimizer.name': ('adamw', 'adam', 'muon'),
    'optimizer.schedule': ('constant', 'cosine', 'linear'),
}
SIZES = ('data.image_size', 'model.low_res_size')
# Ranges of numbers. Each element of a tuple field must lie in the range.
POSITIVE = (
    'model.image_channels',
    'model.base_channels',
    'model.channel_mult',
    'model.num_res_blocks',
    'model.max_period',
    'model.low_res_size',
    'model.norm_groups',
    'model.norm_eps',
    'diffusion.steps',
    'diffusion.edm_std',
    'diffusion.edm_sigma_data',
    'diffusion.flow_std',
    'loss.min_snr_gamma',
    'loss.soft_min_snr_sigma',
    'loss.p2_k',
    'loss.uncertainty_features',
    'loss.uncertainty_learning_rate',
    'ema.widths',
    'timesteps.history',
    'timesteps.speed_k',
    'timesteps.policy_every',
    'timesteps.policy_probes',
    'timesteps.policy_memory',
    'timesteps.policy_learning_rate',
    'timesteps.adaptive_bins',
    'timesteps.adaptive_memory',
    'timesteps.infonoise_bins',
    'timesteps.infonoise_memory',
    'data.image_size',
    'data.batch_size',
    'data.crop_least',
    'data.noise_candidates',
    'optimizer.learning_rate',
    'optimizer.eps',
    'optimizer.accumulate_steps',
    'train.steps',
    'train.log_every',
    'train.checkpoint_every',
    'train.keep',
    'train.sample_count',
    'train.max_bad_steps',
    'evaluation.samples',
    'evaluation.batch_size',
)
NOT_NEGATIVE = (
    'seed',
    'parallel.devices',
    'model.num_heads',
    'model.num_heads_upsample',
    'model.num_head_channels',
    'model.num_classes',
    'diffusion.vlb_weight',
    'loss.p2_gamma',
    'timesteps.policy_entropy',
    'timesteps.infonoise_warmup',
    'timesteps.infonoise_pivot',
    'data.num_workers',
    'data.holdout',
    'optimizer.weight_decay',
    'optimizer.warmup_steps',
    'optimizer.clip_norm',
    'train.epochs',
    'train.steps_per_call',
    'train.sample_every',
    'train.sample_steps',
    'train.evaluate_every',
    'train.holdout_every',
    'train.keep_every',
    'train.keep_best',
    'train.spike_sigmas',
    'train.rollbacks',
    'train.check_replicas_every',
    'train.stall_seconds',
    'ema.snapshot_every',
    'evaluation.guidance_scale',
)
FRACTION = (  # [0, 1)
    'model.label_dropout',
    'optimizer.betas',
    'ema.rates',
    'timesteps.history_uniform',
)
UNIT = (  # [0, 1]
    'loss.speed_lambda',
    'loss.speed_tau',
    'timesteps.speed_tau',
    'timesteps.adaptive_uniform',
    'timesteps.infonoise_uniform',
    'timesteps.adaptive_correction',
    'evaluation.eta',
    'data.augment_probability',
    'data.crop_least',
)
# The largest values of fields that determine the size of arrays, programs or processes: far beyond
# any use, so that a typing error does not start an endless compilation.
AT_MOST = {
    'model.image_channels': 1024,
    'model.base_channels': 2**16,
    'model.channel_mult': 1024,
    'model.num_res_blocks': 64,
    'model.num_classes': 10**7,
    'diffusion.steps': 10**6,
    'loss.uncertainty_features': 2**16,
    'timesteps.history': 10**4,
    'timesteps.policy_memory': 10**6,
    'data.image_size': 2**14,
    'model.low_res_size': 2**14,
    'data.batch_size': 2**22,
    'data.num_workers': 1024,
    'train.keep': 10**6,
    'train.sample_count': 2**16,
    'evaluation.batch_size': 2**20,
}
INT32 = 2**31 - 1  # the largest integer of any field but `seed`
FLOAT32 = (2 - 2**-23) * 2.0**127  # the largest number


def split_backend(text: str, field: str = 'backend') -> tuple[str, dict[str, str]]:
    """Returns the backend that `text` names, and the ops that it assigns to other backends.

    For example, `pallas+adamw=cuda` gives `('pallas', {'adamw': 'cuda'})`.

    Args:
      text: BACKEND or BACKEND+OP=BACKEND+...
      field: the config field or flag named in errors.

    Raises:
      UserError: a backend that is not installed or does not load, an unknown op, an op given
        twice, or a backend without a kernel for the op.
    """
    base, *parts = text.split('+')
    bases = ('auto', 'xla', *backend_names())
    if base not in bases:
        raise UserError(
            f'{field}: expected one of {", ".join(bases)}, found {base!r}{_hint(base, bases)}'
        )
    changed: dict[str, str] = {}
    for part in parts:
        op, _, name = part.partition('=')
        if op not in OPS:
            raise UserError(
                f'{field}: expected {base}+OP=BACKEND with one of {", ".join(OPS)}, '
                f'found {part!r}{near_misses(op, OPS)}'
            )
        if name not in bases[1:]:
            raise UserError(
                f'{field}: {op}: expected one of {", ".join(bases[1:])}, '
                f'found {name!r}{_hint(name, bases[1:])}'
            )
        if name != 'xla' and op not in load_backend(name).ops:
            allowed = [
                'xla',
                *(other for other in backend_names() if op in load_backend(other).ops),
            ]
            raise UserError(f'{field}: {op}: expected one of {", ".join(allowed)}, found {name!r}')
        if op in changed:
            raise UserError(f'{field}: {op} is given twice in {text!r}; give it once')
        changed[op] = name
    return base, changed


def _hint(name: str, known: Sequence[str]) -> str:
    """Returns advice about an unknown backend.

    Entry points exist only after jaxunet is installed; if it is only on the path, even its own
    backends are unknown.
    """
    if name in SHIPPED:
        return (
            f'; {name} comes with jaxunet, which is not installed here: run '
            '"pip install -e ." in its folder, or install its wheel'
        )
    return near_misses(name, known)


def resolve(values: ConfigDict | Fields) -> Config:
    """Checks field names, types and values, and returns the frozen config.

    Raises:
      UserError: the config is invalid; the message lists every problem.
    """
    problems: list[str] = []
    raw = values.to_dict() if isinstance(values, ConfigDict) else values
    if not isinstance(raw, dict):
        raise UserError(
            'the config: expected the ConfigDict of default_config() with fields changed, '
            f'found {raw!r}'
        )
    config = _build(Config, raw, '', problems)
    if not problems:
        problems += _check_values(config)
    if problems:
        raise UserError(f'{INVALID}{itemized(problems)}')
    return config


def _build(section: type[T], values: object, prefix: str, problems: list[str]) -> T:
    """Returns the dataclass `section` with `values`, and appends what is wrong to `problems`."""
    if not isinstance(values, dict):
        problems.append(
            f'{prefix.rstrip(".")}: expected a section with the fields of {section.__name__}, '
            f'found {shown(values)}'
        )
        return section()
    hints = typing.get_type_hints(section)
    known = set(hints)
    values = as_now(values, prefix)
    for name in sorted(set(values) - known):
        problems.append(f'{prefix}{plain(name)}: unknown field{near_misses(name, known)}')
    built: Fields = {}
    for name in sorted(set(values) & known):
        hint, path = hints[name], prefix + name
        if dataclasses.is_dataclass(hint):
            built[name] = _build(typing.cast(type, hint), values[name], path + '.', problems)
        else:
            built[name] = _coerce(values[name], hint, path, problems)
    return section(**built)


def _coerce(
    value: object, hint: type | types.GenericAlias, path: str, problems: list[str]
) -> object:
    """Returns the value as the type of its field; appends to `problems` where it does not fit.

    Lists (from JSON) become tuples. An int is accepted for a float, and for a string in a tuple.
    """
    if isinstance(hint, types.GenericAlias):
        if not isinstance(value, list | tuple):
            problems.append(f'{path}: expected a tuple, found {value!r}; write ({value!r},)')
            return ()
        if path in SIZES and len(value) == 1 and isinstance(value[0], str):
            # Such as --config.data.image_size=16x16 on a command line.
            problems.append(
                f'{path}: expected SIDE or HEIGHT,WIDTH, such as 64 or 48,64, '
                f'found {shown(value[0])}'
            )
            return ()
        if hint.__args__[0] is str:
            # --config.data.classes=7,1 on a command line means the names '7' and '1'.
            value = [str(v) if type(v) is int else v for v in value]
        return tuple(
            _coerce(v, hint.__args__[0], f'{path}[{i}]', problems) for i, v in enumerate(value)
        )
    if hint is float and isinstance(value, int | float) and not abs(value) <= FLOAT32:
        problems.append(f'{path}: expected a finite number of float32, found {shown(value)}')
        return value
    if hint is float and type(value) is int:
        # Not converted: multipliers such as channel_mult=(1, 2) print and compare as written.
        return value
    if type(value) is not hint:
        problems.append(
            f'{path}: expected {hint.__name__}, found {value!r} ({type(value).__name__})'
        )
    return value


def _check_values(config: Config) -> list[str]:
    """Returns one line per problem of a single value, or else per problem between fields."""
    flat = {
        f'{section}.{name}' if section else name: value
        for section, fields in _sections(config).items()
        for name, value in fields.items()
    }
    problems = [
        f'{path}: expected one of {_choices(allowed)}, '
        f'found {flat[path]!r}{near_misses(str(flat[path]), allowed)}'
        for path, allowed in CHOICES.items()
        if flat[path] not in allowed
    ]
    try:
        split_backend(config.backend)
    except UserError as error:
        problems.append(str(error))
    for paths, accepts, expected in (
        (POSITIVE, lambda v: 0 < v < math.inf, 'more than 0'),
        (NOT_NEGATIVE, lambda v: 0 <= v < math.inf, '0 or more'),
        (FRACTION, lambda v: 0 <= v < 1, 'at least 0 and less than 1'),
        (UNIT, lambda v: 0 <= v <= 1, '0 to 1'),
        (('model.dropout',), dropout_rate.is_supported, dropout_rate.SUPPORTED),
    ):
        for path in paths:
            many = flat[path] if isinstance(flat[path], tuple) else (flat[path],)
            problems += [
                f'{path}: expected {expected}, found {v!r}' for v in many if not accepts(v)
            ]
    for path, value in flat.items():
        many = value if isinstance(value, tuple) else (value,)
        limit = AT_MOST.get(path, INT32)
        problems += [
            f'{path}: expected at most {limit}, found {v}'
            for v in many
            if (isinstance(v, int) or path in AT_MOST) and v > limit and path != 'seed'
        ]
    if not 0 <= config.seed < 2**32:
        problems.append(f'seed: expected 0 to {2**32 - 1}, found {config.seed}')
    return problems or check_relations(config)


def _choices(allowed: Sequence[str]) -> str:
    """Returns the values of a field that has choices, for its error; '' shows as two quotes."""
    return ', '.join(value or "''" for value in allowed)


def _sections(config: Config) -> dict[str, Fields]:
    """Returns the fields by section; the top-level fields are those of the section ''."""
    values = to_dict(config)
    return {'': {k: v for k, v in values.items() if not isinstance(v, dict)}} | {
        k: v for k, v in values.items() if isinstance(v, dict)
    }


def diff(old: Config, new: Config) -> list[str]:
    """Returns a line `section.field: old -> new` for every field that differs."""
    a, b = _sections(old), _sections(new)
    return [
        f'{section + "." if section else ""}{name}: {a[section][name]!r} -> {b[section][name]!r}'
        for section in a
        for name in a[section]
        if a[section][name] != b[section][name]
    ]
