"""Commands work while a GPU starts."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from support.commands import ROOT
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.weights import write_weights

LOADS = """
import sys
import jaxunet.sample
from jax._src import xla_bridge
from jaxunet.checkpoint.load import load_model
load_model(sys.argv[1], ema='')
print(list(xla_bridge._backends), 'orbax.checkpoint' in sys.modules)
"""


def test_weights_are_read_without_devices(tmp_path: pathlib.Path) -> None:
    """Sampling reads them while a GPU starts, so nothing may wait for it; nor is orbax needed."""
    file, config = tmp_path / 'model.safetensors', tiny_config()
    write_weights(str(file), fresh_state(config).params, config)
    done = subprocess.run(
        [sys.executable, '-c', LOADS, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == '[] False\n', done.stderr
