"""What every command line shares: flags in, `UserError` out as one line, exit codes, and the compilation cache."""

from __future__ import annotations

import difflib
import logging as std_logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from jaxunet import config
from jaxunet.config import default_config
from jaxunet.errors import UserError

USER_ERROR = 2


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
    return (record.levelno >= std_logging.WARNING and 'orbax' not in record.pathname) or pathlib.Path(__file__).parent in pathlib.Path(record.pathname).parents


def _quiet(main: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int | None]:
    def wrapped(argv: Sequence[str]) -> int | None:
        try:
            if len(argv) > 1:
                raise UserError(f'unexpected argument {argv[1]!r}; every option is a flag, see --help')
            return main(argv)
        except UserError as error:
            _fail(error)

    return wrapped


def _parse(argv: Sequence[str]) -> list[str]:
    _check_overrides(argv)
    try:
        return flags.FLAGS(list(argv))
    except flags.Error as error:
        raise UserError(f'{error}\nSee --help.') from None
    except Exception as error:  # the config file is the user's program: say where it failed
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith('.py') and 'configs' in f.filename]
        where = f' ({frames[-1].filename}, line {frames[-1].lineno})' if frames else ''
        raise UserError(f'--config: {type(error).__name__}: {error}{where}') from None


def _check_overrides(argv: Sequence[str]) -> None:
    """Fields that `--config.a.b=...` names must exist; ml_collections says less when they do not."""
    sections = {'': default_config().to_dict()}
    sections |= {name: fields for name, fields in sections[''].items() if isinstance(fields, dict)}
    known = [f'{section}.{name}'.lstrip('.') for section, fields in sections.items() for name in fields]
    for argument in argv[1:]:
        match = re.match(r'--(?:no)?config\.([^=]+)', argument)
        if match and match[1] not in known:
            name = match[1].split('.')[-1]
            elsewhere = [f for f in known if f.split('.')[-1] == name] or difflib.get_close_matches(match[1], known, n=3)
            hint = f'; did you mean {" or ".join(elsewhere)}?' if elsewhere else ''
            raise UserError(f'--config.{match[1]}: unknown field{hint}')
        if match and match[1] in sections:
            raise UserError(
                f'--config.{match[1]}: is a section; set one of its fields, e.g. --config.{match[1]}.{next(iter(sections[match[1]]))}=...'
            )


def _fail(error: UserError) -> None:
    print(f'error: {error}', file=sys.stderr, flush=True)
    sys.exit(USER_ERROR)


def define_config() -> Any:
    """The `--config FILE` flag with `--config.section.field=value` overrides; without a file, the values of `configs/digits.py`."""
    return config_flags.DEFINE_config_file(
        'config', config.__file__, 'Config file (Python, with get_config()); without one, the embedded digits run.', lock_config=True
    )


def define_optional_config(help_text: str) -> Any:
    """A `--config FILE` flag that is None unless given."""
    return config_flags.DEFINE_config_file('config', None, help_text, lock_config=True)


def cache_dir() -> pathlib.Path:
    """$XDG_CACHE_HOME/jaxunet or ~/.cache/jaxunet."""
    return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache') / 'jaxunet'


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or under `cache_dir()`."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update('jax_compilation_cache_dir', str(cache_dir() / 'xla'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    logging.info('compilation cache: %s', jax.config.jax_compilation_cache_dir)
