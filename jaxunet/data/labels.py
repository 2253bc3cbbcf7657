"""Labels of image files: a file of labels, files beside the images, their folders or their names.

`data.labels` chooses. Left empty, the first of these that a set has gives the labels:

- `dataset.json` of NVlabs' tools (StyleGAN, EDM): {"labels": [["00000/img00000000.png", 6], ...]};
- `metadata.jsonl`, `metadata.csv` (Hugging Face's imagefolder) or `labels.csv`: a column of paths,
  and the column `label`, or the only other column of `labels.csv`;
- beside each image, in the form of webdataset, `KEY.cls`, or `KEY.json` with a field `label`;
- the folders (`jaxunet.data.rules.find_classes`).

Names of columns, fields and files are found in any case: `Label` is the column `label`.

`folders` takes the folders in any case, and `names` the part of each file's name before its first
underscore, as guided-diffusion does. Any other value names a column of the files above, a field of
`KEY.json`, or the suffix of a file beside each image.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np
from jaxtyping import Int

from jaxunet.data.npz import check_labels
from jaxunet.data.rules import LABEL_FILES, by_class
from jaxunet.runtime.class_names import class_name
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import MAX_JSON, shown

FOLDERS, NAMES = 'folders', 'names'  # values of data.labels that name no column
LABEL = 'label'  # Hugging Face's name of a column
MAX_BESIDE = 2**16  # bytes of a file of labels beside each image
ADVICE = 'mend it, or set data.labels (docs/training.md)'


class Labels(typing.NamedTuple):
    """The labels of a set.

    Fields:
      numbers: int32 (images,), indices into `names`; all -1 without classes.
      names: of the classes; empty without them.
      missing: why there are none; '' if nothing looks like labels.
      origin: where they come from, for the log.
      used: the files that hold them, or belong to an image as these do.
    """

    numbers: Int[np.ndarray, ' images']
    names: tuple[str, ...] = ()
    missing: str = ''
    origin: str = ''
    used: frozenset[str] = frozenset()


@dataclass
class FileSet:
    """The files among which labels are looked for.

    Fields:
      shown: the set, for messages.
      images: path of each image, in the order of the set.
      others: paths of the files that are no images.
      read: returns the content of one of the others.
      strip_leading: see `find_classes`.
      shards: the first folder of each path is an archive.
      columns: names that `data.labels` could have had, for messages.
      passed_over: why files with the name of a file of labels have none.
    """

    shown: str
    images: Sequence[str]
    others: Sequence[str]
    read: Callable[[str], bytes]
    strip_leading: bool
    shards: bool = False
    columns: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


def most_bytes(name: str) -> int:
    """Returns the most bytes that a file of this name may have for its labels to be read."""
    return MAX_JSON if PurePosixPath(name).name.lower() in LABEL_FILES else MAX_BESIDE


def numbered(
    values: Sequence[int | str], where: str, names: Sequence[str] | None = None
) -> tuple[Int[np.ndarray, ' images'], tuple[str, ...]]:
    """Returns int32 labels and the names of their classes.

    Values that are all whole numbers are the labels themselves. Others are names, which are sorted
    as those of folders.

    Args:
      where: begins the messages.
      names: of the labels 0, 1, ... where values are numbers; None = they are not stated.

    Raises:
      UserError: numbers that are no labels.
    """
    if all(isinstance(v, int) or _is_number(v) for v in values):
        try:
            numbers = np.array([int(v) for v in values], np.int64)
        except (OverflowError, ValueError):  # ValueError: Python reads at most 4,300 digits
            raise UserError(f'{where}: labels: found a number of more than 64 bits') from None
        known = None if names is None else np.array(names, np.str_)
        return check_labels(where, len(values), numbers, known)
    return by_class([class_name(str(value)) for value in values])


def checked(value: object, where: str) -> int | str:
    """Returns the label of an image: a whole number, or the name of a class.

    Args:
      where: file and entry; begins the message.

    Raises:
      UserError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip():
        return value.strip()
    empty = value is None or isinstance(value, str)
    raise UserError(
        f'{where}: expected a label, a whole number or the name of a class, found '
        f'{"nothing" if empty else shown(value)}; {ADVICE}'
    )


def _is_number(text: str) -> bool:
    return text.removeprefix('-').isdecimal() and text.isascii()


def and_more(count: int) -> str:
    """Returns the number of like mistakes, for the end of the message of the first."""
    return f' ({count:,} are like that)' if count > 1 else ''
