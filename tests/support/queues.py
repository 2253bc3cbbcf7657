"""Queues of small jobs, for the tests of `jaxunet.compare.queue`."""

from __future__ import annotations

import dataclasses
import pathlib
import time

from jaxunet.compare import job_runner
from jaxunet.compare.comparison_file import read_jobs
from jaxunet.compare.job_runner import Queue
from jaxunet.compare.measure import Measurements
from jaxunet.compare.stopwatch import Limit
from jaxunet.runtime import rows

RESULTS = pathlib.Path(__file__).parents[2] / 'docs/results'
TINY = RESULTS / 'methods/tiny.toml'


def small_jobs():
    """Two of the small jobs: one case with two seeds, of which only the first holds images out and
    chooses an average.
    """
    first = [job for job in read_jobs(str(TINY), '') if job.case == 'uniform']
    assert [job.seed for job in first] == [0, 1]
    often = {'train.holdout_every': 1, 'train.log_every': 1}
    plain = {k: v for k, v in first[1].fields.items() if k != 'data.holdout'}
    return [
        dataclasses.replace(
            first[0], fields={**first[0].fields, **often}, seconds=(0.05, 0.6), choosing=8
        ),
        dataclasses.replace(first[1], fields=plain, averages=(), seconds=(0.1, 0.3), picture=9),
    ]


def make_queue(
    output, features, *, limit=600.0, reserve=0.0, elapsed=0.0, measurements=None, **options
):
    began = time.perf_counter() - elapsed
    return Queue(
        output=output,
        measurements=measurements or Measurements(str(features), output / 'pictures'),
        limit=Limit(limit, reserve, began=began),
        command='the command',
        work=output / 'work',
        **options,
    )


def rows_of(output):
    path = output / job_runner.ROWS
    return rows.read(path) if path.exists() else []
