"""The lowered training step is the recorded one: moving and renaming code changes no program."""

from __future__ import annotations

import jax
import pytest
from support import lowered_step

VERSION, RECORDED = lowered_step.recorded()


LONG = ('elephants64 pallas', 'elephants64 xla', 'small pallas')


@pytest.mark.parametrize(
    'key', [pytest.param(k, marks=pytest.mark.long) if k in LONG else k for k in RECORDED]
)
def test_the_program_is_the_recorded_one(key: str, request: pytest.FixtureRequest) -> None:
    update = request.config.getoption('--update-golden')
    if jax.__version__ != VERSION:
        reason = f'the programs are those that jax {VERSION} lowers, here is {jax.__version__}'
        if update:
            pytest.fail(f'{reason}: record all with "python tests/support/lowered_step.py --write"')
        pytest.skip(reason)
    found = lowered_step.program(*key.split())
    if update:
        lowered_step.record({key: found})
        return
    changed = lowered_step.differences(RECORDED[key], found) or 'as many launches of every kernel'
    assert found == RECORDED[key], (
        f'{key}: the training step is another program ({changed}). Keep both texts with '
        f'"python tests/support/lowered_step.py {key} FILE" and compare them; if it is meant to '
        'change, record it with "pytest --update-golden tests/training/test_lowered_step.py" and '
        'give the reason in the commit'
    )
