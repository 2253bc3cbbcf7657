"""The origin of rows, for scripts whose own process does not use the GPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from jaxunet.runtime.rows import Row

PROGRAM = 'import json; from jaxunet.runtime import rows; print(json.dumps(rows.provenance()))'


def origin(checkout: pathlib.Path, **variables: str) -> Row:
    """Returns `jaxunet.runtime.rows.provenance` of a checkout, from a separate process.

    Args:
      checkout: the folder of the checkout.
      variables: environment variables of the process, besides those of this process.
    """
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM],
        cwd=checkout,  # so that it imports the modules of the checkout
        env=os.environ | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'} | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
