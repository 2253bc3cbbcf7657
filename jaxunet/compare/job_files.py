"""Reads training jobs from files: a comparison file, or Python.

A comparison file is TOML; `jaxunet.compare.study_file` has its keys. A Python file has a function
`get_jobs(part, data)` that returns a list of `Job`, the most important first;
`docs/results/recipes/jobs.py` is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxunet.compare.jobs import Job, check_jobs, load_function
from jaxunet.compare.study_file import SUFFIX, read_study
from jaxunet.config import Config
from jaxunet.config.unused import check_used
from jaxunet.runtime.errors import UserError


def read_jobs(named: str, data: str, *, begun: bool = False) -> list[Job]:
    """Returns the jobs of a file, checked: every field must have an effect in some job.

    A part of a comparison file may be few of its methods, but a field may serve any of them.

    Args:
      named: FILE or FILE:PART. The part of a comparison file is names of methods, joined by commas;
        `get_jobs` of a Python file gets it, '' without one.
      data: folder of the images.
      begun: jobs began with these fields; those without an effect are only logged.

    Raises:
      UserError: no such file or part, jobs without a name of their own, a value out of range, or a
        field has no effect.
    """
    path, _, part = named.partition(':')
    if path.endswith(SUFFIX):
        study = read_study(path)
        jobs, every = study.jobs(part, data), study.jobs('', data)
    else:
        jobs = every = _python_jobs(named, data)
    check_configs_used(path, load_configs(every), begun=begun)
    return jobs


def _python_jobs(named: str, data: str) -> list[Job]:
    path, _, part = named.partition(':')
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


def load_configs(jobs: Sequence[Job]) -> list[Config]:
    """Returns the configs of jobs, once of those that differ only in their seeds."""
    different = {(job.config, str(job.fields)): job for job in jobs}
    return [job.load_config() for job in different.values()]


def check_configs_used(path: str, configs: Sequence[Config], *, begun: bool) -> None:
    """Checks that the fields of a file's configs have an effect in some of them.

    Args:
      path: the file, for the message.
      begun: runs began with these fields; those without an effect are only logged.

    Raises:
      UserError: a field has no effect.
    """
    try:
        check_used(*configs, earlier=configs if begun else [])
    except UserError as error:
        raise UserError(f'{path}: {error}') from None
