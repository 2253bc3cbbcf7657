"""Checkpoints that are kept and deleted."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints


@pytest.fixture(scope='module')
def state():
    """A state of few arrays, which is written at once."""
    weights = {'kernel': np.ones(3, np.float32)}
    return fresh_state(tiny_config()).replace(params=weights, ema={}, opt_state=())


@pytest.mark.parametrize(
    ('options', 'kept'),
    [
        ({'keep': 2}, [5, 6]),
        ({'keep': 1, 'keep_every': 2}, [2, 4, 6]),
        ({'keep': 1, 'keep_best': 1}, [3, 6]),
        ({'keep': 1, 'keep_best': 2}, [2, 3, 6]),
        ({'keep': 2, 'keep_every': 4, 'keep_best': 1}, [3, 4, 5, 6]),
    ],
)
def test_a_checkpoint_stays_for_one_of_three_reasons(
    options: dict[str, int], kept: list[int], state, tmp_path: pathlib.Path
) -> None:
    """Steps 2 and 3 score best; those without a score are no candidates."""
    scores: dict[int, float] = {}
    checkpoints = Checkpoints(tmp_path, scores=lambda: scores, **options)
    for step in range(1, 7):
        checkpoints.save(step, state, tiny_config())
        checkpoints.wait()
        scores |= {2: {2: 0.5}, 3: {3: 0.9}, 4: {4: -1.0}}.get(step, {})  # evaluated once saved
    checkpoints.close()
    assert sorted(int(p.name) for p in (tmp_path / 'checkpoints').iterdir()) == kept
