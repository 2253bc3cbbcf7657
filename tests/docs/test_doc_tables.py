"""The sentence below the README's table of steps names rows with fewer steps per call."""

from __future__ import annotations

import pytest
from support.doc_tables import steps_per_call

ROWS = {
    ('pytorch-best', 32): {},
    ('pytorch-best', 256): {'steps_per_call': 1},
    ('xla', 32): {'steps_per_call': 20},
    ('xla', 256): {'steps_per_call': 20},
    ('pallas', 32): {'steps_per_call': 20},
    ('pallas', 256): {'steps_per_call': 20},
}


@pytest.mark.parametrize(
    ('others', 'text'),
    [
        ({}, 'jaxunet ran 20 steps per call.'),
        (
            {('pallas', 256): {}},
            'jaxunet ran 20 steps per call, except `pallas` at batch 256, which ran 1 per call.',
        ),
        (
            {('pallas', 256): {}, ('xla', 32): {'steps_per_call': 1}},
            'jaxunet ran 20 steps per call, except `pallas` at batch 256 and `xla` at batch 32, '
            'which ran 1 per call.',
        ),
        ({key: {} for key in ROWS}, 'jaxunet ran 1 step per call.'),
    ],
    ids=['alike', 'one', 'two', 'single_steps'],
)
def test_rows_with_fewer_steps_per_call_are_named(others, text):
    assert steps_per_call(ROWS | others) == text
