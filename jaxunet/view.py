"""Shows runs in a browser: an overview of all runs in a folder, and the page of each.

    python -m jaxunet.view [runs] [--port PORT]

The server listens on this machine alone (127.0.0.1) and serves nothing but the pages and grids of
samples of these runs. On another machine, forward the port: `ssh -L 8000:localhost:8000 MACHINE`.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import pathlib
from collections.abc import Sequence

from absl import flags

from jaxunet.runtime import command
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.interrupt import importing
from jaxunet.runtime.paths import expanded

PORT = flags.DEFINE_integer(
    'port', 8000, 'Port of the server; 0 = any that is free.', lower_bound=0, upper_bound=65535
)


def main(argv: Sequence[str]) -> None:
    """Serves the runs of a folder until Ctrl-C."""
    with importing():  # only now, as --help needs none of it
        from jaxunet.training.overview import make_server  # noqa: PLC0415
    if len(argv) > 2:
        raise UserError(f'expected one folder of runs, found {", ".join(argv[1:])}')
    folder = pathlib.Path(expanded(argv[1] if len(argv) == 2 else 'runs'))
    if not folder.is_dir():
        raise UserError(f'no folder {folder}; expected a run, or a folder of runs such as runs')
    try:
        server = make_server(folder, PORT.value)
    except OSError as error:
        raise UserError(
            f'--port: {PORT.value}: {error.strerror}; choose another, or 0 for any that is free'
        ) from None
    with server:
        print(f'http://127.0.0.1:{server.server_port}/ shows {folder}; Ctrl-C ends', flush=True)
        server.serve_forever()


if __name__ == '__main__':
    command.run(main, arguments=True)
