"""Finds the instruction of each GPU kernel when the trace does not name it.

XLA records most kernels into CUDA graphs (command buffers), and a trace names only the graph. But
kernels run in the order of the program's schedule, and a fusion's kernel has the name of the
fusion (or of an identical fusion, which shares its kernel). Kernels of libraries lie between them.
So kernels and schedule can be aligned like two versions of a text.
"""

from __future__ import annotations

import collections
import difflib
import re
from collections.abc import Sequence

_NUMBERS = re.compile(r'([._]\d+)+$')
_COPY, _LIBRARY = '(copy)', '(library)'
COPY_NAMES = ('memcpy', 'memset')


def is_copy(kernel: str) -> bool:
    """Returns True for the name of a copy or fill; CUDA graphs copy by kernels `memcpy...`."""
    return kernel.lower().startswith(COPY_NAMES)


def stem(name: str) -> str:
    """Returns a name without the numbers that the compiler appends.

    Numbers within the names of our own kernels, `jaxunet_...`, may have a meaning and stay.
    """
    return name.partition('.')[0] if name.startswith('jaxunet_') else _NUMBERS.sub('', name) or name


def align(kernels: Sequence[str], schedule: Sequence[str], libraries: Sequence[bool]) -> list[str]:
    """Returns the instruction of each kernel.

    A graph may run independent parts in another order than the schedule. Kernels that do not fit
    the schedule's order are matched by name alone.

    Args:
      kernels: names of the kernels and copies of one run, in order.
      schedule: the instructions that do work, in order (`Program.schedule`); each has one kernel,
        or several if a library runs it.
      libraries: for each instruction of the schedule, True if a library runs it.
    """
    if not schedule:
        return [''] * len(kernels)
    shared = {stem(name) for name in kernels} & {stem(name) for name in schedule}
    seen = [stem(k) if stem(k) in shared else _COPY if is_copy(k) else _LIBRARY for k in kernels]
    # A fusion without a kernel of its name was compiled to a copy.
    planned = [
        stem(s) if stem(s) in shared else _LIBRARY if lib else _COPY
        for s, lib in zip(schedule, libraries, strict=True)
    ]
    calls: list[int | None] = [None] * len(kernels)
    left: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)
    for tag, k1, _, s1, s2 in difflib.SequenceMatcher(
        None, seen, planned, autojunk=False
    ).get_opcodes():
        for s in range(s1, s2):
            if tag == 'equal':
                calls[k1 + s - s1] = s
            else:
                left[planned[s]].append(s)
    for k, token in enumerate(seen):
        if calls[k] is None and left[token]:
            calls[k] = left[token].popleft()
    # The rest are further kernels of library calls: either of the next call, whose main kernel
    # often comes last, or of the call before.
    following: int | None = None
    for k in reversed(range(len(kernels))):
        if calls[k] is not None:
            following = calls[k] if seen[k] == _LIBRARY else None
        elif following is not None:
            calls[k] = following
    before = 0
    for k, index in enumerate(calls):
        before = calls[k] = before if index is None else index
    return [schedule[index] for index in calls if index is not None]
