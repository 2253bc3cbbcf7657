"""Serves an overview of runs and the page of each, on the loopback interface."""

from __future__ import annotations

import contextlib
import html
import http.server
import pathlib
import re
import urllib.parse
from collections.abc import Iterator
from http import HTTPStatus

from jaxunet.runtime.errors import plural, printable
from jaxunet.training.logs import FILE as METRICS
from jaxunet.training.logs import read_metrics
from jaxunet.training.page import FILE as PAGE
from jaxunet.training.page import pictures

DEPTH = 3  # folders below the given one in which runs are looked for
SERVED = re.compile(rf'(?:(.*)/)?({re.escape(PAGE)}|samples/step_\d+\.png)')
LOCAL = ('127.0.0.1', 'localhost')
STYLE = """
body { margin: 0 auto; max-width: 1240px; padding: 20px 16px; font: 15px/1.5 system-ui, sans-serif;
  background: #fbfaf8; color: #1f2328; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(240px, 100%), 1fr));
  gap: 16px; align-items: start; }
a { color: inherit; text-decoration: none; background: #fff; border: 1px solid #e3e0da;
  border-radius: 8px; padding: 10px; overflow-wrap: anywhere; }
img { width: 100%; display: block; margin-bottom: 8px; }
small { color: #6b7280; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e7e5e0; }
  a { background: #1e2126; border-color: #30343b; } small { color: #9aa1ab; } }
"""


def make_server(folder: pathlib.Path, port: int) -> http.server.ThreadingHTTPServer:
    """Returns a server of the runs in a folder, on the loopback interface."""

    class Handler(_Handler):
        root = folder.resolve()

    return http.server.ThreadingHTTPServer(('127.0.0.1', port), Handler)


def runs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folder itself or those in it that hold a run, the newest first."""

    def below(parent: pathlib.Path, depth: int) -> Iterator[pathlib.Path]:
        if (parent / METRICS).is_file() or (parent / PAGE).is_file():
            yield parent
        elif depth:
            for child in sorted(parent.iterdir()):
                if child.is_dir() and not child.is_symlink() and not child.name.startswith('.'):
                    yield from below(child, depth - 1)

    def changed(run: pathlib.Path) -> float:
        return max(
            (run / name).stat().st_mtime for name in (METRICS, PAGE) if (run / name).exists()
        )

    return sorted(below(folder, DEPTH), key=changed, reverse=True)


def overview(folder: pathlib.Path) -> str:
    """Returns the HTML page of all runs in a folder: the last grid, step and loss of each."""
    cards = [_card(folder, run) for run in runs(folder)]
    body = (
        ''.join(cards) or f'<p>There are no runs in {html.escape(printable(str(folder)))} yet.</p>'
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>runs</title><style>{STYLE}</style>'
        f'<h1>{plural(len(cards), "run")}</h1><main>{body}</main></html>'
    )


def _card(folder: pathlib.Path, run: pathlib.Path) -> str:
    name = run.relative_to(folder).as_posix()
    base = '' if name == '.' else f'{urllib.parse.quote(name)}/'
    rows = read_metrics(run / METRICS) if (run / METRICS).is_file() else []
    grids = pictures(run)
    image = f'<img src="/{base}{grids[-1][1]}" alt="last samples" loading="lazy">' if grids else ''
    last = rows[-1] if rows else {}
    said = f'step {int(last["step"]):,}, loss {float(last["loss"]):.4g}' if last else 'no steps yet'
    # A run has a page from its first grid on.
    link = f' href="/{base}{PAGE}"' if (run / PAGE).is_file() else ''
    shown = html.escape(printable(run.name if name == '.' else name))
    return f'<a{link}>{image}<b>{shown}</b><br><small>{html.escape(said)}</small></a>'


class _Handler(http.server.BaseHTTPRequestHandler):
    """Serves `overview` and the files that `SERVED` matches, in folders below `root`."""

    root: pathlib.Path

    def do_GET(self) -> None:
        """Answers a request."""
        # A foreign page must not read this server under a name of its own.
        if urllib.parse.urlsplit(f'//{self.headers.get("Host", "")}').hostname not in LOCAL:
            self.send_error(HTTPStatus.FORBIDDEN, 'expected a local address')
            return
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip('/')
        single = (self.root / PAGE).is_file()
        if not path and not single:
            self._send(overview(self.root).encode(), 'text/html; charset=utf-8')
            return
        target = (self.root / (path or PAGE)).resolve()
        # The name of the file itself counts, not that of a link.
        inside = target.is_relative_to(self.root)
        name = target.relative_to(self.root).as_posix() if inside else ''
        if not (SERVED.fullmatch(name) and target.is_file()):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind = 'image/png' if target.suffix == '.png' else 'text/html; charset=utf-8'
        self._send(target.read_bytes(), kind)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ('Content-Type', kind),
            ('Content-Length', str(len(content))),
            ('Cache-Control', 'no-cache'),
            ('X-Content-Type-Options', 'nosniff'),
        ):
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the browser has gone on
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""
