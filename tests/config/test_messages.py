"""The messages that wrong values of each field give, word for word, in messages.txt.

After messages improve, write that file again, from the root of the checkout:
PYTHONPATH=. python tests/config/test_messages.py > tests/config/messages.txt
"""

import dataclasses
import pathlib
import typing

from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.checks import INVALID
from jaxunet.config.unused import check_used
from jaxunet.runtime.errors import UserError

DEFAULTS = to_dict(Config())
MESSAGES = pathlib.Path(__file__).with_name('messages.txt')
# Values by the type of a field: of other types, at the ends of ranges and beyond, and different
# from defaults, which have no effect where a field belongs to another choice than the default one.
VALUES = {
    bool: (0, True, False),
    int: ('a', 1.5, True, -2, -1, 0, 1, 3, 2**32),
    float: ('a', True, float('nan'), -0.5, 0, 1e-6, 0.7, 1, 1.5, 1e6),
    str: (3, '', 'x'),
}


def fields():
    """Yields (section, name, type, default) of each field; the section '' has the top level's."""
    for section in dataclasses.fields(Config):
        value = getattr(Config(), section.name)
        if not dataclasses.is_dataclass(value):
            yield '', section.name, type(value), value
            continue
        for name, hint in typing.get_type_hints(type(value)).items():
            yield section.name, name, hint, getattr(value, name)


def values(hint, default):
    if hint is str:
        return dict.fromkeys((*VALUES[str], f'{default}x'))  # the last is near a choice
    if hint in VALUES:
        return VALUES[hint]
    (element, _) = typing.get_args(hint)
    return 3, (), ('8x8',), *((value,) for value in VALUES[element])


def message(section, name, value):
    """Returns the message for one value in the default config; None if it is valid."""
    changed = {name: value}
    try:
        check_used(
            resolve(DEFAULTS | ({section: DEFAULTS[section] | changed} if section else changed))
        )
    except UserError as error:
        return str(error).removeprefix(INVALID).strip()
    return None


def messages():
    """Returns the text of messages.txt: under the path of each field, a line `VALUE: MESSAGE`."""
    lines = []
    for section, name, hint, default in fields():
        lines.append(f'{section}.{name}' if section else name)
        for value in values(hint, default):
            text = message(section, name, value)
            lines += [f'  {value!r}: {text}'] if text is not None else []
    return '\n'.join(lines) + '\n'


def test_every_wrong_value_gives_its_message():
    assert messages() == MESSAGES.read_text(encoding='utf-8')


if __name__ == '__main__':
    print(messages(), end='')
