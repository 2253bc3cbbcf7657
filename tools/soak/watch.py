"""Memory, threads and open files of a long run, and a check that they do not grow."""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

from support.processes import PROC, family

Sample = dict[str, float]  # seconds since the start, and the quantities
Names = collections.Counter[str]  # threads by the name that they have in the system
# In smaps_rollup: all but the pages of mapped files, and but those that are free already.
OWN = {'Anonymous': 1, 'LazyFree': -1, 'Pss_Shmem': 1, 'Swap': 1}
ONCE = 0.1  # the largest growth that may happen once, as a share
# The name of the threads of tensorstore's pool. It adds one whenever file operations of a
# checkpoint wait for another, and ends them after 20 idle seconds; orbax allows 128.
POOL = 'ts_pool_worker'


def measure(pid: int) -> Sample:
    """Own MiB, threads and open files of a process and its descendants; GPU MiB if any.

    Memory of a GPU is that of all its processes; of the GPUs in CUDA_VISIBLE_DEVICES, if set. Own
    memory is without pages that the system drops when it likes: those of mapped files, such as
    libraries, and those that an allocator has given back.
    """
    sample: Sample = {'own_mib': 0.0, 'threads': 0.0, 'open_files': 0.0}
    for member in family(pid):
        with contextlib.suppress(OSError):
            folder = PROC / str(member)
            status, memory = (
                dict(line.split(':', 1) for line in (folder / name).read_text().splitlines()[1:])
                for name in ('status', 'smaps_rollup')
            )
            sample['open_files'] += len(list((folder / 'fd').iterdir()))
            kilobytes = (sign * int(memory[name].split()[0]) for name, sign in OWN.items())
            sample['own_mib'] += sum(kilobytes) / 1024
            sample['threads'] += int(status['Threads'])
    if shutil.which('nvidia-smi'):
        visible = os.environ.get('CUDA_VISIBLE_DEVICES', '')
        query = ['--query-gpu=memory.used', '--format=csv,noheader,nounits']
        printed = subprocess.run(
            ['nvidia-smi', *(['-i', visible] if visible else []), *query],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        sample['gpu_mib'] = float(sum(map(int, printed.split())))
    return sample


def thread_names(pid: int) -> Names:
    """Counts the threads of a process and its descendants by name."""
    names: Names = collections.Counter()
    for member in family(pid):
        for thread in PROC.glob(f'{member}/task/*/comm'):
            with contextlib.suppress(OSError):  # ended meanwhile
                names[thread.read_text().strip()] += 1
    return names


def watch(
    process: subprocess.Popen[bytes], seconds: float, every: float, stop: Callable[[], None]
) -> tuple[list[Sample], list[Names]]:
    """Measures a process until it ends; after `seconds`, calls `stop` once.

    The samples count the threads outside of `POOL`, the names all.
    """
    began, samples, stopped = time.monotonic(), [], False
    names: list[Names] = []
    while process.poll() is None:
        passed = time.monotonic() - began
        if not stopped:
            samples.append({'seconds': passed, **measure(process.pid)})
            names.append(thread_names(process.pid))
            samples[-1]['threads'] -= names[-1][POOL]
            if passed > seconds:
                stop()
                stopped = True
        time.sleep(every)
    return samples, names


def more_threads(names: Sequence[Names], settled: float) -> dict[str, list[int]]:
    """Returns the names with more threads in the last tenth of the settled run than in the first.

    Each with the least numbers in both, so that threads that come and go do not count.
    """
    later = names[round(settled * len(names)) :]
    tenth = max(len(later) // 10, 1)
    more = {
        name: [min(n[name] for n in part) for part in (later[:tenth], later[-tenth:])]
        for name in sorted(set().union(*later))
    }
    return {name: [before, after] for name, (before, after) in more.items() if after > before}


def growth(values: Sequence[float]) -> float:
    """The growth over the values, as a share of the first: of what grows all the time.

    A heap that reaches a new peak, or a pool that adds a thread, grows once; what leaks grows from
    each third of the values to the next. So the smaller of the two growths counts, and a single one
    only beyond `ONCE`.
    """
    third = max(len(values) // 3, 1)
    first, second, last = (
        statistics.median(part)
        for part in (values[:third], values[third : 2 * third] or values, values[-third:])
    )
    if not first:
        return float(last > 0)
    once = last / first - 1
    return once if once > ONCE else 3 * min(second - first, last - second) / first


def growths(samples: Sequence[Sample], settled: float) -> dict[str, float]:
    """The `growth` of every quantity once a share of the run, `settled`, is over."""
    return {name: growth(values) for name, values in _later(samples, settled).items()}


def ends(samples: Sequence[Sample], settled: float) -> dict[str, list[float]]:
    """The medians of every quantity in the first and in the last tenth of the settled run."""
    by_name = {}
    for name, values in _later(samples, settled).items():
        tenth = max(len(values) // 10, 1)
        by_name[name] = [statistics.median(values[:tenth]), statistics.median(values[-tenth:])]
    return by_name


def _later(samples: Sequence[Sample], settled: float) -> dict[str, list[float]]:
    later = samples[round(settled * len(samples)) :]
    return {name: [s[name] for s in later] for name in later[0] if name != 'seconds'}
