"""Reads the output of compute-sanitizer that runs pytest."""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

KEPT = 5  # most reports in a row
IN_A_TEST = ('crashed', 'stalled')  # statuses of one test; the rest of its piece runs again


class RunResult(NamedTuple):
    """The result of a run.

    Fields:
      errors: number of errors that the tool counted; None if it ended without its summary.
      status: clean; errors: the tool found some; failed: a test failed, or none passed; no memory:
        the GPU had too little for the test or the tool; crashed: the tool or pytest ended without
        its summary, and the tool counted no errors; timeout: the run exceeded its time limit;
        stalled: no test ended for too long.
      reports: first lines of the tool's reports; for a run that was stopped, the innermost lines of
        its main thread's Python stack.
      where: the test that was running when the run was stopped or crashed, or 'before the first
        test', or 'after' and the last test; '' for other runs.
      exit_status: exit status of the tool's process; -N if signal N ended it; None if the run was
        stopped.
    """

    passed: int
    failed: int
    skipped: int
    errors: int | None
    status: str
    reports: list[str]
    where: str = ''
    exit_status: int | None = None

    def ending(self) -> str:
        """Returns the status for messages; for a run that ended early, also where and how."""
        return ', '.join(filter(None, [self.status, self.where, self._exit()]))

    def _exit(self) -> str:
        if self.status != 'crashed' or self.exit_status is None:
            return ''
        if self.exit_status >= 0:
            return f'exit status {self.exit_status}'
        return f'signal {-self.exit_status} ({signal.strsignal(-self.exit_status)})'


SUMMARY = re.compile(
    r'^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed .*)$',
    re.MULTILINE,
)
# A report begins with a line that is indented by one space; its further lines are indented more.
REPORT = re.compile(r'^========= (?! )(?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY)(.+)$')
OTHER_SIDE = re.compile(r'^========= {2,}(and .+)$')  # the other access of a race
PROGRESS = re.compile(r'^[.sFExX]+(?========== )', re.MULTILINE)  # pytest's dots on a tool's line
NO_MEMORY = re.compile(
    r'Unable to allocate enough memory|CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED: Out of memory'
    r'|no supported devices found'
)
COUNT = re.compile(r'(\d+) (passed|failed|skipped|errors?)\b')
# The last line of pytest. Lines of other programs can mention seconds, too.
END = re.compile(
    r'\b(?:\d+ (?:passed|failed|skipped|deselected|xfailed|xpassed|warnings?|errors?)'
    r'|no tests ran)\b.* in [\d.:]+s\b'
)


def parse(
    output: str, *, stopped: str = '', where: str = '', exit_status: int | None = None
) -> RunResult:
    """Reads the output of compute-sanitizer that runs pytest.

    The tool prints a summary for each process that it follows; their errors are added up.

    Args:
      output: what the tool and pytest printed.
      stopped: 'timeout' or 'stalled' if the run was stopped.
      where: see `RunResult.where`.
      exit_status: exit status of the tool's process.
    """
    output = PROGRESS.sub('', output)
    summaries = [int(a or b) for a, b in SUMMARY.findall(output)]
    errors = sum(summaries) if summaries else None
    ends = [line for line in output.splitlines() if END.search(line)]
    counts = dict.fromkeys(('passed', 'failed', 'skipped', 'error', 'errors'), 0)
    counts |= {name: int(n) for n, name in COUNT.findall(ends[-1] if ends else '')}
    failed = counts['failed'] + counts['error'] + counts['errors']
    if stopped:
        status = stopped
    elif NO_MEMORY.search(output):
        status = 'no memory'
    elif errors is None or not (errors or ends):
        status = 'crashed'
    elif errors:
        status = 'errors'
    else:
        status = 'failed' if failed or not counts['passed'] else 'clean'
    return RunResult(
        counts['passed'],
        failed,
        counts['skipped'],
        errors,
        status,
        reports=_reports(output)[:KEPT],
        where=where if stopped or status == 'crashed' else '',
        exit_status=None if stopped else exit_status,
    )


def lines(output: str) -> list[str]:
    """Returns the lines that the tool printed."""
    return [line for line in PROGRESS.sub('', output).splitlines() if line.startswith('=========')]


def _reports(output: str) -> list[str]:
    """Returns the first line of each report; for a race, with the lines of its other accesses."""
    reports: list[str] = []
    race = False  # True if the lines before belong to the report of a race
    for line in output.splitlines():
        if report := REPORT.match(line):
            reports.append(report[1])
            race = 'Race reported' in report[1]
        elif race and (other := OTHER_SIDE.match(line)):
            reports[-1] += f' {other[1]}'
        else:
            race = False
    return reports
