"""Headless Chromium, for tests of pages; they skip where there is none."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

import pytest

NAMES = ('chromium', 'chromium-browser', 'google-chrome')
# Without a network, Chromium's own connections would take minutes to fail.
QUIET = (
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--disable-quic',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
)


def dumped(address: str) -> str:
    """Returns the HTML of a page after its scripts have run."""
    found = next(filter(None, map(shutil.which, NAMES)), '')
    if not found:
        pytest.skip('needs Chromium on the PATH')
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [found, *QUIET, f'--user-data-dir={profile}', '--dump-dom', address]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return ran.stdout
