"""Keeps some images out of training, so that the loss on unseen images can be measured.

The choice depends on the number of images alone, not on `config.seed`. Repeated and resumed runs,
and runs of different seeds, hold out the same images of the same set. A larger holdout contains
every smaller one.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from jaxunet.data.order import permuted
from jaxunet.data.source import Source, Subset
from jaxunet.runtime.errors import UserError

SEED = 0x686F6C64  # orders the images before some are held out; differs from the seed of a run


def held_out_count(holdout: float, total: int) -> int:
    """Returns how many of `total` images `data.holdout` keeps out of training.

    Args:
      holdout: a number of images, or a share below 1. A share above 0 is at least one image.

    Raises:
      UserError: no image would be left to train on.
    """
    count = round(holdout * total) if holdout < 1 else round(holdout)
    if holdout > 0:
        count = max(count, 1)
    if count >= total:
        advice = (
            f'hold out at most {total - 1}'
            if total > 1
            else 'set data.holdout=0 and train.holdout_every=0'
        )
        raise UserError(
            f'data.holdout: {holdout:g} of {total} images leaves none to train on; {advice}'
        )
    return count


def held_out_rows(holdout: float, total: int) -> Int[np.ndarray, ' rows']:
    """Returns the places of the held-out images in their set, ascending.

    Args:
      holdout, total: as for `held_out_count`, which raises the same errors.
    """
    first = np.arange(held_out_count(holdout, total), dtype=np.uint32)
    return np.sort(permuted(first, np.zeros(1, np.uint32), total, SEED).astype(np.int64))


def hold_out(source: Source, holdout: float) -> Source:
    """Returns the training images, with the other images as their `held_out`.

    Args:
      holdout: `data.holdout`; 0 returns `source`.

    Raises:
      UserError: no image would be left to train on.
    """
    if holdout == 0:
        return source
    rows = held_out_rows(holdout, len(source))
    training = Subset(source, np.setdiff1d(np.arange(len(source)), rows))
    training.held_out = Subset(source, rows)
    return training
