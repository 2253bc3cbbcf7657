"""jaxunet: diffusion UNets in JAX, trained on hand-written GPU kernels.

The functions of `jaxunet.api` are attributes of this package. They are imported at their first use,
so that `import jaxunet` alone is quick and starts nothing.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxunet.api import Model, Run, UserError, evaluate, load, train, train_rows

__version__ = '0.2.0'
__all__ = ['Model', 'Run', 'UserError', 'evaluate', 'load', 'train', 'train_rows']


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(_api(), name)


def _api() -> types.ModuleType:
    """Returns `jaxunet.api`, imported at its first use.

    A thread imports it, because Ctrl-C, which comes to the main thread, would leave JAX half
    imported, and Python cannot import the rest later.
    """
    if imported := globals().get('api'):  # the import system sets it once all is imported
        return imported
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 (import jaxunet is quick)

    with ThreadPoolExecutor(1) as thread:  # its end waits for the import, even after Ctrl-C
        return thread.submit(importlib.import_module, f'{__name__}.api').result()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Command(types.ModuleType):
    """The module of a command that has the name of a function of `jaxunet.api`.

    Importing it makes it the attribute of this package, so it can be called as the function.
    """

    def __call__(self, *args: object, **options: object) -> object:
        return getattr(_api(), self.__name__.rpartition('.')[2])(*args, **options)


def is_function_too(module: str) -> None:
    """Makes the module of a command callable."""
    sys.modules[module].__class__ = _Command
