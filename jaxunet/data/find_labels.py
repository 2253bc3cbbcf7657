"""Finds the labels of image files, as `data.labels` says (`jaxunet.data.labels`)."""

from __future__ import annotations

import typing
from pathlib import PurePosixPath

from jaxunet.data.label_files import by_table
from jaxunet.data.labels import (
    ADVICE,
    FOLDERS,
    LABEL,
    NAMES,
    FileSet,
    Labels,
    and_more,
    checked,
    numbered,
)
from jaxunet.data.rules import by_class, find_classes, spelled
from jaxunet.data.source import no_labels
from jaxunet.runtime.class_names import class_name
from jaxunet.runtime.errors import UserError, listed, near_misses, printable
from jaxunet.runtime.untrusted import parse_json

CLS, JSON = 'cls', 'json'  # suffixes of webdataset


def find_labels(files: FileSet, how: str = '') -> Labels:
    """Returns the labels of a set, by the value of `data.labels`.

    Without one, labels with mistakes are no labels, and `missing` of the result says why.

    Raises:
      UserError: the labels that `how` names are missing or have mistakes.
    """
    labels = _find(files, how)
    if not files.shards:
        return labels
    known = {sample_key(name)[0] for name in files.images}
    beside = {name for name in files.others if sample_key(name)[0] in known}
    return labels._replace(used=labels.used | beside)


def _find(files: FileSet, how: str) -> Labels:
    if how == NAMES:
        return _by_names(files)
    if how != FOLDERS:
        try:
            labels = by_table(files, how) or _by_side(files, how)
        except UserError as error:
            if how:
                raise
            return Labels(no_labels(len(files.images)), missing=str(error))
        if labels is not None:
            return labels
        if how:
            columns = [*dict.fromkeys(files.columns)]
            raise UserError(
                f'data.labels: {files.shown} has no labels named {how!r}'
                f'{near_misses(how, [*columns, FOLDERS, NAMES])}; expected {FOLDERS}, {NAMES}'
                + (f', or one of {listed(columns)}' if columns else ', or a column of metadata.csv')
                + ''.join(f'; {why}' for why in files.passed_over)
            )
    paths = [name.partition('/')[2] for name in files.images] if files.shards else files.images
    found, names, missing = find_classes(list(paths), strip_leading=files.strip_leading)
    if not (names or missing) and files.columns:
        missing = (
            f'no column is named {LABEL}: data.labels=NAME takes one of {listed(files.columns)}'
        )
    if not (names or missing) and files.passed_over:
        missing = files.passed_over[0]
    return Labels(found, names, missing, 'folders' if names else '')


def _by_names(files: FileSet) -> Labels:
    """Takes the part of each file's name before the first underscore."""
    values = []
    for name in files.images:
        start, underscore, _ = PurePosixPath(name).name.partition('_')
        if not (start and underscore):
            raise UserError(
                f'data.labels=names: {files.shown}: {printable(name)}: expected a class before an '
                'underscore, as in cat_0001.png, found none; rename it, or remove it'
            )
        values.append(class_name(start))
    return Labels(*by_class(values), origin='file names')


def sample_key(name: str) -> tuple[str, str]:
    """Returns the key that the files of one sample share in webdataset, and the suffix of this."""
    folder, _, file = name.rpartition('/')
    key, _, suffix = file.partition('.')
    return f'{folder}/{key}', suffix.lower()


def _by_side(files: FileSet, how: str) -> Labels | None:
    """Reads a file beside each image; None if there are none of the kind."""
    beside: dict[str, dict[str, str]] = {}  # suffix -> key -> file
    for name in files.others:
        key, suffix = sample_key(name)
        beside.setdefault(suffix, {})[key] = name
    keys = [sample_key(name)[0] for name in files.images]
    known = set(keys)
    beside = {suffix: found for suffix, found in beside.items() if not known.isdisjoint(found)}
    suffix, column = spelled(how or CLS, beside), ''
    if not suffix:
        files.columns += beside
        sample = next((beside[JSON][key] for key in keys if key in beside.get(JSON, ())), None)
        if sample is None:
            return None
        first = _loaded(files, sample)
        files.columns += first
        suffix, column = JSON, spelled(how or LABEL, first)
        if not column:
            return None
    found = beside[suffix]
    _check_keys(files, keys, found, suffix)
    values = []
    for key in keys:
        content = _loaded(files, found[key]).get(column) if column else _text(files, found[key])
        values.append(checked(content, f'{files.shown}: {printable(found[key])}'))
    used = frozenset(name for name in files.others if sample_key(name)[0] in known)
    origin = f'.{suffix} beside each image' + (f', field {column}' if column else '')
    return Labels(*numbered(values, f'{files.shown}: .{suffix}'), origin=origin, used=used)


def _check_keys(files: FileSet, keys: list[str], found: dict[str, str], suffix: str) -> None:
    """Checks that every image has a file of labels beside it, and each of these its image."""
    if files.shards:
        shards = {key.partition('/')[0] for key in found}
        lacking = [name for name in files.images if name.partition('/')[0] not in shards]
        if lacking:
            raise UserError(
                f'{files.shown}: shards of unequal keys: {printable(min(shards))} has .{suffix} '
                f'beside its images, {printable(lacking[0].partition("/")[0])} has none; write '
                'them alike, or give those that are'
            )
    known = set(keys)
    for key, name in found.items():
        if key not in known:
            raise UserError(
                f'{files.shown}: {printable(name)}: the label of an image that is missing; {ADVICE}'
            )
    without = [name for key, name in zip(keys, files.images, strict=True) if key not in found]
    if without:
        raise UserError(
            f'{files.shown}: {printable(without[0])}: expected a .{suffix} beside it, as other '
            f'images have, found none{and_more(len(without))}; {ADVICE}'
        )


def _text(files: FileSet, name: str) -> str:
    return files.read(name)[:1024].decode(errors='backslashreplace')


def _loaded(files: FileSet, name: str) -> dict[str, typing.Any]:
    return parse_json(files.read(name), f'{files.shown}: {printable(name)}', advice=ADVICE)
