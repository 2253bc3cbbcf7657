"""Starts are measured cold and warm, and their rows are kept at once."""

from __future__ import annotations

import pathlib

from jaxunet.runtime import rows
from tools.gpu import starts


def test_rows_of_starts(tmp_path: pathlib.Path, monkeypatch) -> None:
    """A case that fails cold is not tried warm; no row waits for another."""

    def measure(case, folders, cores, lanes, *, warm, end):
        error = 'exit status 1' if case.task == 'sample' else None
        return {'cache': 'kept' if warm else 'empty', 'said': [], 'error': error} | dict.fromkeys(
            ('imported_s', 'first_s', 'ready_s', 'total_s', 'step_ms'), 1.0
        )

    monkeypatch.setattr(starts, 'measure', measure)
    monkeypatch.setattr(starts, 'script', lambda *_, **__: '123\n')
    monkeypatch.setattr(starts, 'origin', lambda root: {'git': 'abc1234'})
    cases = [starts.Case('train', 'bfloat16', None), starts.Case('sample', 'float32', 'cuda')]
    found = starts.run(cases, tmp_path / 'rows.jsonl', seconds=60, lanes=1)
    assert [(row['task'], row['cache']) for row in found] == [
        ('train', 'empty'),
        ('train', 'kept'),
        ('sample', 'empty'),
    ]
    assert found == rows.read(tmp_path / 'rows.jsonl')
    assert found[0]['forward_flops'] == 123
    assert '| train | bfloat16 | auto | 1.0 | 1.0 | 1.0 |' in starts.table(found)
