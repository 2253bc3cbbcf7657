"""A digest of the source files that determine what a kernel's tests run.

It needs neither git nor a build, and is the same on every machine.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os.path
import pathlib
import re
import tomllib
from collections.abc import Iterable, Iterator

from tools.sanitizer import comments

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILED = ('.cu', '.cc')  # headers count if one of these includes them
SHARED = ('binding', 'build_tools')  # folders of xla_ffi that belong to the build of every op
COMMON = 'common'  # the folder from which an op uses only some sources
# The CPU handlers, and programs that tests compile; no GPU runs them.
CPU_ONLY = re.compile(r'cpu\.(cc|h)|cpu_module\.cc|.*_test\.cc')
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
# conftest.py imports it for a fixture of training steps, which no kernel test asks for.
FIXTURE = 'tests/support/shared_steps.py'
FACE = 'jaxunet/__init__.py'  # the version, and what users import; no kernel test takes it there
PACKAGING = ('wheel', 'sdist', 'metadata')  # settings of what a package holds, not of its build


def files(test: str, root: pathlib.Path = ROOT) -> list[str]:
    """Returns the files that determine what a test file runs, sorted, relative to the root.

    These are the test file, conftest.py, and all modules of the project that they import directly
    or indirectly. For each folder of xla_ffi among these modules, its C++ and CUDA sources count,
    those of the folders that these include, and `SHARED`; from `COMMON`, only the sources of
    included headers count. A header counts if a source includes it; `CPU_ONLY` files never count.
    For a test that reads tables of measured tiles, the tables count, too.

    Raises:
      ValueError: an import is relative, so its file is unknown.
    """
    paths: set[str] = set()
    left = {'conftest.py', *_module_files(test.removesuffix('.py').replace('/', '.'), root)}
    while left:
        name = left.pop()
        paths.add(name)
        for module in _imports((root / name).read_text(encoding='utf-8'), name):
            left.update(set(_module_files(module, root)) - paths - {FIXTURE, FACE})
    folders = {name.split('/')[1] for name in paths if re.match(r'xla_ffi/\w+/', name)}
    if folders:
        paths |= _native(folders, root)
    if 'pallas_kernels/tile_table.py' in paths:
        paths |= _names((root / 'pallas_kernels/tiles').glob('*.jsonl'), root)
    return sorted(paths)


@functools.cache
def digest(test: str, root: pathlib.Path = ROOT) -> str:
    """Returns the SHA-256 of `files` and of the settings of the build and of pytest, in hex digits.

    Comments and docstrings do not count, nor what a package holds. Computed once per process.
    """
    project = tomllib.loads((root / 'pyproject.toml').read_text(encoding='utf-8'))
    tools = project.get('tool', {})
    build = {k: v for k, v in tools.get('scikit-build', {}).items() if k not in PACKAGING}
    settings = [project.get('build-system'), build, tools.get('pytest')]
    sha = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in files(test, root):
        content = _code(root / name).encode()
        sha.update(f'\n{name} {len(content)}\n'.encode() + content)
    return sha.hexdigest()


@functools.cache
def _imports(text: str, name: str) -> frozenset[str]:
    """Returns the dotted names that a module imports anywhere, functions included."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f'{name}, line {node.lineno}: import by its whole name')
            modules.update(f'{node.module}.{alias.name}' for alias in node.names)
    return frozenset(modules)


def _module_files(module: str, root: pathlib.Path) -> Iterator[str]:
    """Yields the files of the project that run when a dotted name is imported."""
    parts = module.split('.')
    for base in (root, root / 'tests', root / 'tools/fixtures'):  # as pytest's pythonpath
        for end in range(1, len(parts) + 1):
            path = base.joinpath(*parts[:end])
            yield from _names(
                (p for p in (path / '__init__.py', path.with_suffix('.py')) if p.is_file()), root
            )


def _native(folders: set[str], root: pathlib.Path) -> set[str]:
    """Returns the sources that the ops of these folders of xla_ffi are built from."""
    package = root / 'xla_ffi'
    paths = {package / 'CMakeLists.txt'}
    left = {p for name in SHARED for p in _sources(package / name, (*COMPILED, '.py'))}
    left |= {path for name in folders for path in _sources(package / name, COMPILED)}
    while left:
        path = left.pop()
        if CPU_ONLY.fullmatch(path.name):
            continue
        paths.add(path)
        of_every_op = path.relative_to(package).parts[0] in SHARED  # includes headers of all ops
        for header in _headers(path, package):
            folder = header.relative_to(package).parts[0]
            if folder in (COMMON, *SHARED):
                left |= {header, *_sources_of(header)} - paths
            elif not of_every_op:
                left |= {header, *_sources(package / folder, COMPILED)} - paths
    return _names(paths, root)


def _headers(path: pathlib.Path, package: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files of xla_ffi that a source includes itself."""
    for name in INCLUDE.findall(_code(path)):
        tried = [pathlib.Path(os.path.normpath(base / name)) for base in (path.parent, package)]
        yield from [p for p in tried if p.is_file() and p.is_relative_to(package)][:1]


def _sources_of(header: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files that define what a header declares."""
    tried = (header.with_suffix(suffix) for suffix in ('.cc', '.cu'))
    return (path for path in tried if path.is_file())


def _code(path: pathlib.Path) -> str:
    return comments.without(path.read_text(encoding='utf-8'), path.suffix)


def _sources(folder: pathlib.Path, suffixes: tuple[str, ...]) -> Iterator[pathlib.Path]:
    return (path for path in folder.rglob('*') if path.suffix in suffixes)


def _names(paths: Iterable[pathlib.Path], root: pathlib.Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in paths}
