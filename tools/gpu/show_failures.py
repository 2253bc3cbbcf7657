"""Prints every failure as soon as it happens; the machine may be gone before the summary."""

from __future__ import annotations

import pytest

CHARACTERS = 1500  # most characters shown, from the end of a failure's report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints a failed phase of a test; under xdist, the main process prints for all workers."""
    if report.failed:
        print(f'\nFAILED {report.nodeid}\n{report.longreprtext[-CHARACTERS:]}', flush=True)
