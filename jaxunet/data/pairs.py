"""Pairs each image with the picture of the same name in another set (`data.condition=folder:PATH`).

Names are paths within the sets, without suffix. If they do not pair all images, the folders that a
whole set shares are left out of them, such as `photos/` and `edges/` in archives.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
from absl import logging
from jaxtyping import Int

from jaxunet.data.crop import Batch, Crops
from jaxunet.data.pixels import BadImage
from jaxunet.data.reading import log_once
from jaxunet.data.source import LOOKED_AT, Source, Subset, spread
from jaxunet.runtime.errors import UserError, printable

NAMED = 3  # names in a message
FIELD = 'data.condition'


class Paired(Source):
    """Images, each followed by the channels of its picture, cut alike.

    Args:
      images: with `pictures`.
    """

    def __init__(self, images: Source) -> None:
        assert images.pictures is not None
        self._images, self._pictures = images, images.pictures
        self.name, self.labels, self.class_names = images.name, images.labels, images.class_names
        channels = images.image_shape[2] + self._pictures.image_shape[2]
        self.image_shape = (*images.image_shape[:2], channels)
        self.pieces, self.reading = images.pieces, images.reading
        self.in_memory = images.in_memory and self._pictures.in_memory
        self.held_out = None if images.held_out is None else with_pictures(images.held_out)

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Loads images and pictures; see `Source.load`."""
        both = [each.load(indices, crops) for each in (self._images, self._pictures)]
        return np.concatenate(both, axis=-1)


def with_pictures(source: Source) -> Source:
    """Returns images with their pictures as further channels; `source` if they have none."""
    return source if source.pictures is None else Paired(source)


def pair(images: Source, pictures: Source) -> Source:
    """Returns the pictures of images, in the order of these.

    Sets without names, such as arrays, are paired by their order.

    Raises:
      UserError: images without a picture, several of one name, or another shape.
    """
    ours, theirs = images.names(), pictures.names()
    if ours is None and theirs is None:
        if len(images) != len(pictures):
            raise UserError(
                f'{FIELD}: {pictures.name}: neither set has names of files, so pictures belong to '
                f'images by their order: expected {len(images)}, found {len(pictures)}'
            )
        ordered, how = pictures, 'order'
    elif ours is None or theirs is None:
        without, other = (images, pictures) if ours is None else (pictures, images)
        raise UserError(
            f'{FIELD}: pictures are paired with images by their names, which {without.name} has '
            f'not, but {other.name} has; store both as files, or both as arrays in the same order'
        )
    else:
        ordered, how = Subset(pictures, _places(images.name, pictures.name, ours, theirs)), 'name'
    _check_shapes(images, ordered)
    sets = f'{len(images):,} images of {images.name} paired by {how} with {pictures.name}'
    log_once(logging.info, f'{FIELD}: {sets}')
    return ordered


def _places(
    images: str, pictures: str, ours: Sequence[str], theirs: Sequence[str]
) -> Int[np.ndarray, ' images']:
    """Returns the place of each image's picture, given the names of images and pictures."""
    if not set(ours) <= set(theirs):
        shorter = [_without_shared(names) for names in (ours, theirs)]
        if set(shorter[0]) <= set(shorter[1]):
            ours, theirs = shorter
    for name, names in ((images, ours), (pictures, theirs)):
        if len(set(names)) < len(names):
            again = [each for each, count in Counter(names).items() if count > 1]
            raise UserError(
                f'{FIELD}: {name}: expected names that differ in more than the suffix, found '
                f'{_counted(again, "name")} several times: {_listed(again)}'
            )
    places = {name: i for i, name in enumerate(theirs)}
    lacking = [name for name in ours if name not in places]
    known = set(ours)
    spare = [name for name in theirs if name not in known]
    without = f'{_counted(spare, "picture")} without an image: {_listed(spare)}'
    if lacking:
        raise UserError(
            f'{FIELD}: {pictures}: expected a picture of the same name, apart from its suffix, for '
            f'each of the {len(ours):,} images of {images}, found none for {len(lacking):,}: '
            f'{_listed(lacking)}' + (f'; and {without}' if spare else '')
        )
    if spare:
        log_once(logging.warning, f'{FIELD}: {pictures}: left out {without}')
    return np.array([places[name] for name in ours])


def _without_shared(names: Sequence[str]) -> list[str]:
    """Returns names without the folders that all of them begin with."""
    parts = [name.split('/') for name in names]
    first, last = min(parts), max(parts)
    shared = 0
    while shared < min(len(first), len(last)) - 1 and first[shared] == last[shared]:
        shared += 1
    shared = min(shared, min(map(len, parts)) - 1)
    return ['/'.join(each[shared:]) for each in parts]


def _check_shapes(images: Source, pictures: Source) -> None:
    """Raises `UserError` if a few pictures have other proportions than their images.

    Files that were decoded when the set was opened, at the size of the images, no longer show them.
    """
    if any(each.in_memory and each.names() is not None for each in (images, pictures)):
        return
    for row in spread(len(images), LOOKED_AT).tolist():
        with contextlib.suppress(BadImage):  # reading it for training reports it
            height, width = images.stored_size(row)
            other_height, other_width = pictures.stored_size(row)
            most = max(height, width, other_height, other_width)
            if abs(height * other_width - width * other_height) > most:
                raise UserError(
                    f'{FIELD}: {pictures.name}: expected pictures of the proportions of their '
                    f'images, so that both are cut alike, found one of {other_height}x'
                    f'{other_width} pixels (height x width) for an image of {height}x{width}'
                )


def _counted(names: Sequence[str], what: str) -> str:
    return f'1 {what}' if len(names) == 1 else f'{len(names):,} {what}s'


def _listed(names: Sequence[str]) -> str:
    return ', '.join(map(printable, names[:NAMED])) + ', ...' * (len(names) > NAMED)
