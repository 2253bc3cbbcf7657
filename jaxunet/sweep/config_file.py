"""Writes a point of a sweep as a config file."""

from __future__ import annotations

from jaxunet.config import Config, to_dict
from jaxunet.sweep.points import Point

TEMPLATE = """\"\"\"Point of a sweep: {label}.\"\"\"

from jaxunet.config import default_config


def get_config():
    config = default_config()
{changes}    return config
"""


def config_file(point: Point) -> str:
    """Returns a point as the text of a config file: the fields that differ from the defaults."""
    default = to_dict(Config())
    changed = []
    for name, value in point.raw.items():
        if isinstance(value, dict):
            changed += [
                (f'{name}.{field}', v) for field, v in value.items() if v != default[name][field]
            ]
        elif value != default[name]:
            changed.append((name, value))
    return TEMPLATE.format(
        label=point.label,
        changes=''.join(f'    config.{path} = {value!r}\n' for path, value in changed),
    )
