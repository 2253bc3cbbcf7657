"""Images in memory, given as arrays by a Python program, as a source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Shaped

from jaxunet.data.npz import check_labels
from jaxunet.data.source import ArraySource
from jaxunet.runtime.errors import UserError

NAME = '<arrays>'  # stands for the path of such images


def source_of(
    images: object, labels: object = None, class_names: Sequence[str] | None = None
) -> ArraySource:
    """Returns a source of arrays, at their own size.

    Args:
      images: as for `values_of`, one size for all.
      labels: one for each image: whole numbers from 0, or names of classes; None = no classes.
      class_names: names of the labels 0, 1, ...; None = names are sorted, numbers name themselves.

    Raises:
      UserError: other shapes, types or values.
    """
    pixels = values_of(images)
    if not len(pixels):
        raise UserError('images: expected one or more, found none')
    if labels is None and class_names is not None:
        raise UserError('class_names: needs labels, which are not given')
    given, named = (_texts(each) for each in (labels, class_names))
    numbers, texts = check_labels(NAME, len(pixels), given, named)
    return ArraySource(NAME, pixels, (*pixels.shape[1:],), numbers, texts, None)


def _texts(values: object) -> np.ndarray | None:
    """Returns values as an array, also texts as pandas stores them."""
    array = None if values is None else np.asarray(values)
    if array is not None and array.dtype == object:
        return array.astype(np.str_) if all(isinstance(x, str) for x in array.flat) else array
    return array


def values_of(
    images: object, what: str = 'images', *, single: bool = False
) -> Shaped[np.ndarray, 'images height width channels']:
    """Returns arrays of images as they are.

    Args:
      images: anything that numpy reads: (n, height, width) of grey images, or (n, height, width,
        channels); uint8, uint16, floats or, with `data.range`, other integers.
      what: the argument, for messages.
      single: it is one image, without the first axis.

    Raises:
      UserError: another shape or type.
    """
    try:
        array = np.asarray(images)
    except ValueError:
        raise UserError(
            f'{what}: expected images of one size, found several; give a folder of files, or '
            'resize them'
        ) from None
    shape, array = array.shape, array[None] if single else array
    array = array[..., None] if array.ndim == 3 else array
    axes = '(height, width) or (height, width, channels)'
    if array.ndim != 4:
        expected = axes if single else axes.replace('(h', '(n, h')
        raise UserError(f'{what}: expected shape {expected}, found {shape}')
    if array.dtype.kind not in 'uif':
        raise UserError(
            f'{what}: expected uint8, uint16, or floats from 0 to 1, found {array.dtype}; convert '
            'them by .astype(numpy.uint8) if they are from 0 to 255'
        )
    return array
