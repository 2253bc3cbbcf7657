"""The README's table of steps: its rows, and the sentence below it."""

from __future__ import annotations

import pytest

from tools.docs.step_table import BATCHES, NEEDED, SIDES, newest_steps, steps_per_call

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


def measured(git, time, sides=SIDES, **fields):
    of = {'config': 'elephants64', 'direction': 'step', 'error': None, 'git': git, 'time': time}
    return [{**of, 'backend': s, 'batch_size': b, **fields} for s in sides for b in BATCHES]


def test_the_rows_of_steps_are_of_the_newest_commit_that_has_those_needed():
    needed, older = measured('needed', '2', NEEDED), measured('older', '1')
    part = measured('part', '3', ['auto', 'xla'], steps_per_call=20)
    one_batch = measured('needed', '2', ['pallas'])[:1]
    for rows in ([*older, *needed, *one_batch, *part], [*needed, *one_batch, *part, *older]):
        found = newest_steps(rows)
        assert {row['git'] for row in found.values()} == {'needed'}
        assert found.keys() == {(side, batch) for side in NEEDED for batch in BATCHES}
    assert len(newest_steps(older)) == len(SIDES) * len(BATCHES)


def test_rows_with_more_steps_per_call_are_shown_and_overlap_only_of_auto():
    rows = [
        *measured('one', '1', steps_per_call=20),
        *measured('one', '1', steps_per_call=1),
        *measured('one', '1', concurrent_kernels=True, steps_per_call=20, median_ms=1.0),
        *measured('one', '1', error='no memory', steps_per_call=40),
        *measured('one', '1', batch_size=64, steps_per_call=40),
    ]
    found = newest_steps(rows)
    assert {row['steps_per_call'] for row in found.values()} == {20}
    assert {key for key, row in found.items() if 'median_ms' in row} == {
        ('auto', 32),
        ('auto', 256),
    }
