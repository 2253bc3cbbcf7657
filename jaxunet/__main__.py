"""The console script `jaxunet`: starts a command, and imports nothing of the others."""

from __future__ import annotations

import runpy
import sys

import jaxunet
from jaxunet.runtime import program
from jaxunet.runtime.errors import USER_ERROR, near_misses
from jaxunet.runtime.interrupt import end_quietly
from jaxunet.runtime.printing import let_printing_fail

COMMANDS = {
    'train': 'train a model, or resume a run',
    'sample': 'draw samples from a run or a weight file',
    'evaluate': 'measure samples or a model against real images',
    'export': 'write the weights for other programs',
    'prepare_data': 'convert images to the format of unet.cu, or to .npz',
    'benchmark': 'time training steps on several backends',
    'profile': 'trace training steps, and sum up their kernels',
    'sweep': 'measure combinations of settings',
    'view': 'show runs in a browser',
    'demo': 'draw with a model in a browser',
    'compare': 'compare methods of training by quality against time',
}
LIST = '\n'.join(f'  {name:14}{does}' for name, does in COMMANDS.items())
HELP = f"""Trains image diffusion models on hand-written GPU kernels.

  jaxunet COMMAND [--flag=value ...]
  jaxunet COMMAND --help          lists the flags of a command

Commands:
{LIST}

Own images, then 64 samples of the model:
  jaxunet train --config images --config.data.path=photos.zip
  jaxunet sample --checkpoint runs/images --output samples.png

jaxunet --completion bash|zsh prints completions: eval "$(jaxunet --completion bash)"
jaxunet --version prints the version."""


def main() -> None:
    """Runs the command that the first argument names; exits with 2 if there is none."""
    let_printing_fail()  # such as into a pipe that `head` has closed
    name, *arguments = sys.argv[1:] or ['--help']
    if name in ('--help', '-h', 'help'):
        print(HELP)
    elif name == '--version':
        print(f'jaxunet {jaxunet.__version__}')
    elif name == '--completion':
        from jaxunet.config import completion  # noqa: PLC0415 (only this needs the fields)

        shell = arguments[0] if arguments else ''
        if shell not in completion.SHELLS:
            _fail(f'--completion: expected {" or ".join(completion.SHELLS)}, found {shell!r}')
        print(completion.script(shell, COMMANDS))
    elif name in COMMANDS:
        program.started_by_script()
        end_quietly()
        sys.argv[:] = [f'jaxunet {name}', *arguments]
        runpy.run_module(f'jaxunet.{name}', run_name='__main__', alter_sys=True)
    else:
        _fail(f'unknown command {name!r}{near_misses(name, COMMANDS)}; see jaxunet --help')


def _fail(problem: str) -> None:
    print(f'error: {problem}', file=sys.stderr)
    sys.exit(USER_ERROR)


if __name__ == '__main__':
    main()
