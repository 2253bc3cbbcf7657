"""The config of a run that a Python program starts: a recipe, and fields as keywords."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TypeAlias

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxunet.config import Config, by_path, to_dict
from jaxunet.config.config_file import ConfigFile
from jaxunet.config.schema import Fields
from jaxunet.config.versions import RENAMED
from jaxunet.data.source import Source
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import check_path

Recipe: TypeAlias = str | os.PathLike[str] | Config | ConfigDict
LABEL_DROPOUT = 0.1  # of labels that come with arrays: it allows classifier-free guidance


def chosen_values(recipe: Recipe, fields: Mapping[str, object], given: Source | None) -> Fields:
    """Returns the values of a config as nested dicts; those left open stay open.

    Args:
      recipe: name of a recipe, path of a config file, or a config.
      fields: by name, by path, or sections as dicts.
      given: images in memory. With classes, they make the model class-conditional, unless the
        fields or the recipe say how many classes it has.

    Raises:
      UserError: an unknown recipe or field, or a name that several sections have.
    """
    values = _read(recipe)
    named = dict(fields_by_path(fields))
    for path, value in named.items():
        section, _, name = path.rpartition('.')
        (values[section] if section else values)[name] = value
    model, names = values['model'], given.class_names if given is not None else ()
    if names and 'model.num_classes' not in named and not model['num_classes']:
        model['num_classes'] = len(names)
        if 'model.label_dropout' not in named:
            model['label_dropout'] = LABEL_DROPOUT
    return values


def _read(recipe: Recipe) -> Fields:
    if isinstance(recipe, Config):
        return copy.deepcopy(to_dict(recipe))
    if not isinstance(recipe, ConfigDict):
        check_path(recipe, 'config', 'a recipe, a config file or a config')
        config = ConfigFile().parse(os.fspath(recipe))
        recipe = config if isinstance(config, ConfigDict) else ConfigDict(config)
    return recipe.to_dict()


def fields_by_path(fields: Mapping[str, object]) -> list[tuple[str, object]]:
    """Returns the values of fields by their paths, such as data.path."""
    paths = list(by_path(Config()))
    sections = {path.partition('.')[0] for path in paths if '.' in path}
    found: list[tuple[str, object]] = []
    for given, value in fields.items():
        name = RENAMED.get(given, given)
        if name in sections and isinstance(value, Mapping):
            found += fields_by_path({f'{name}.{field}': each for field, each in value.items()})
            continue
        matches = [name] if name in paths else [p for p in paths if p.endswith(f'.{name}')]
        if name in sections:
            raise UserError(f'{name}: is a section; expected a dict of its fields, found {value!r}')
        if not matches:
            names = {*paths, *(path.rpartition('.')[2] for path in paths)}
            raise UserError(f'{name}: unknown field{near_misses(name, names)}')
        if len(matches) > 1:
            either = ' or '.join(f"**{{'{path}': {value!r}}}" for path in matches)
            raise UserError(f'{name}: several sections have it; write {either}')
        found.append((matches[0], plain_value(value)))
    return found


def plain_value(value: object) -> object:
    """Returns a path object as text, and numbers and arrays of NumPy and JAX as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return np.asarray(value).tolist()
    return [plain_value(each) for each in value] if isinstance(value, list | tuple) else value
