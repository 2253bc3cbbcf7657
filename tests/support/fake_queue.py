"""Stands in for `jaxunet.compare.queue` where only its process matters; needs no JAX.

    python -m support.fake_queue --output=FOLDER ...

It writes its flags and variables to FOLDER/called.json, and then does what the environment variable
FAKE_QUEUE says: `end` exits with 0, `fail` as for a wrong flag, `partial` as for unfinished runs;
`wait` waits for a signal and then writes FOLDER/saved; `stall` exits as if the devices had stalled,
the first time; `hang` does so every time. `crash` claims two runs of `uniform` in turn: the first
takes too long, the second kills the process.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time


def main() -> None:
    """Acts as FAKE_QUEUE says."""
    flags = dict(argument[2:].split('=', 1) for argument in sys.argv[1:])
    folder = pathlib.Path(flags['output'])
    folder.mkdir(parents=True, exist_ok=True)
    names = ('CUDA_VISIBLE_DEVICES', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    print(f'[0 s] {folder.name} begins')
    again = (folder / 'called.json').exists()
    (folder / 'called.json').write_text(
        json.dumps(flags | {name: os.environ.get(name) for name in names})
    )
    act = os.environ['FAKE_QUEUE']
    if act == 'crash':
        crash(pathlib.Path(flags['claims']), str(folder))
    if act == 'fail':
        print('error: no file features.npz', file=sys.stderr)
    if act == 'hang' or (act == 'stall' and not again):
        print('error: the devices finished no step', file=sys.stderr)
        sys.exit(6)
    while act == 'wait' and not asked:
        time.sleep(0.01)
    if asked:
        (folder / 'saved').touch()
    sys.exit({'fail': 2, 'partial': 1, 'wait': 130}.get(act, 0))


def crash(claims: pathlib.Path, output: str) -> None:
    """Claims a job and ends before it is done, unless two jobs are claimed already."""
    claims.mkdir(exist_ok=True)
    number = len(list(claims.iterdir()))
    if number < 2:
        (claims / f'digits_uniform_seed{number}').write_text(output)
        print(f'error: seed {number}: not done after 5 s (--timeout)', file=sys.stderr, flush=True)
        os._exit(124) if number == 0 else os.kill(os.getpid(), signal.SIGKILL)


if __name__ == '__main__':
    main()
