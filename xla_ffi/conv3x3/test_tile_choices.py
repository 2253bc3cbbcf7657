"""Choices of kernels and tiles, asserted at compile time in `tile_choices_test.cc` of each
folder.
"""

import pathlib
import subprocess

import pytest
from support.cpp import COMPILER, XLA_FFI, needs_compiler

# Each folder's test, and one of its assertions.
SOURCES = {
    'hopper': 'samples_at_4x4(19, 2, 0, 520) == 4',
    'portable': 'multistage_choice(linear(), 108, 1).splits == 1',
}

pytestmark = needs_compiler


def compile_source(source: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [
        COMPILER,
        '-std=c++17',
        '-fsyntax-only',
        '-Wall',
        '-Wextra',
        f'-I{XLA_FFI}',
        str(source),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def source(folder: str) -> pathlib.Path:
    return XLA_FFI / 'conv3x3' / folder / 'tile_choices_test.cc'


@pytest.mark.parametrize('folder', SOURCES)
def test_the_choices_hold(folder: str) -> None:
    done = compile_source(source(folder))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(('folder', 'right'), SOURCES.items())
def test_a_wrong_choice_is_an_error(folder: str, right: str, tmp_path: pathlib.Path) -> None:
    """The assertions are really compiled: a reversed one fails."""
    text = source(folder).read_text()
    assert right in text
    wrong = tmp_path / 'wrong.cc'
    wrong.write_text(text.replace(right, right[:-1] + '8'))
    done = compile_source(wrong)
    assert done.returncode != 0
    assert 'static assertion failed' in done.stderr or 'static_assert failed' in done.stderr
