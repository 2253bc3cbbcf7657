"""The recipes that come with jaxunet: the files of `configs/`, which `--config NAME` names."""

from __future__ import annotations

import pathlib

from jaxunet.runtime.errors import UserError, near_misses


def folder() -> pathlib.Path:
    """Returns the folder of the recipes.

    A wheel has them in jaxunet/configs. In a checkout they are in configs/, also for an editable
    installation.
    """
    package = pathlib.Path(__file__).parents[1]
    shipped = package / 'configs'
    return shipped if shipped.is_dir() else package.parent / 'configs'


def names() -> list[str]:
    """Returns the names of all recipes, sorted."""
    return sorted(path.stem for path in folder().glob('*.py'))


def located(named: str) -> str:
    """Returns the path of the config file that `--config` names, and its `:ARGUMENT`, if any.

    Args:
      named: the name of a recipe, or a file; where there is no file configs/NAME.py, it is the
        recipe NAME.

    Raises:
      UserError: there is no such recipe or file, or it is no text file.
    """
    name, colon, argument = named.partition(':')
    path = pathlib.Path(name)
    wanted = path.stem if path.parent == pathlib.Path('configs') and not path.exists() else name
    if wanted in names():
        path = folder() / f'{wanted}.py'
    if not path.is_file():
        known = [*names(), *(p.name for p in path.parent.glob('*.py'))]
        raise UserError(
            f'--config: no file or recipe {path}{near_misses(path.name, known)}; '
            f'recipes: {", ".join(names())}'
        )
    with path.open('rb') as file:
        if b'\0' in file.read(4096):
            raise UserError(
                f'--config: expected a Python file with get_config(), found {path}, '
                'which is not a Python file'
            )
    return f'{path}{colon}{argument}'
