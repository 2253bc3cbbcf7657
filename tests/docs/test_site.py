"""The site of the docs is built without a warning, and holds the pages of the root and the API."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytest.importorskip('mkdocs', reason='needs mkdocs: pip install -e ".[docs]"')


def test_the_site_is_built_strictly(tmp_path):
    command = ['build', '--strict', '--quiet', '-f', 'docs/site/mkdocs.yml', '-d', str(tmp_path)]
    done = subprocess.run(
        [sys.executable, '-m', 'mkdocs', *command],
        cwd=ROOT,
        env=os.environ | {'NO_MKDOCS_2_WARNING': '1'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    training = (tmp_path / 'training/index.html').read_text('utf-8')
    assert 'href="../results/#recipes"' in training
    assert 'href="../CONTRIBUTING/' in (tmp_path / 'results/index.html').read_text('utf-8')
    home = (tmp_path / 'index.html').read_text('utf-8')
    assert 'src="results/few_steps/elephants64.jpg"' in home
    assert (tmp_path / 'results/digits/samples.png').is_file()
    assert 'href="CONTRIBUTING/"' in home
    reference = (tmp_path / 'reference/index.html').read_text('utf-8')
    assert 'id="jaxunet.ops.functional.conv3x3"' in reference
