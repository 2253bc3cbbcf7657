"""Measurements of kernels become rows, whatever a side does, and wherever it is lowered."""

from __future__ import annotations

import concurrent.futures
import json

import jax
import jax.numpy as jnp
import pytest
from support.kernel_measurements import ORIGIN, fails, measured, outcomes, toy

from jaxunet.benchmark.kernels import lowering, table
from jaxunet.benchmark.kernels import measure as kernels
from jaxunet.runtime import gpu_time as timing
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.measurement import Measurement


def test_rows() -> None:
    """The numbers follow from the times; a side that fails, or computes something else, is a row
    that says so and harms no other.
    """
    good, broken, wrong, nan = measured(
        toy('good'),
        toy('broken', fails),
        toy('wrong', lambda i: {'y': i['x'][0] * 2.5, 'sum': jnp.sum(i['x'][0], axis=0)}),
        toy('nan', lambda i: {'y': i['x'][0] * jnp.nan, 'sum': jnp.sum(i['x'][0], axis=0)}),
    )
    assert (good['us_pallas'], good['us_pallas_quartiles'], good['us_xla'], good['ratio']) == (
        9.0,
        [8.0, 10.0],
        30.0,
        3.333,
    )
    moved = 4 * (16 * 8 * 2 + 8)  # x, y and their sum
    assert (good['bytes'], good['gbps'], good['tflops']) == (moved, round(moved / 9e3, 1), 0.2)
    assert good['kernels_pallas'] == {'kernel_of_measurement0_pallas': 9.0}
    assert (good['error'], good['difference']) == (None, 0)
    assert all(
        good[f'{what}_{side}'] >= 0
        for what in ('lower_s', 'compile_s', 'temp_bytes')
        for side in ('xla', 'pallas')
    )
    json.dumps(good, allow_nan=False)
    assert 'pallas: ValueError: does not compile' in broken['error']
    assert 'us_pallas' not in broken
    assert 'differ by 0.25' in wrong['error']
    assert 'differ by inf' in nan['error']
    assert nan['difference'] is None
    json.dumps(nan, allow_nan=False)


def test_a_row_of_three_sides() -> None:
    """Every backend has its numbers, and none may differ from XLA."""

    def sides(cuda: float) -> Measurement:
        m = toy('three')
        return m._replace(
            sides={
                **m.sides,
                'cuda': lambda i: {'y': i['x'][0] * cuda, 'sum': jnp.sum(i['x'][0], axis=0)},
            }
        )

    (row,) = measured(sides(2.0))
    assert (row['us_cuda'], row['ratio_cuda'], row['ratio'], row['error']) == (
        9.0,
        3.333,
        3.333,
        None,
    )
    assert (row['tflops_cuda'], row['gbps_cuda']) == (row['tflops'], row['gbps'])
    (row,) = measured(sides(2.5))
    assert 'differ by 0.25' in row['error']


def test_a_backend_of_another_package_has_numbers_and_a_table() -> None:
    m = toy('theirs')
    (row,) = measured(m._replace(sides={'xla': m.sides['xla'], 'mine': m.sides['pallas']}))
    assert (row['us_mine'], row['ratio_mine'], row['error']) == (9.0, 3.333, None)
    text = table.summary([ORIGIN | row])
    assert "XLA's time over the mine kernels'." in text
    assert '| toy | forward | 4 | 1 | 3.33 | 3.33 | theirs | – | met |' in text


def test_what_only_xla_has_is_not_measured() -> None:
    """On a GPU where no backend runs, that is everything."""
    both, alone = toy('both'), toy('alone')
    alone = alone._replace(sides={'xla': alone.sides['xla']})
    assert kernels.comparable([both, alone]) == [both]
    with pytest.raises(UserError, match='no backend that runs here has kernels for these cases'):
        kernels.comparable([alone])


def test_what_was_not_compiled_or_seen_is_not_lost() -> None:
    late = toy('late')
    assert outcomes(late, seconds=-1) == [late]
    (row,) = measured(toy('unseen'), trace=lambda programs, rounds: {})
    assert row['error'] == 'xla: the trace lost all of its kernels'
    (row,) = measured(
        toy('torn'),
        trace=lambda programs, rounds: dict.fromkeys(programs, timing.Times({'k': 1.0}, ())),
    )
    assert row['error'] == 'xla: the trace lost some of its kernels'


def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement has its row, in order, however they are grouped."""
    monkeypatch.setattr(kernels, 'GROUP', 2)
    assert [row['case'] for row in measured(*(toy(f'case{i}') for i in range(5)))] == [
        f'case{i}' for i in range(5)
    ]


def test_lowering_elsewhere() -> None:
    """A side that another process lowered is what runs; where that fails it lowers here, and
    nothing is waited for in vain.
    """
    pytest.importorskip('flatbuffers')  # jax.export needs it to serialize
    m = toy('apart')

    def future(
        result: lowering.Lowered | Exception | None,
    ) -> concurrent.futures.Future[lowering.Lowered]:
        waiting: concurrent.futures.Future[lowering.Lowered] = concurrent.futures.Future()
        if isinstance(result, Exception):
            waiting.set_exception(result)
        elif result is not None:
            waiting.set_result(result)
        return waiting

    exported = bytes(jax.export.export(jax.jit(m.sides['xla']))(m.inputs).serialize())
    (row,) = measured(m, elsewhere={(m.name, 'pallas'): future(lowering.Lowered(exported, 12.5))})
    assert (row['lower_s_pallas'], row['error']) == (12.5, None)
    (row,) = measured(m, elsewhere={(m.name, 'pallas'): future(RuntimeError('a worker died'))})
    assert row['error'] is None
    assert outcomes(m, elsewhere={(m.name, 'pallas'): future(None)}, seconds=1) == [m]
