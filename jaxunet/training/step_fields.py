"""The fields of a config that the compiled step depends on: the others may change without compiling it again."""

from __future__ import annotations

from typing import Any

from jaxunet.config import Config, to_dict

# Sections and fields of the config that no step is made from: they say what is done around it.
APART = ('init_from', 'evaluation')
APART_FIELDS = {
    'data': ('path', 'num_workers', 'cache', 'classes'),
    'train': (
        'steps_per_call',
        'sample_every',
        'sample_count',
        'sample_steps',
        'evaluate_every',
        'checkpoint_every',
        'keep',
        'max_bad_steps',
    ),
}


def relevant(config: Config) -> dict[str, Any]:
    """The fields of the config that the step is made from."""
    raw = {name: value for name, value in to_dict(config).items() if name not in APART}
    return raw | {
        section: {k: v for k, v in raw[section].items() if k not in fields}
        for section, fields in APART_FIELDS.items()
    }
