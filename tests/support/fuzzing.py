"""Runs the fuzz tests of `tests/fuzz`; environment variables change how much they try.

JAXUNET_FUZZ_TIMES: multiplies the number of cases; failing cases are then also minimized.
JAXUNET_FUZZ_SEED: a whole number; other numbers try other cases.
JAXUNET_FUZZ_STEPS: number of configs to train one step with; without it, none.
JAXUNET_FUZZ_ROWS: a file to which each test appends a row with what it tried and found.
"""

from __future__ import annotations

import collections
import importlib.metadata
import os
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from jaxunet.runtime import rows

# Without hypothesis (a GPU machine may lack the extra `test`), tests that import this are skipped.
MISSING = 'needs hypothesis: pip install -e ".[test]"'
hypothesis = pytest.importorskip('hypothesis', reason=MISSING)
st = pytest.importorskip('hypothesis.strategies', reason=MISSING)

Case = TypeVar('Case')

LIBRARIES = ('hypothesis', 'numpy', 'pillow')
TIMES, SEED, STEPS, ROWS = (f'JAXUNET_FUZZ_{name}' for name in ('TIMES', 'SEED', 'STEPS', 'ROWS'))


def fuzz(
    name: str,
    cases: int,
    strategy: st.SearchStrategy[Case],
    check: Callable[[Case], str],
) -> None:
    """Tries a check on random cases; appends a row if JAXUNET_FUZZ_ROWS is set.

    Args:
      name: name of the check in the row.
      cases: number of cases in the default suite, which are always the same.
      strategy: draws a case.
      check: returns the message that refused a case, or ''; raises if it finds a fault.
    """
    times, seed = (int(os.environ.get(name, default)) for name, default in ((TIMES, 1), (SEED, 0)))
    told: collections.Counter[bool] = collections.Counter()
    slowest, began = 0.0, time.process_time()
    generate = hypothesis.Phase.generate

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases * times,
        phases=(generate, hypothesis.Phase.shrink) if times > 1 else (generate,),
        database=None,
        deadline=None,  # `bounded` counts this process's time, not the clock's
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def run(case: Case) -> None:
        nonlocal slowest
        start = time.process_time()
        told[bool(check(case))] += 1
        slowest = max(slowest, time.process_time() - start)

    found = ''
    try:
        run()
    except BaseException as error:
        found = f'{type(error).__name__}: {error}'.split('\n')[0][:200]
        raise
    finally:
        if path := os.environ.get(ROWS):
            row: rows.Row = {
                'kind': 'fuzz',
                'case': name,
                'cases': told.total(),
                'refused': told[True],
                'accepted': told[False],
                'finding': found,
                'slowest_s': round(slowest, 3),
                'seconds': round(time.process_time() - began, 1),
                'command': ' '.join(
                    [f'{n}={os.environ[n]}' for n in (TIMES, SEED, STEPS) if n in os.environ]
                    + [f'{ROWS}=rows.jsonl pytest tests/fuzz -n 0']
                ),
                'libraries': {lib: importlib.metadata.version(lib) for lib in LIBRARIES},
            }
            rows.append(path, row | rows.provenance())
