"""The metadata of a checkpoint: its config and other values besides arrays, with a checksum.

The checksum is needed because a flipped bit in a config often gives another valid config.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

from jaxunet.runtime.untrusted import read_json

CHECKSUM = 'meta_checksum'
FILE = 'meta/metadata'  # in the folder of a checkpoint


def sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata with the CRC-32 of its content."""
    return {**meta, CHECKSUM: _checksum(meta)}


def check_seal(meta: Mapping[str, Any]) -> bool:
    """Checks the metadata; returns False if it has no checksum, as in older checkpoints.

    Raises:
      ValueError: the checksum does not match.
    """
    if CHECKSUM not in meta:
        return False
    found = _checksum({name: value for name, value in meta.items() if name != CHECKSUM})
    if found != meta[CHECKSUM]:
        raise ValueError(f'checksum of {FILE}: expected {meta[CHECKSUM]}, found {found}')
    return True


def read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the metadata of a checkpoint, without orbax.

    Raises:
      UserError: it cannot be read, or is not a JSON object.
      ValueError: the checksum does not match.
    """
    meta = read_json(folder / FILE, advice='use an earlier checkpoint', finite=False)
    check_seal(meta)
    return meta


def _checksum(meta: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())
