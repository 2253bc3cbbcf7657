"""Earlier names and defaults of fields, and the identity of a config across versions."""

from __future__ import annotations

import operator

from jaxunet.config.fields import Facts
from jaxunet.config.schema import FACTS, Config, Fields

# Earlier names of fields, still read from checkpoints and .safetensors files: old -> new.
RENAMED = {
    f'{path.rpartition(".")[0]}.{facts.first_name}': path
    for path, facts in FACTS.items()
    if facts.first_name
}
# Fields of the section data that every version stores.
FIRST_DATA = {
    path.removeprefix('data.')
    for path, facts in FACTS.items()
    if path.startswith('data.') and not facts.since
}
# Ends of paths of images that have no transparency.
OPAQUE = (':', '.npz', '.bin', '.bin.gz')


def with_current_names(values: Fields, prefix: str) -> Fields:
    """Returns the fields of a section, of any version, with their names and meaning of now.

    Args:
      prefix: of the section, 'data.', or '' for the whole config.
    """
    values = {
        RENAMED.get(prefix + str(k), prefix + str(k)).removeprefix(prefix): v
        for k, v in values.items()
    }
    if prefix == 'data.' and values.get('augment') == 'edm':
        values.setdefault('augment_rule', 'earlier')  # from before there was a choice
    if prefix == 'data.' and values.keys() >= FIRST_DATA:  # a whole section, as stored
        values.setdefault('background', 'drop')
    return values


def identity(values: Fields) -> Fields:
    """Returns the values that identify a config, in the form of version 0.1.0.

    Fields have their earlier names, and later ones are left out where they have their defaults, so
    that results of earlier versions are recognised as those of the same config.

    Args:
      values: a config as nested dicts, of any version.
    """
    defaults = Config()

    def is_default(path: str, value: object) -> bool:
        if path == 'data.augment_rule':  # earlier versions had no other
            return value == 'earlier' or values['data'].get('augment') != 'edm'
        if path == 'data.background':
            opaque = str(values['data'].get('path')).endswith(OPAQUE)
            return value == 'drop' or (value == 'white' and opaque)
        default = operator.attrgetter(path)(defaults)
        return bool(default == (tuple(value) if isinstance(value, list) else value))

    def before(fields: Fields, prefix: str) -> Fields:
        stated: Fields = {}
        for name, value in fields.items():
            path = prefix + name
            facts = FACTS.get(path, Facts())
            if isinstance(value, dict):
                stated[name] = before(value, f'{name}.')
            elif facts.first_default is not None and is_default(path, value):
                stated[name] = facts.first_default
            elif not (facts.since and is_default(path, value)):
                stated[facts.first_name or name] = value
        return stated

    return before(values, '')
