"""The folder in which a job of a queue trains, and from which it resumes."""

from __future__ import annotations

import json
import pathlib
import shutil

from jaxunet.compare.jobs import Job
from jaxunet.config import Config, identity, to_dict
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import read_json
from jaxunet.runtime.whole_files import written

FILE = 'job.json'  # identifies the run in the folder
ADVICE = 'the run starts again'


def prepare(
    folder: pathlib.Path, job: Job, config: Config, step_seconds: float, *, resume: bool
) -> pathlib.Path:
    """Returns the work folder of a job. It holds either the same run so far, or nothing.

    Args:
      folder: work folder of all jobs.
      config: config of the job.
      step_seconds: seconds that the clock counts for a step; a run with another number is not
        resumed.
      resume: keep what an earlier process has saved of the run.

    Raises:
      UserError: the folder cannot be written.
    """
    workdir = folder / job.name
    values = to_dict(config)
    values['data'] = {k: v for k, v in values['data'].items() if k != 'path'}  # it may move
    # As JSON stores it.
    now = json.loads(json.dumps({'config': identity(values), 'step_seconds': step_seconds}))
    if not resume or _kept(workdir) != now:
        remove(folder, job)
        with written(workdir / FILE) as partial:
            partial.write_text(json.dumps(now), encoding='utf-8')
    return workdir


def _kept(workdir: pathlib.Path) -> object:
    """Returns what identifies the run in the folder; None if that is unknown."""
    try:
        return read_json(workdir / FILE, advice=ADVICE)
    except UserError:
        return None


def remove(folder: pathlib.Path, job: Job) -> None:
    """Removes the work folder of a job, if it is there."""
    shutil.rmtree(folder / job.name, ignore_errors=True)
