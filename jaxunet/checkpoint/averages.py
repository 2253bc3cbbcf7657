"""Picks the weights of a checkpoint: a stored average, one of any width, or no average."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxunet.checkpoint.power_average import (
    ROUNDING,
    TOLERANCE,
    Profiles,
    allowed_widths,
    combine,
    exponent,
)
from jaxunet.checkpoint.snapshots import FOLDER, Snapshot, find_snapshots
from jaxunet.checkpoint.store import Restored
from jaxunet.config import Config
from jaxunet.config.relations import MAX_WIDTH
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError


class Picked(NamedTuple):
    """The weights of a checkpoint, averaged or not.

    Fields:
      note: describes these weights to a user.
    """

    params: Params
    note: str


def pick_weights(restored: Restored, ema: str) -> Picked:
    """Returns the weights that `ema` names; see `pick_several`."""
    return pick_several(restored, [ema])[0]


def pick_several(restored: Restored, averages: Sequence[str]) -> list[Picked]:
    """Returns several sets of weights of a checkpoint.

    The checkpoint has the averages of `ema.widths`; other widths are computed from the snapshots of
    its run.

    Args:
      averages: each is a rate of the run, a width, '' for the run's first rate, or 'none' for the
        weights without averaging. A number that is a rate of the run means the rate.

    Raises:
      UserError: the run does not have an average.
    """
    state, names = restored.state, restored.config.ema.width_names
    at_hand = {width: state.ema[name] for name, width in names.items()}
    by_width = {
        width: Picked(params, f'the average of width {width}, as trained')
        for width, params in at_hand.items()
    }
    widths = [width_of(restored.config, ema) for ema in averages]
    missing = [
        width for width in dict.fromkeys(widths) if width is not None and width not in at_hand
    ]
    if missing:
        by_width |= _combined(restored, at_hand, missing)
    picked = []
    for ema, width in zip(averages, widths, strict=True):
        if width is not None:
            picked.append(by_width[width])
        elif ema == 'none':
            picked.append(Picked(state.params, 'the parameters without averaging'))
        else:
            rate = str(float(ema)) if ema else str(restored.config.ema.rates[0])
            picked.append(Picked(state.ema[rate], f'the average with rate {rate}'))
    return picked


def width_of(config: Config, ema: str) -> float | None:
    """Returns the width that `ema` means, or None if it means 'none' or a rate of the run.

    Raises:
      UserError: `ema` is none of these, or a width although the run has no `ema.widths`.
    """
    rates = [str(rate) for rate in config.ema.rates]
    number: float | None = None
    with contextlib.suppress(ValueError):
        number = float(ema)
    if ema in ('', 'none') or str(number) in rates:
        return None
    expected = f'one of {", ".join(rates)} or none'
    if number is None or not 0 < number < MAX_WIDTH:
        if config.ema.widths:
            expected = f'{", ".join(rates)} (a rate), a width below {MAX_WIDTH:.4f}, or none'
        raise UserError(f'--ema: expected {expected}, found {ema!r}')
    if not config.ema.widths:
        raise UserError(
            f'--ema: expected {expected}, found {ema!r}; a width needs a run that was trained with '
            'ema.widths, such as 0.05,0.10, and this one was not'
        )
    return number


def _combined(
    restored: Restored, at_hand: dict[float, Params], widths: Sequence[float]
) -> dict[float, Picked]:
    """Returns averages that the checkpoint does not hold, by width.

    They are combined from those that it holds and from the snapshots up to its step; see
    `jaxunet.checkpoint.power_average`.

    Args:
      at_hand: the averages that the checkpoint holds, by width, in float32.
      widths: the widths to compute.

    Raises:
      UserError: a snapshot is damaged, or the averages do not allow a width.
    """
    state = restored.state
    step, updates = int(state.step), int(state.step) - int(state.skipped)
    snapshots = find_snapshots(restored.workdir, step)
    if not snapshots or not updates:
        raise UserError(
            f'--ema: {widths[0]} needs snapshots, but {restored.workdir / FOLDER} has none up to '
            f'step {step}; without them only the widths {_listed(at_hand)} can be taken'
        )
    kept, rounding = _profiles(snapshots, updates, at_hand)
    combinations = combine(kept, rounding, updates, widths)
    for width, combination in zip(widths, combinations, strict=True):
        if not combination.error <= TOLERANCE:
            ranges = ' and '.join(
                f'{low} to {high}' if low < high else f'{low}'
                for low, high in allowed_widths(kept, rounding, updates)
            )
            raise UserError(
                f'--ema: the {len(snapshots)} snapshots up to step {step} do not allow width '
                f'{width}, whose error would be {combination.error:.1e}; expected '
                f'{ranges or _listed(at_hand)}'
            )
    coefficients = np.stack([combination.coefficients for combination in combinations])
    sums = _sum(snapshots, at_hand, coefficients)
    structure = jax.tree.structure(state.params)
    return {
        width: Picked(
            jax.tree.unflatten(structure, leaves),
            f'the average of width {width}, from {len(snapshots)} snapshots '
            f'(predicted error {combination.error:.1e})',
        )
        for width, leaves, combination in zip(widths, sums, combinations, strict=True)
    }


def _profiles(
    snapshots: Sequence[Snapshot], updates: int, at_hand: dict[float, Params]
) -> tuple[Profiles, np.ndarray]:
    """Returns the averages that `_sum` adds, in its order, and their rounding errors."""
    rows = [
        (snapshot.updates, exponent(width), ROUNDING[snapshot.dtype])
        for snapshot in snapshots
        for width in snapshot.widths
    ]
    rows += [(updates, exponent(width), ROUNDING['float32']) for width in at_hand]
    times, exponents, rounding = np.array(rows, np.float64).T
    return Profiles(times, exponents), rounding


def _sum(
    snapshots: Sequence[Snapshot], at_hand: dict[float, Params], coefficients: np.ndarray
) -> list[list[np.ndarray]]:
    """Returns the leaves of Σ xᵢ θ̂ᵢ for each row x of `coefficients`.

    Reads one snapshot at a time.
    """
    column = 0
    totals: list[list[np.ndarray]] = [
        [np.zeros(leaf.shape, np.float32) for leaf in jax.tree.leaves(next(iter(at_hand.values())))]
        for _ in coefficients
    ]

    def add(leaves: Sequence[np.ndarray], source: str) -> None:
        nonlocal column
        if [leaf.shape for leaf in leaves] != [total.shape for total in totals[0]]:
            raise UserError(f'{source}: holds the weights of another model than the checkpoint')
        for total, x in zip(totals, coefficients[:, column], strict=True):
            for i, leaf in enumerate(leaves):
                total[i] += np.float32(x) * leaf
        column += 1

    for snapshot in snapshots:
        arrays = snapshot.read()
        for width in snapshot.widths:
            add(arrays[width], str(snapshot.path))
    for tree in at_hand.values():
        add(jax.tree.leaves(tree), 'the checkpoint')
    return totals


def _listed(at_hand: dict[float, Params]) -> str:
    return ', '.join(map(str, at_hand))
