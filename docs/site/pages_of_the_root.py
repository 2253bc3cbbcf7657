"""A hook of mkdocs: README, CONTRIBUTING, CHANGELOG and LICENSE become pages of the site.

Their links lead into docs/, and the links of the other pages lead to them by `../`: both become
links inside the site. Links to sources, which have no page, lead to the repository.
"""

from __future__ import annotations

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {
    'README.md': 'index.md',
    'CONTRIBUTING.md': 'CONTRIBUTING.md',
    'CHANGELOG.md': 'CHANGELOG.md',
}
LINK = re.compile(r'(\]\(|src=")([^)"\s]+)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the repository's root, and its license."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text('utf-8')))
    files.append(File.generated(config, 'LICENSE', content=(ROOT / 'LICENSE').read_text('utf-8')))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page with its links to and from the repository's root changed."""
    name = page.file.src_uri
    at_root = name in PAGES.values()
    folder = pathlib.PurePosixPath() if at_root else pathlib.PurePosixPath('docs', name).parent

    def changed(match: re.Match[str]) -> str:
        link, hash_mark, anchor = match[2].partition('#')
        if not link or re.match(r'https?:|mailto:', link):
            return match[0]
        path = pathlib.PurePosixPath(*_without_dots((folder / link).parts))
        target = PAGES.get(str(path), str(path).removeprefix('docs/'))
        up = '../' * (len(pathlib.PurePosixPath(name).parts) - 1)
        return f'{match[1]}{up}{target}{hash_mark}{anchor}'

    return LINK.sub(changed, markdown)


def _without_dots(parts: tuple[str, ...]) -> list[str]:
    """Returns the parts of a path with each `..` resolved."""
    found: list[str] = []
    for part in parts:
        if part == '..':
            found.pop()
        else:
            found.append(part)
    return found
