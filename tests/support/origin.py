"""The origin of rows, for scripts whose own process uses no GPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from jaxunet.runtime.rows import Row

PROGRAM = 'import json; from jaxunet.runtime import rows; print(json.dumps(rows.provenance()))'


def origin(checkout: pathlib.Path, **variables: str) -> Row:
    """Returns `jaxunet.runtime.rows.provenance` of a checkout, asked in a process of its own.

    Args:
      variables: of its environment, beside this process's.
    """
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM],
        cwd=checkout,  # whose modules it imports
        env=os.environ | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'} | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
