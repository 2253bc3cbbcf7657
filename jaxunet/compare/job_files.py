"""Reads training jobs from files: a comparison file, or Python.

A comparison file is TOML; `jaxunet.compare.study_file` has its keys. A Python file has a function
`get_jobs(part, data)` that returns a list of `Job`, the most important first;
`docs/results/recipes/jobs.py` is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxunet.compare.jobs import Job, call_function, check_jobs
from jaxunet.compare.study_file import SUFFIX, read_study
from jaxunet.config import Config
from jaxunet.config.unused import check_used
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import shown


def read_jobs(named: str, data: str, *, begun: bool = False) -> list[Job]:
    """Reads and checks the jobs of a file; every field must have an effect in some job.

    With a part of a comparison file, the jobs of all its methods count for this check.

    Args:
      named: FILE or FILE:PART. For a comparison file, PART is names of methods joined by commas;
        `get_jobs` of a Python file receives it, or '' without one.
      data: folder of the images.
      begun: jobs have already started with these fields; fields without an effect are then logged,
        and are no error.

    Raises:
      UserError: the file or part does not exist, two jobs have the same name, a value is out of
        range, or a field has no effect.
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
        jobs = call_function(path, 'get_jobs', part, data)
    except UserError as error:
        raise UserError(f'--jobs: {str(error).removeprefix("--jobs: ")}') from None
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, Job) for job in jobs):
        raise UserError(f'--jobs: {named}: expected get_jobs() to return jobs, found {shown(jobs)}')
    try:
        check_jobs(jobs)
    except UserError as error:
        raise UserError(f'--jobs: {named}: {error}') from None
    return jobs


def load_configs(jobs: Sequence[Job]) -> list[Config]:
    """Returns the configs of jobs; jobs that differ only in their seeds share one."""
    different = {(job.config, str(job.fields)): job for job in jobs}
    return [job.load_config() for job in different.values()]


def check_configs_used(path: str, configs: Sequence[Config], *, begun: bool) -> None:
    """Checks that the fields of a file's configs have an effect in some of them.

    Args:
      path: the file, for the message.
      begun: jobs have already started with these fields; fields without an effect are then logged,
        and are no error.

    Raises:
      UserError: a field has no effect.
    """
    try:
        check_used(*configs, earlier=configs if begun else [])
    except UserError as error:
        raise UserError(f'{path}: {error}') from None
