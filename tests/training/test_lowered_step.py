"""The lowered training step is the recorded one: moving and renaming code changes no program."""

from __future__ import annotations

import json

import jax
import pytest
from support import lowered_step

RECORDED = json.loads(lowered_step.RECORDED.read_text(encoding='utf-8'))


@pytest.mark.parametrize('key', RECORDED['digests'])
def test_the_program_is_the_recorded_one(key: str) -> None:
    if jax.__version__ != RECORDED['jax']:
        pytest.skip(
            f'the digests are of programs that jax {RECORDED["jax"]} lowers, here is '
            f'{jax.__version__}'
        )
    name, backend = key.split()
    found = lowered_step.digest(name, backend)
    assert found == RECORDED['digests'][key], (
        f'{key}: the training step is another program. Keep both texts with '
        f'"python tests/support/lowered_step.py {key} FILE" and compare them; if it is meant to '
        'change, record it with "python tests/support/lowered_step.py --write" and give the reason '
        'in the commit'
    )
