"""Names the fields of a config that the compiled step depends on.

The others may change without compiling the step again.
"""

from __future__ import annotations

from jaxunet.config import Config, to_dict
from jaxunet.config.schema import FACTS, Fields


def relevant(config: Config) -> Fields:
    """Returns the fields of a config that the compiled step depends on, as nested dicts."""

    def inside(fields: Fields, prefix: str) -> Fields:
        return {
            name: inside(value, f'{name}.') if isinstance(value, dict) else value
            for name, value in fields.items()
            if not FACTS[prefix + name].outside_step
        }

    fields = inside(to_dict(config), '')
    if config.picture_path:
        fields['data']['condition'] = 'folder'
    return fields
