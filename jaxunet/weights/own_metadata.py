"""Metadata that our writer stores beside the tensors of a `.pt` or `.safetensors`."""

from __future__ import annotations

import json
from typing import NamedTuple

from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.class_names import class_name
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import shown_path
from jaxunet.runtime.untrusted import parse_json, shown

METADATA = 'jaxunet_config'  # key of the metadata: the config as JSON, plus these two fields
ORDER, CLASSES = 'new_attention_order', 'class_names'


class OwnMetadata(NamedTuple):
    """Our writer's metadata; empty in the files of other programs."""

    config: Config | None = None
    new_order: bool | None = None
    class_names: tuple[str, ...] = ()


def dump_metadata(config: Config, *, new_order: bool, class_names: tuple[str, ...]) -> str:
    """Returns the text to store for the key `METADATA`: URLs in it are without passwords."""
    names = {CLASSES: list(class_names)} if class_names else {}
    config = config.replace(
        init_from=shown_path(config.init_from),
        data={'path': shown_path(config.data.path)},
        evaluation={'reference': shown_path(config.evaluation.reference)},
    )
    return json.dumps(to_dict(config) | {ORDER: new_order} | names)


def load_metadata(path: str, metadata: dict[str, str]) -> OwnMetadata:
    """Returns the metadata of a file.

    Raises:
      UserError: the metadata are damaged.
    """
    if METADATA not in metadata:
        return OwnMetadata()
    source = f'{path}: metadata {METADATA}'
    values = parse_json(metadata[METADATA], source, advice='export the model again')
    try:
        order = values.pop(ORDER, None)
        if not isinstance(order, bool):
            raise UserError(f'{ORDER}: expected true or false, found {shown(order)}')
        names = values.pop(CLASSES, [])
        config = resolve(values)
        most = config.model.num_classes
        strings = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not strings or len(names) > most:
            raise UserError(
                f'{CLASSES}: expected the names of at most {most} classes, found {shown(names)}'
            )
        return OwnMetadata(config, order, tuple(map(class_name, names)))
    except (UserError, ValueError, OverflowError) as error:
        raise UserError(f'{source}: {error}') from None
