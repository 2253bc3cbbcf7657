"""The notebooks of the docs run, and hold no output of a machine."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from support.commands import environment, python_path

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / 'docs' / 'notebooks' / 'first_model.ipynb'
LESS = {  # work, in a test of what the cells call
    'STEPS, MORE = 1500, 200': 'STEPS, MORE = 2, 2',
    "config='digits'": "config='digits', num_res_blocks=1, channel_mult=(1,), "
    'attention_resolutions=()',
}


def cells():
    return json.loads(NOTEBOOK.read_text('utf-8'))['cells']


def test_a_notebook_is_cleared():
    notebook = json.loads(NOTEBOOK.read_text('utf-8'))
    assert notebook['metadata'].keys() == {'kernelspec', 'language_info'}
    assert notebook['metadata']['language_info'] == {'name': 'python'}
    code = [cell for cell in cells() if cell['cell_type'] == 'code']
    assert len(code) > 5
    assert all((cell['outputs'], cell['execution_count']) == ([], None) for cell in code)
    assert not any(cell['metadata'] for cell in cells())


def settings(folder):
    """The environment of a process that runs the cells, in a folder of its own."""
    return environment() | {
        'PYTHONPATH': python_path(),
        'MPLBACKEND': 'agg',
        'MPLCONFIGDIR': str(folder),
        'TMPDIR': str(folder),
    }


def test_the_cells_run(tmp_path):
    """As a script, with few steps of a small network."""
    code = '\n'.join(''.join(cell['source']) for cell in cells() if cell['cell_type'] == 'code')
    for text, less in LESS.items():
        assert text in code
        code = code.replace(text, less)
    done = subprocess.run(
        [sys.executable, '-c', code],
        cwd=tmp_path,
        env=settings(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 'largest difference' in done.stdout


@pytest.mark.long
def test_a_notebook_is_executed(tmp_path, monkeypatch):
    """By a kernel of Jupyter, as it stands."""
    nbformat = pytest.importorskip('nbformat', reason='needs nbclient: pip install ".[test]"')
    nbclient = pytest.importorskip('nbclient', reason='needs nbclient: pip install ".[test]"')
    for name, value in (settings(tmp_path) | {'IPYTHONDIR': str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv('MPLBACKEND')
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=900, resources={'metadata': {'path': str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
    pictures = [output for output in outputs if 'image/png' in output.get('data', {})]
    assert len(pictures) >= 8
    shown = ''.join(output.get('data', {}).get('text/plain', '') for output in outputs)
    assert '<jaxunet run in' in shown
