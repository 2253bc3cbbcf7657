"""The metadata of a checkpoint: its config and other values besides arrays, with a checksum.

The checksum is needed because a flipped bit in a config often gives another valid config.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxunet.runtime.class_names import class_name
from jaxunet.runtime.untrusted import read_json

CHECKSUM = 'meta_checksum'
FILE = 'meta/metadata'  # in the folder of a checkpoint


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its checkpoints keep besides its state and config.

    Attributes:
      seconds: training time so far, without compiling, sampling and saving.
      class_names: names of the labels 0, 1, ...; empty for an unconditional model, and in
        checkpoints of versions that stored none.
      rollbacks: number of times that the run has gone back to an earlier checkpoint.
      milestone: the training time at which the checkpoint was saved, in seconds;
        None if it was saved at any other moment.
      images: number of images that the run began with, held out or not; 0 if it is not known.
    """

    seconds: float = 0.0
    class_names: tuple[str, ...] = ()
    rollbacks: int = 0
    milestone: float | None = None
    images: int = 0

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> RunFacts:
        """Returns the facts in the metadata of a checkpoint."""
        return cls(
            seconds=meta['seconds'],
            class_names=tuple(map(class_name, meta.get('class_names', ()))),
            rollbacks=meta.get('rollbacks', 0),
            milestone=meta.get('milestone'),
            images=meta.get('images', 0),
        )

    def meta(self) -> dict[str, Any]:
        """Returns the facts as metadata; rare ones only if they differ from their defaults."""
        return {
            'seconds': self.seconds,
            'class_names': list(self.class_names),
            **({'rollbacks': self.rollbacks} if self.rollbacks else {}),
            **({'milestone': self.milestone} if self.milestone is not None else {}),
            **({'images': self.images} if self.images else {}),
        }


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
