"""Damages to data files, and the check of the error that they cause."""

from __future__ import annotations

import pathlib

import pytest

from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError
from support.data_files import SHAPE, encoded, everything, random_pixels

PNG = encoded(random_pixels(0))


def fails(
    path: object, match: str, *, shape: tuple[int, int, int] = SHAPE, classes: tuple[str, ...] = ()
) -> None:
    with pytest.raises(UserError, match=match) as caught:
        everything(open_source(str(path), image_shape=shape, classes=classes))
    assert 'Traceback' not in str(caught.value)
    assert len(str(caught.value)) < 1000


def cut(path: pathlib.Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def change(path: pathlib.Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)
