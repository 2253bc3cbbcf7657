"""Names of classes in one form, whoever gives them: folders, files, arguments."""

from __future__ import annotations

import contextlib
import os
import unicodedata


def class_name(name: str) -> str:
    """Returns the name of a class in its one form: text that any locale and system can give again.

    Python reads the bytes of a folder's name or an argument by the locale, and macOS writes accents
    as letters of their own (NFD).
    """
    with contextlib.suppress(UnicodeError):
        name = os.fsencode(name).decode()
    text = name.encode('utf-8', 'backslashreplace').decode()  # bytes that are no text stay visible
    return unicodedata.normalize('NFC', text)
