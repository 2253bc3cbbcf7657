"""Writes a config as a config file."""

from __future__ import annotations

from jaxunet.config import Config, to_dict
from jaxunet.config.schema import Fields

TEMPLATE = """\"\"\"{title}.\"\"\"

from jaxunet.config import default_config


def get_config():
    config = default_config()
{changes}    return config
"""


def config_file(title: str, raw: Fields) -> str:
    """Returns a config as the text of a config file: the fields that differ from the defaults.

    Args:
      title: begins the file.
      raw: the config as nested dicts.
    """
    default = to_dict(Config())
    changed = []
    for name, value in raw.items():
        if isinstance(value, dict):
            changed += [
                (f'{name}.{field}', v) for field, v in value.items() if v != default[name][field]
            ]
        elif value != default[name]:
            changed.append((name, value))
    return TEMPLATE.format(
        title=title, changes=''.join(f'    config.{path} = {value!r}\n' for path, value in changed)
    )
