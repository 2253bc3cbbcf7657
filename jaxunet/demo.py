"""Draws with a model in a browser: samples, variations of a picture, and parts painted anew.

    python -m jaxunet.demo --checkpoint runs/photos [--port PORT]

Needs Gradio: `pip install "jaxunet[demo]"`. The page is served on this machine alone (127.0.0.1).
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

from collections.abc import Sequence

from absl import flags

from jaxunet.runtime import command
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.interrupt import importing
from jaxunet.runtime.paths import of_user

CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'A workdir, a checkpoint in it or a weight file.', required=True
)
EMA = flags.DEFINE_string('ema', '', 'Average of the weights, as --ema of jaxunet.sample.')
PORT = flags.DEFINE_integer(
    'port', 7860, 'Port of the page; 0 = any that is free.', lower_bound=0, upper_bound=65535
)
of_user(CHECKPOINT)


def main(argv: Sequence[str]) -> None:
    """Serves the page until Ctrl-C."""
    del argv
    with importing():  # only now, as --help needs none of it
        from jaxunet.runtime import compiled_cache  # noqa: PLC0415
        from jaxunet.sampling.demo_page import check_gradio, make_page  # noqa: PLC0415
        from jaxunet.sampling.model import load  # noqa: PLC0415
    check_gradio()
    compiled_cache.enable_compilation_cache()
    page = make_page(load(CHECKPOINT.value, ema=EMA.value))
    try:
        page.launch(
            server_name='127.0.0.1', server_port=PORT.value or None, inbrowser=False, share=False
        )
    except OSError as error:
        raise UserError(f'--port: {PORT.value}: {error}; choose another, or 0') from None


if __name__ == '__main__':
    command.run(main)
