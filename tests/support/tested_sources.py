"""A digest of the source files that decide what a kernel's tests run. It needs neither git nor a
build, and is the same on every machine.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import pathlib
import re
import tomllib
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
NATIVE = ('.cu', '.cuh', '.cc', '.h')
SHARED = ('binding', 'build_tools', 'common')  # folders of xla_ffi that every op is built with
INCLUDE = re.compile(r'^#include "(\w+)/', re.MULTILINE)
# conftest.py imports it for a fixture of training steps, which no kernel test asks for.
FIXTURE = 'tests/support/shared_steps.py'
VERSIONED, VERSION = 'jaxunet/__init__.py', re.compile(rb'^__version__ = .*$', re.MULTILINE)


def files(test: str, root: pathlib.Path = ROOT) -> list[str]:
    """Returns the files that decide what a test file runs, sorted, relative to the root.

    These are the test file, conftest.py, all modules of the project that they import, directly or
    not, and, for each folder of xla_ffi among them, its C++ and CUDA sources, those of the folders
    that these include, and what every op is built with; and the tables of measured tiles for a test
    that reads them.

    Raises:
      ValueError: an import is relative, so that its file is not known.
    """
    found: set[str] = set()
    left = {'conftest.py', *_module_files(test.removesuffix('.py').replace('/', '.'), root)}
    while left:
        name = left.pop()
        found.add(name)
        for module in _imports((root / name).read_text(encoding='utf-8'), name):
            left.update(set(_module_files(module, root)) - found - {FIXTURE})
    folders = {name.split('/')[1] for name in found if re.match(r'xla_ffi/\w+/', name)}
    if folders:
        found |= _native(folders, root)
    if 'pallas_kernels/tile_table.py' in found:
        found |= _names((root / 'pallas_kernels/tiles').glob('*.jsonl'), root)
    return sorted(found)


@functools.cache
def digest(test: str, root: pathlib.Path = ROOT) -> str:
    """Returns the SHA-256 of `files` and of the settings of the build and of pytest, in hex digits.

    The version of jaxunet does not count. Computed once per process.
    """
    project = tomllib.loads((root / 'pyproject.toml').read_text(encoding='utf-8'))
    tools = project.get('tool', {})
    settings = [project.get('build-system'), tools.get('scikit-build'), tools.get('pytest')]
    sha = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in files(test, root):
        content = (root / name).read_bytes()
        if name == VERSIONED:
            content = VERSION.sub(b'', content)
        sha.update(f'\n{name} {len(content)}\n'.encode() + content)
    return sha.hexdigest()


@functools.cache
def _imports(text: str, name: str) -> frozenset[str]:
    """Returns the dotted names that a module imports anywhere, functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f'{name}, line {node.lineno}: import by its whole name')
            found.update(f'{node.module}.{alias.name}' for alias in node.names)
    return frozenset(found)


def _module_files(module: str, root: pathlib.Path) -> Iterator[str]:
    """Yields the files of the project that run when a dotted name is imported."""
    parts = module.split('.')
    for base in (root, root / 'tests', root / 'tests/fixtures'):  # as pytest's pythonpath
        for end in range(1, len(parts) + 1):
            path = base.joinpath(*parts[:end])
            yield from _names(
                (p for p in (path / '__init__.py', path.with_suffix('.py')) if p.is_file()), root
            )


def _native(folders: set[str], root: pathlib.Path) -> set[str]:
    """Returns the sources that the ops of these folders of xla_ffi are built from."""
    package = root / 'xla_ffi'
    found = {'xla_ffi/CMakeLists.txt'}
    for shared in SHARED:
        found |= _names(_sources(package / shared, (*NATIVE, '.py')), root)
    left, seen = set(folders), set(SHARED)
    while left := left - seen:
        folder = left.pop()
        seen.add(folder)
        for path in _sources(package / folder, NATIVE):
            found |= _names([path], root)
            left.update(INCLUDE.findall(path.read_text(encoding='utf-8')))
    return found


def _sources(folder: pathlib.Path, suffixes: tuple[str, ...]) -> Iterator[pathlib.Path]:
    return (path for path in folder.rglob('*') if path.suffix in suffixes)


def _names(paths: Iterable[pathlib.Path], root: pathlib.Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in paths}
