"""Training learns as it did with other versions of JAX: see tools/golden/losses.py."""

import itertools

import numpy as np
from support.golden import distance, recorded

from tools.golden import losses

FIRST = 10  # steps
# Another seed changes a loss by a tenth; the recorded versions differ by less than 1e-5.
RTOL = 1e-4


def test_the_first_steps_are_the_recorded_ones():
    found = losses.run(losses.config_of('tiny', 'xla', 'float32', losses.SEEDS[0]), FIRST)
    rows = {case: row for case, row in recorded().items() if case[:3] == ('tiny', 'xla', 'float32')}
    assert rows
    for case, row in rows.items():
        np.testing.assert_allclose(
            found,
            row['losses'][:FIRST],
            rtol=RTOL,
            err_msg=f'losses of jax {case[3]}; if training is meant to change, record it with '
            '"python tools/golden/losses.py --write" and give the reason in the commit',
        )


def test_recorded_versions_differ_by_less_than_seeds():
    rows = recorded()
    pairs = [(a, b) for a, b in itertools.permutations(rows, 2) if (a[0], a[2]) == (b[0], b[2])]
    assert len(pairs) >= 2 * len(losses.NETWORKS)
    for a, b in pairs:
        assert distance(rows[a]['losses'], rows[b]['losses']) < rows[b]['tolerance'], (a, b)
