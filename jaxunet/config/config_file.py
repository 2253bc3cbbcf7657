"""Reads the config file that a command names, with one-line errors."""

from __future__ import annotations

import re
import runpy
import traceback

from absl import flags
from ml_collections import ConfigDict

from jaxunet.config import recipes, schema
from jaxunet.config.schema import Fields
from jaxunet.config.versions import RENAMED
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import expanded


class ConfigFile(flags.ArgumentParser):
    """Reads config files, with one-line errors."""

    def parse(self, named: str) -> ConfigDict | Fields:
        """Returns the config that the file's get_config() returns, locked.

        Raises:
          UserError: no such file, not a Python file, one that raises an error, or get_config()
            returns something else.
        """
        path, *argument = recipes.located(expanded(named)).split(':', maxsplit=1)
        try:
            get_config = runpy.run_path(path).get('get_config')
            if get_config is None:
                raise UserError(f'--config: {named}: expected get_config(), found none')
            made = get_config(*argument)
        except UserError:
            raise
        except SystemExit as error:
            raise UserError(
                f'--config: {named}: ends Python (SystemExit: {error}) while it is read; '
                'return a config from get_config(), or raise an exception'
            ) from None
        except Exception as error:
            raise UserError(config_error(error)) from None
        if not isinstance(made, ConfigDict | dict):
            raise UserError(
                f'--config: {named}: get_config() must return the ConfigDict of '
                f'jaxunet.config.default_config() with fields changed, found {made!r}'
            )
        return made.lock() if isinstance(made, ConfigDict) else made

    def flag_type(self) -> str:
        """Returns the name of the flag's type in --helpfull."""
        return 'config file'


def config_error(error: BaseException) -> str:
    """Returns the message for an exception that a config file raised, with file and line."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.name in ('get_config', '<module>') and f.filename != schema.__file__
    ]
    where = f' ({frames[-1].filename}, line {frames[-1].lineno})' if frames else ''
    renamed = [
        f'; {old} is now {new}'
        for old, new in RENAMED.items()
        if isinstance(error, AttributeError)
        and f'"{old.rsplit(".", maxsplit=1)[-1]}"' in str(error)
    ]
    # ml_collections lists all fields of the section before its advice, which is enough.
    text = re.sub(r'Other fields present: .*(\n|\\n)', '', str(error))
    text = re.sub(r'\s*\n\s*', ' ', text)
    return f'--config: {type(error).__name__}: {text}{"".join(renamed)}{where}'
