"""Shared by all commands: flags, the config, and the compilation cache."""

from __future__ import annotations

import ast
import contextlib
import difflib
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence

import jax
from absl import flags, logging
from ml_collections import config_flags
from ml_collections.config_flags.tuple_parser import TupleParser

from jaxunet.config import default_config, recipes, schema
from jaxunet.config.config_file import ConfigFile, config_error
from jaxunet.config.schema import Fields
from jaxunet.config.versions import RENAMED
from jaxunet.runtime import command, ownership
from jaxunet.runtime.download import cache_dir
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import expanded

HELP = {'?', 'help', 'helpfull', 'helpshort', 'helpxml'}
flags.disclaim_key_flags()  # --help of a command lists --config as its own


def run(main: Callable[[Sequence[str]], int | None], *, arguments: bool = False) -> None:
    """Parses the flags and runs `main`, as `jaxunet.runtime.command.run` does.

    Args:
      arguments: `main` takes arguments that are not flags, and checks them; else they are errors.
    """
    command.run(main, _parse, arguments=arguments)


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(list(argv))
    except UserError:
        raise
    except flags.Error as error:
        raise UserError(f'{_flag_error(str(error))}\nSee --help.') from None
    except SystemExit as ended:
        helped = {argument.lstrip('-') for argument in argv} & HELP
        sys.exit(0 if helped and ended.code == 1 else ended.code)  # absl's --help ends with 1
    except Exception as error:
        raise UserError(config_error(error)) from None


def _flag_error(text: str) -> str:
    """Returns absl's message, in other words where it shows Python's."""
    text = re.sub(
        r'^flag --(\w+)=None: .* must have a value other than None\.$', r'--\1: missing', text
    )
    text = re.sub(
        r": \('Non-boolean argument to boolean flag', (.*)\)$",
        r': expected true or false, found \1',
        text,
    )
    text = re.sub(r': invalid literal for int\(\) .*', ': expected a whole number', text)
    text = re.sub(r': could not convert string to float: .*', ': expected a number', text)
    unknown = re.match(r"Unknown command line flag '([\w.]+)'", text)
    if unknown and 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
        named = [f for f in _fields() if unknown[1] in (f, f.rsplit('.', maxsplit=1)[-1])]
        text += f'; did you mean {" or ".join(f"--config.{f}" for f in named)}?' if named else ''
    return text


def _fields() -> Fields:
    """Returns the defaults of all sections and fields, by their paths, such as data.path."""
    top = default_config().to_dict()
    sections = {name: fields for name, fields in top.items() if isinstance(fields, dict)}
    return top | {
        f'{section}.{name}': value
        for section, fields in sections.items()
        for name, value in fields.items()
    }


def _check_overrides(argv: Sequence[str]) -> None:
    """Checks the config files and the fields that the command line names.

    ml_collections reports the same mistakes, but with less detail.

    Raises:
      UserError: `--config=FILE` names no Python file, or `--config.a.b=...` an unknown field, a
        section, or a tuple field that was set before.
    """
    values = _fields()
    seen = set[str]()
    for argument, following in itertools.pairwise([*argv[1:], '']):
        file = following if argument == '--config' else ''
        if argument.startswith('--config='):
            file = argument.removeprefix('--config=')
        if file:
            recipes.located(expanded(file))
        match = re.match(r'--(?:no)?config\.([^=]+)', argument)
        if match is None:
            continue
        field = match[1]
        if field not in values:
            raise UserError(f'--config.{field}: unknown field{_similar_fields(field, values)}')
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


def _similar_fields(field: str, known: Iterable[str]) -> str:
    """Returns '; did you mean ...?' with fields of the same name elsewhere, or similar ones."""
    name = field.rsplit('.', maxsplit=1)[-1]
    similar = [f for f in known if f.rsplit('.', maxsplit=1)[-1] == name]
    similar = similar or difflib.get_close_matches(field, known, n=3)
    return f'; did you mean {" or ".join(similar)}?' if similar else ''


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
                return tuple(part.strip() for part in argument.split(',') if part.strip())
        return super().parse(argument)


config_flags.register_flag_parser_for_type(tuple, _Tuples())


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


def define_optional_config(help_text: str) -> flags.FlagHolder:
    """Defines `--config FILE` with value None unless given; returns absl's flag holder."""
    return _with_own_reader(
        config_flags.DEFINE_config_file('config', None, help_text, lock_config=True)
    )


def _with_own_reader(holder: flags.FlagHolder) -> flags.FlagHolder:
    """Makes the flag read its file with `ConfigFile`."""
    flag = flags.FLAGS[holder.name]
    flag.parser = ConfigFile()
    return holder


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or under `cache_dir()`.

    Programs that compile faster than JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS (default 0.5 s) are
    not kept. Warns and keeps none if there is no folder, or if others can write to it
    (`jaxunet.runtime.ownership`).
    """
    try:
        folder = expanded(os.environ.get('JAX_COMPILATION_CACHE_DIR') or str(cache_dir() / 'xla'))
    except UserError as error:
        logging.warning('compiled programs are not kept: %s', error)
        jax.config.update('jax_enable_compilation_cache', False)
        return
    if '://' not in folder:
        with contextlib.suppress(OSError):  # JAX warns of a folder that cannot be written
            pathlib.Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        if not ownership.usable(folder):
            jax.config.update('jax_enable_compilation_cache', False)
            return
    jax.config.update('jax_compilation_cache_dir', folder)
    if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    logging.info('compilation cache: %s', folder)
