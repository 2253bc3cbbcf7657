"""The flag `--config`: a config file, and fields that the command line sets."""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
import sys
from collections.abc import Sequence

from absl import flags, logging
from ml_collections import config_flags
from ml_collections.config_flags.tuple_parser import TupleParser

from jaxunet.config import recipes, schema
from jaxunet.config.config_file import ConfigFile, config_error
from jaxunet.config.fields import similar_fields
from jaxunet.config.versions import RENAMED
from jaxunet.runtime import command
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import expanded

flags.disclaim_key_flags()  # --help of a command lists --config as its own


def _check_overrides(argv: Sequence[str]) -> None:
    """Checks the config files and the fields that the command line names.

    ml_collections reports the same mistakes, but with less detail.

    Raises:
      UserError: `--config=FILE` names no Python file or is given twice, or `--config.a.b=...` names
        an unknown field, a section, or a tuple field that was set before.
    """
    defaults = schema.Config()
    values = schema.to_dict(defaults) | schema.by_path(defaults)
    seen, files = set[str](), list[str]()
    for argument, following in itertools.pairwise([*argv[1:], '']):
        file = following if argument == '--config' else ''
        if argument.startswith('--config='):
            file = argument.removeprefix('--config=')
        if file:
            recipes.located(expanded(file))
            files.append(file)
        if len(files) > 1:
            raise UserError(f'--config: {files[0]} and {files[1]} are given; give one of them')
        match = re.match(r'--(?:no)?config\.([^=]+)', argument)
        if match is None:
            continue
        field = match[1]
        if field not in values:
            raise UserError(f'--config.{field}: unknown field{similar_fields(field, values)}')
        if field in seen and isinstance(values[field], tuple):
            raise UserError(
                f'--config.{field}: given twice, which would join the values; '
                'give it once, with commas: 32,64'
            )
        if isinstance(values[field], dict):
            example = next(iter(values[field]))
            raise UserError(
                f'--config.{field}: is a section; '
                f'set one of its fields, e.g. --config.{field}.{example}=...'
            )
        seen.add(field)


def _with_new_names(argv: Sequence[str]) -> list[str]:
    """Returns the command line with the new names of fields, and with --config for -config."""

    def renamed(argument: str) -> str:
        argument = re.sub(r'^-(?=(no)?config([.=]|$))', '--', argument)
        field, equals, value = argument.removeprefix('--config.').partition('=')
        if not argument.startswith('--config.') or field not in RENAMED:
            return argument
        logging.warning('--config.%s is now --config.%s', field, RENAMED[field])
        return f'--config.{RENAMED[field]}{equals}{value}'

    return [renamed(argument) for argument in argv]


def _element(text: str) -> object:
    """Returns the number that a text writes as Python would, which a field of texts turns back."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if type(value) in (int, float) and str(value) == text else text


class _Tuples(TupleParser):
    """Parses tuples as ml_collections does, and also unquoted texts: `cat,big dog` is two strings.

    Nothing after the = is the empty tuple.
    """

    def parse(self, argument: object) -> tuple[object, ...]:
        """Returns the tuple that `argument` stands for."""
        if isinstance(argument, str) and not argument.strip():
            return ()
        if isinstance(argument, str) and not argument.lstrip().startswith(tuple('([{"\'')):
            try:
                ast.literal_eval(argument)
            except (ValueError, SyntaxError):
                return tuple(_element(part.strip()) for part in argument.split(',') if part.strip())
        return super().parse(argument)


config_flags.register_flag_parser_for_type(tuple, _Tuples())
for kind, parser in (
    (int, flags.IntegerParser()),
    (float, flags.FloatParser()),
    (bool, flags.BooleanParser()),
):
    config_flags.register_flag_parser_for_type(kind, command.Worded(parser))


def define_config() -> flags.FlagHolder:
    """Defines `--config FILE`, with overrides `--config.section.field=value`.

    Without a file, the values are the defaults of `jaxunet.config`.

    Returns:
      absl's flag holder; its `value` is a locked `ConfigDict`.
    """
    try:
        # Checked here because ml_collections applies overrides of the default file while it
        # defines the flag.
        sys.argv[:] = _with_new_names(sys.argv)
        _check_overrides(sys.argv)
        help_text = (
            f'Config file (Python, with get_config()), or a recipe: {", ".join(recipes.names())}; '
            'without one, the defaults, which train on the embedded digits. '
            '--config.SECTION.FIELD=VALUE sets a field of jaxunet/config/schema.py.'
        )
        holder = config_flags.DEFINE_config_file(
            'config', schema.__file__, help_text, lock_config=True
        )
    except UserError as error:
        command.fail(error)
    except Exception as error:
        command.fail(UserError(config_error(error)))
    return _with_own_reader(holder)


def config_name() -> str:
    """Returns `NAME` of `--config NAME` or `--config FOLDER/NAME.py`; `digits` without a file."""
    path = config_flags.get_config_filename(flags.FLAGS['config'])
    return 'digits' if path == schema.__file__ else pathlib.Path(path.split(':')[0]).stem


def named_fields(holder: flags.FlagHolder) -> tuple[str, ...]:
    """Returns the paths of the fields that the command line sets, such as data.path."""
    return tuple(config_flags.get_override_values(flags.FLAGS[holder.name]))


def define_optional_config(help_text: str) -> flags.FlagHolder:
    """Defines `--config FILE` with value None unless given; returns absl's flag holder."""
    return _with_own_reader(
        config_flags.DEFINE_config_file('config', None, help_text, lock_config=True)
    )


def _with_own_reader(holder: flags.FlagHolder) -> flags.FlagHolder:
    """Makes the flag read its file with `ConfigFile`; a field that this lacks is a UserError."""
    flag = flags.FLAGS[holder.name]
    flag.parser = ConfigFile()
    parse = flag.parse

    def explained(argument: str) -> None:
        try:
            parse(argument)
        except (UserError, flags.Error):
            raise
        except Exception as error:
            raise UserError(config_error(error)) from None

    flag.parse = explained  # type: ignore[method-assign]
    return holder
