"""README and docs are true: tables match the rows, and links, files, commands and fields exist.

`tools/docs/write.py` writes the tables and the picture of the layers.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterator

import pytest

from jaxunet.config import Config
from jaxunet.runtime.plugins import BACKEND_GROUP
from tools.docs.doc_tables import TABLES
from tools.docs.layers_picture import PICTURE, layers_picture
from tools.docs.write import COMMAND, MARKED, PAGES

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINES = {'README.md': 160, 'docs/results.md': 500}
RESULT_BYTES = 8_000_000
HISTORY = 'CHANGELOG.md'  # it names what is gone, too
TOP = r'(?:configs|docs|jaxunet|pallas_kernels|xla_ffi|tests|tools|\.ci)'
PLACEHOLDER = re.compile(r'(?<![a-z])[A-Z]{2,}(?![a-z])')  # such as OP in xla_ffi/OP/vjp.py
SECTIONS = {field.name for field in dataclasses.fields(Config)}
SUFFIXES = ('csv', 'py')  # suffixes of files named like a section


def marked(text: str) -> dict[str, str]:
    """The tables of a page by name."""
    return {match[2]: match[3] for match in MARKED.finditer(text)}


def spans(text: str) -> list[str]:
    """Returns all text in backticks on one line, and the words of `text` blocks."""
    prose = re.sub(r'^```.*?^```', '', text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r'^```text$(.*?)^```', text, re.DOTALL | re.MULTILINE)
    return re.findall(r'`([^`\n]+)`', prose) + ' '.join(blocks).split()


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Every `python -m MODULE FLAGS` of a page: the module and the rest of its line."""
    joined = re.sub(r'\\\n\s*', ' ', text)
    for match in re.finditer(r'python -m ((?:jaxunet|pallas_kernels)[\w.]*)([^\n`#]*)', joined):
        yield match[1], match[2]


def module_file(module: str) -> pathlib.Path | None:
    """The file that `python -m` runs, None if there is none."""
    path = ROOT / module.replace('.', '/')
    files = (path.with_suffix('.py'), path / '__main__.py')
    return next((file for file in files if file.is_file()), None)


def is_field(path: str) -> bool:
    """Returns True if the config has `section.field`, or the field outside sections."""
    place: object = Config()
    for name in path.split('.'):
        if not hasattr(place, name):
            return False
        place = getattr(place, name)
    return True


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_tables_match_the_rows(page):
    for name, found in marked(page.read_text()).items():
        expected = TABLES[name]() + '\n'
        assert found == expected, f'{page.name}, table {name}: run {COMMAND}, or paste\n{expected}'


def test_every_table_is_shown_once():
    shown = [name for page in PAGES for name in marked(page.read_text())]
    assert sorted(shown) == sorted(TABLES)


def test_the_picture_shows_the_layers_of_pyproject():
    assert PICTURE.read_text() == layers_picture(), f'run {COMMAND}'


def test_questions_lead_from_the_readme_through_a_page_to_a_file():
    """Each row under "Where is ...?" links pages that README links too, and that name its files."""
    readme = (ROOT / 'README.md').read_text()
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    rows = re.findall(r'^\|(.+\?) \|(.+)\|(.+)\|$', text[text.index('## Where is') :], re.MULTILINE)
    assert len(rows) >= 10
    for question, links, answers in rows:
        pages = [link.partition('#')[0] for link in re.findall(r'\]\(([^)]+)\)', links)]
        told = text[: text.index('## Where is')] if '' in pages else ''
        for page in filter(None, pages):
            assert page == 'README.md' or f']({page})' in readme, f'README does not link {page}'
            told += (ROOT / page).read_text()
        for file in spans(answers):
            assert file in told, f'{question.strip()} {links.strip()}: no page names {file}'


def test_ci_runs_the_command_of_the_readme():
    (command,) = re.findall(r'^.*&& pytest$', (ROOT / 'README.md').read_text(), re.MULTILINE)
    install, test = command.split(' && ')
    lines = (ROOT / '.ci/run').read_text().splitlines()
    (ran,) = [line for line in lines if line.split(' ||')[0] == test]
    assert lines.index(install) < lines.index(ran)


@pytest.mark.parametrize('page', LINES)
def test_pages_are_short(page):
    assert len((ROOT / page).read_text().splitlines()) <= LINES[page]


def test_results_are_small():
    files = [path for path in (ROOT / 'docs/results').rglob('*') if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= RESULT_BYTES


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_lines_of_prose_are_short(page):
    lines = MARKED.sub('', page.read_text()).splitlines()
    long = [line for line in lines if len(line) > 100 and not line.startswith(('|', '!['))]
    assert not long, f'{page.name}: wrap at 100 characters: {long}'


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_links_exist(page):
    text = page.read_text()
    links = re.findall(r'\]\(([^)\s]+)\)', text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if re.match(r'https?:|mailto:', link):
            continue
        path, _, anchor = link.partition('#')
        file = page.parent / path if path else page
        assert file.exists(), f'{page.name}: no file {link}'
        if anchor:
            headings = re.findall(r'^#+ (.*)$', file.read_text(), re.MULTILINE)
            anchors = [re.sub(r'[^\w\- ]', '', h.lower()).replace(' ', '-') for h in headings]
            assert anchor in anchors, f'{page.name}: no heading {link}'


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_named_files_exist(page):
    for span in spans(page.read_text()):
        if re.fullmatch(rf'{TOP}/[\w./*-]+', span) and not PLACEHOLDER.search(span):
            assert list(ROOT.glob(span.rstrip('/'))), f'{page.name}: no file {span}'


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_named_modules_and_their_members_exist(page):
    for span in spans(page.read_text()):
        dotted = re.fullmatch(r'(?:jaxunet|pallas_kernels|xla_ffi)(?:\.\w+)+', span)
        if not dotted or span == BACKEND_GROUP:
            continue
        parts = span.split('.')
        depth = next(
            n
            for n in range(len(parts), 0, -1)
            if (path := ROOT.joinpath(*parts[:n])).is_dir() or path.with_suffix('.py').is_file()
        )
        path = ROOT.joinpath(*parts[:depth])
        file = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
        for member in parts[depth:]:
            assert re.search(rf'\b{member}\b', file.read_text()), f'{page.name}: no {span}'


@pytest.mark.parametrize(
    'page', [p for p in PAGES if p.name != HISTORY], ids=lambda page: page.name
)
def test_commands_and_their_flags_exist(page):
    for module, rest in commands(page.read_text()):
        file = module_file(module)
        assert file is not None, f'{page.name}: no command python -m {module}'
        modules = sorted(file.parent.glob('*.py')) if file.name == '__main__.py' else [file]
        source = ''.join(path.read_text() for path in modules)
        for package, name in (('checkpoint', 'model_flags'), ('sampling', 'flags')):
            if f'from jaxunet.{package} import {name}' in source:
                source += (ROOT / f'jaxunet/{package}/{name}.py').read_text()
        for flag in re.findall(r'(?<=\s)--([\w.]+)', rest):
            if flag.startswith('config.'):
                assert is_field(flag.removeprefix('config.')), f'{page.name}: no field {flag}'
            elif flag not in ('config', 'help'):
                name = rf"""DEFINE_\w+\(\s*['"](?:{flag}|{flag.removeprefix('no')})['"]"""
                other = rf"""add_argument\(\s*['"]--{flag}['"]"""
                assert re.search(f'{name}|{other}', source), f'{page.name}: no --{flag} of {module}'


def test_help_shows_commands_as_they_are_written():
    """--help prints the docstring, in which a single backslash would join two lines."""
    for file in (ROOT / 'jaxunet').rglob('*.py'):
        doc = ast.get_docstring(ast.parse(file.read_text())) or ''
        long = [line for line in doc.splitlines() if 'python -m' in line and len(line) > 100]
        assert not long, f'{file}: end the line before with two backslashes: {long}'


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_named_config_fields_exist(page):
    for span in spans(page.read_text()):
        match = re.fullmatch(r'(?:--config\.)?(\w+)\.(\w+)(?:=.*)?', span)
        if match and match[1] in SECTIONS and match[2] not in SUFFIXES:
            assert is_field(f'{match[1]}.{match[2]}'), f'{page.name}: no field {span}'
