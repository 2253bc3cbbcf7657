"""tests/gpu/benchmarks.sh, with a stand-in for Python that notes its arguments."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / 'tests/gpu/benchmarks.sh'
STAND_IN = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in *imagenet64*) exit 3 ;; esac
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs the script with some parts; it returns status and calls."""
    python = tmp_path / 'bin/python3'
    python.parent.mkdir()
    python.write_text(STAND_IN)
    python.chmod(0o755)
    calls = tmp_path / 'calls'
    monkeypatch.setenv('PATH', f'{python.parent}{os.pathsep}{os.environ["PATH"]}')
    monkeypatch.setenv('CALLS', str(calls))

    def call(*parts):
        command = [SCRIPT, tmp_path / 'out', *parts]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return done, calls.read_text().splitlines() if calls.exists() else []

    return call


def test_a_part_that_fails_does_not_keep_the_others(run):
    done, calls = run()
    assert done.returncode == 1
    assert 'networks: exit status 3' in done.stdout
    assert {call.split()[1] for call in calls} == {
        'jaxunet.benchmark',
        'jaxunet.benchmark.kernels',
    }
    assert 'kernels: exit status 0' in done.stdout.splitlines()[-1]
    assert all((ROOT / call.split('--config ')[1].split()[0]).is_file() for call in calls[:-1])


def test_parts_are_chosen(run):
    done, calls = run('budget')
    assert (done.returncode, len(calls)) == (0, 2)
    assert all('--roofline' in call for call in calls)


def test_an_unknown_part_is_refused(run):
    done, calls = run('step', 'steps')
    assert (done.returncode, calls) == (2, [])
    assert 'part steps: expected some of step networks' in done.stdout
