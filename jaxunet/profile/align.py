"""Which instruction each kernel of a GPU belongs to, where the trace does not tell.

XLA records most kernels into CUDA graphs (command buffers), and a trace names only the graph. But kernels run in the order of the
program's schedule, a fusion's kernel is called like the fusion (or like an identical one, whose kernel it shares), and what libraries
launch lies between them: so kernels and schedule are aligned as two texts are.
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
    """Whether a device event is a copy or fill, by its name; CUDA graphs copy by kernels called `memcpy...`."""
    return kernel.lower().startswith(COPY_NAMES)


def stem(name: str) -> str:
    """A name without the numbers that the compiler appends; those of the project's own kernels, `jaxunet_...`, may have a meaning."""
    return name.partition('.')[0] if name.startswith('jaxunet_') else _NUMBERS.sub('', name) or name


def align(kernels: Sequence[str], schedule: Sequence[str], libraries: Sequence[bool]) -> list[str]:
    """The instruction of each kernel.

    Args:
      kernels: names of one run's kernels and copies, in order.
      schedule: the instructions that do work, in order (`Program.schedule`); each has one kernel, or several if a library does it.
      libraries: for each instruction of the schedule, whether a library does it.

    Graphs may run independent parts in another order than the schedule's: those are matched by name alone, in order.
    """
    if not schedule:
        return [''] * len(kernels)
    shared = {stem(name) for name in kernels} & {stem(name) for name in schedule}
    seen = [stem(k) if stem(k) in shared else _COPY if is_copy(k) else _LIBRARY for k in kernels]
    # A fusion whose name no kernel has is a copy.
    planned = [
        stem(s) if stem(s) in shared else _LIBRARY if lib else _COPY
        for s, lib in zip(schedule, libraries, strict=True)
    ]
    found: list[int | None] = [None] * len(kernels)
    left: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)
    for tag, k1, _, s1, s2 in difflib.SequenceMatcher(
        None, seen, planned, autojunk=False
    ).get_opcodes():
        for s in range(s1, s2):
            if tag == 'equal':
                found[k1 + s - s1] = s
            else:
                left[planned[s]].append(s)
    for k, token in enumerate(seen):
        if found[k] is None and left[token]:
            found[k] = left[token].popleft()
    # What remains are more kernels of a library's call: the next one's, as its main kernel often comes last, else the one's before.
    following: int | None = None
    for k in reversed(range(len(kernels))):
        if found[k] is not None:
            following = found[k] if seen[k] == _LIBRARY else None
        elif following is not None:
            found[k] = following
    before = 0
    for k, index in enumerate(found):
        before = found[k] = before if index is None else index
    return [schedule[index] for index in found if index is not None]
