"""Rows of measurements name the commit of the code that made them."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from jaxunet.runtime import rows


def test_only_changes_beside_the_rows_make_a_commit_dirty(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        name = ('-c', 'user.name=a', '-c', 'user.email=a@b.example')
        command = ['git', '-C', str(tmp_path), *name, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(rows, 'ROOT', tmp_path)
    assert rows.git_sha() is None  # no checkout
    code, measured = tmp_path / 'code.py', tmp_path / 'docs/results/faults/rows.jsonl'
    measured.parent.mkdir(parents=True)
    code.write_text('1')
    measured.write_text('')
    git('init', '-q')
    git('add', '.')
    git('commit', '-qm', 'a')
    commit = git('rev-parse', '--short=7', 'HEAD')
    rows.append(measured, {'a': 1})
    assert rows.git_sha() == commit
    code.write_text('2')
    assert rows.git_sha() == f'{commit}-dirty'
