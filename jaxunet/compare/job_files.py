"""Reads training jobs from files: a comparison file, or Python.

A comparison file is TOML; `jaxunet.compare.study_file` has its keys. A Python file has a function
`get_jobs(part, data)` that returns a list of `Job`, the most important first;
`docs/results/recipes/jobs.py` is one.
"""

from __future__ import annotations

from jaxunet.compare.jobs import Job, check_jobs, load_function
from jaxunet.compare.study_file import SUFFIX, read_study
from jaxunet.runtime.errors import UserError


def read_jobs(named: str, data: str) -> list[Job]:
    """Returns the jobs of a file, checked.

    Args:
      named: FILE or FILE:PART. The part of a comparison file is names of methods, joined by commas;
        `get_jobs` of a Python file gets it, '' without one.
      data: folder of the images.

    Raises:
      UserError: no such file or part, jobs without a name of their own, or a value out of range.
    """
    path, _, part = named.partition(':')
    if path.endswith(SUFFIX):
        return read_study(path).jobs(part, data)
    try:
        get_jobs = load_function(path, 'get_jobs')
    except UserError as error:
        raise UserError(f'--jobs: {error}') from None
    jobs = get_jobs(part, data)
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, Job) for job in jobs):
        raise UserError(f'--jobs: {named}: expected get_jobs() to return jobs, found {jobs!r}')
    try:
        check_jobs(jobs)
    except UserError as error:
        raise UserError(f'--jobs: {named}: {error}') from None
    return jobs
