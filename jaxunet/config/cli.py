"""What every command line shares: flags in, `UserError` out as one line, exit codes, and the compilation cache."""

from __future__ import annotations

import ast
import difflib
import itertools
import logging as std_logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.tuple_parser import TupleParser

from jaxunet.config import default_config, schema
from jaxunet.runtime.download import cache_dir
from jaxunet.runtime.errors import USER_ERROR, UserError, near_misses


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Parses flags and runs `main`. A `UserError` prints as `error: ...` and exits with 2, without a traceback."""
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.addFilter(_of_interest)
    handler.setFormatter(std_logging.Formatter('%(message)s'))
    try:
        app.run(_quiet(main), flags_parser=_parse)
    except UserError as error:
        _fail(error)


def _of_interest(record: std_logging.LogRecord) -> bool:
    """What jaxunet says, and warnings of the libraries below it; but orbax's failures come back as exceptions that we report."""
    return (
        record.levelno >= std_logging.WARNING and 'orbax' not in record.pathname
    ) or pathlib.Path(__file__).parents[1] in pathlib.Path(record.pathname).parents


def _quiet(main: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int | None]:
    def wrapped(argv: Sequence[str]) -> int | None:
        try:
            if len(argv) > 1:
                raise UserError(
                    f'unexpected argument {argv[1]!r}; every option is a flag, see --help'
                )
            return main(argv)
        except UserError as error:
            _fail(error)

    return wrapped


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(list(argv))
    except UserError:
        raise
    except flags.Error as error:
        raise UserError(f'{error}\nSee --help.') from None
    except Exception as error:
        raise UserError(_config_error(error)) from None


def _config_error(error: Exception) -> str:
    """A config file is the user's program: its error, and where it happened."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.name == 'get_config' and f.filename != schema.__file__
    ]
    where = f' ({frames[-1].filename}, line {frames[-1].lineno})' if frames else ''
    return f'--config: {type(error).__name__}: {error}{where}'


def _check_overrides(argv: Sequence[str]) -> None:
    """Fields that `--config.a.b=...` names must exist; ml_collections says less when they do not."""
    sections = {'': default_config().to_dict()}
    sections |= {name: fields for name, fields in sections[''].items() if isinstance(fields, dict)}
    known = [
        f'{section}.{name}'.lstrip('.') for section, fields in sections.items() for name in fields
    ]
    tuples = {
        f'{section}.{name}'.lstrip('.')
        for section, fields in sections.items()
        for name in fields
        if isinstance(fields[name], tuple)
    }
    seen = set[str]()
    for argument, following in itertools.pairwise([*argv[1:], '']):
        named = (
            argument.removeprefix('--config=')
            if argument.startswith('--config=')
            else following
            if argument == '--config'
            else ''
        )
        if named:
            _check_file(named)
        match = re.match(r'--(?:no)?config\.([^=]+)', argument)
        if match and match[1] not in known:
            name = match[1].split('.')[-1]
            elsewhere = [f for f in known if f.split('.')[-1] == name] or difflib.get_close_matches(
                match[1], known, n=3
            )
            hint = f'; did you mean {" or ".join(elsewhere)}?' if elsewhere else ''
            raise UserError(f'--config.{match[1]}: unknown field{hint}')
        if match and match[1] in seen & tuples:
            raise UserError(
                f'--config.{match[1]}: is there twice, which would join its values; give it once, with commas: 32,64'
            )
        seen |= {match[1]} if match else set()
        if match and match[1] in sections:
            raise UserError(
                f'--config.{match[1]}: is a section; set one of its fields, e.g. --config.{match[1]}.{next(iter(sections[match[1]]))}=...'
            )


def _check_file(named: str) -> None:
    path = pathlib.Path(named.split(':', maxsplit=1)[0])
    if not path.is_file():
        raise UserError(
            f'--config: no file {path}{near_misses(path.name, [p.name for p in path.parent.glob("*.py")])}'
        )
    with path.open('rb') as file:
        if b'\0' in file.read(4096):
            raise UserError(
                f'--config: expected a Python file with get_config(), found {path}, which is no Python file'
            )


class _ConfigFile(flags.ArgumentParser):
    """ml_collections' reader of config files, for mistakes of which it says little."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def parse(self, named: str) -> Any:
        _check_file(named)
        found = self.reader.parse(named)
        if not isinstance(found, ConfigDict | dict):
            getattr(
                found, 'model', None
            )  # raises what kept ml_collections from reading the file, if that is what it gave
            raise UserError(
                f'--config: {named}: get_config() must return the ConfigDict of jaxunet.config.default_config() with fields changed, '
                f'found {found!r}'
            )
        return found

    def flag_type(self) -> str:
        return 'config file'


class _Tuples(TupleParser):
    """Tuples as ml_collections reads them, and words between commas, `fid,kid`, which it takes for one."""

    def parse(self, argument: Any) -> tuple[Any, ...]:
        if (
            isinstance(argument, str)
            and ',' in argument
            and not argument.lstrip().startswith(tuple('([{"\''))
        ):
            try:
                ast.literal_eval(argument)
            except (ValueError, SyntaxError):
                return tuple(part.strip() for part in argument.split(',') if part.strip())
        return super().parse(argument)


config_flags.register_flag_parser_for_type(tuple, _Tuples())


def _fail(error: UserError) -> NoReturn:
    print(f'error: {error}', file=sys.stderr, flush=True)
    sys.exit(USER_ERROR)


def define_config() -> Any:
    """The `--config FILE` flag with `--config.section.field=value` overrides; without a file, the defaults of `jaxunet.config`."""
    try:
        # ml_collections applies overrides of a default file while the flag is being defined.
        _check_overrides(sys.argv)
        help_text = (
            'Config file (Python, with get_config()); without one, the defaults, which train on the '
            'embedded digits.'
        )
        holder = config_flags.DEFINE_config_file(
            'config', schema.__file__, help_text, lock_config=True
        )
    except UserError as error:
        _fail(error)
    except Exception as error:
        _fail(UserError(_config_error(error)))
    return _with_own_reader(holder)


def config_name() -> str:
    """Returns `NAME` of `--config configs/NAME.py`; `digits` without one."""
    path = config_flags.get_config_filename(flags.FLAGS['config'])
    return 'digits' if path == schema.__file__ else pathlib.Path(path.split(':')[0]).stem


def define_optional_config(help_text: str) -> Any:
    """A `--config FILE` flag that is None unless given."""
    return _with_own_reader(
        config_flags.DEFINE_config_file('config', None, help_text, lock_config=True)
    )


def _with_own_reader(holder: Any) -> Any:
    flag = flags.FLAGS[holder.name]
    flag.parser = _ConfigFile(flag.parser)
    return holder


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or under `cache_dir()`: those that took half a second, or
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS."""
    folder = os.environ.get('JAX_COMPILATION_CACHE_DIR') or str(cache_dir() / 'xla')
    jax.config.update('jax_compilation_cache_dir', folder)
    if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    logging.info('compilation cache: %s', folder)


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C raised it: where it meets C code, that can make a SystemError of it."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)
