"""The words that start a command: `python -m jaxunet.train`, or `jaxunet train`."""

from __future__ import annotations

MODULE, SCRIPT = 'python -m jaxunet.', 'jaxunet '
_by_script = False


def started_by_script() -> None:
    """Makes `shown` write commands as the console script runs them."""
    global _by_script  # noqa: PLW0603
    _by_script = True


def shown(text: str) -> str:
    """Returns a text about `python -m jaxunet.COMMAND` in the words that started this process."""
    return text.replace(MODULE, SCRIPT) if _by_script else text
