"""Docstrings begin with a verb or the thing itself, never with a dangling clause."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ('configs', 'docs', 'jaxunet', 'pallas_kernels', 'tests', 'tools', 'xla_ffi')
DANGLING = re.compile(
    r'\s*(Of|What|Whether|Which|Whose|Whom|How|Where|And|But|Nor|So that|Than|Thus)\b'
)


def files() -> list[pathlib.Path]:
    found = [ROOT / 'conftest.py']
    for folder in FOLDERS:
        found += sorted((ROOT / folder).rglob('*.py'))
    return found


def dangling(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and beginning of each docstring, also of fields, that begins with such a word."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        docstring = node.value.value
        if isinstance(docstring, str) and DANGLING.match(docstring):
            yield node.lineno, docstring.strip().splitlines()[0]


def test_docstrings_begin_with_a_verb_or_the_thing_itself() -> None:
    found = [
        f'{path.relative_to(ROOT)}:{line}: {beginning}'
        for path in files()
        for line, beginning in dangling(path.read_text(encoding='utf-8'))
    ]
    assert not found, 'begin with a verb or the thing itself:\n' + '\n'.join(found)


@pytest.mark.parametrize(
    'docstring', ['Of a run.', 'What a run leaves.', 'Whether it runs.', '\n  How it runs.']
)
def test_dangling_clauses_are_found(docstring: str) -> None:
    text = f'class Run:\n    steps: int\n    """{docstring}"""\n'
    assert dict(dangling(text)) == {3: docstring.strip()}
    assert not dict(dangling(text.replace(docstring, 'Offers what a run leaves.')))
