"""Ports of one run of compute-sanitizer, which no other run uses at the same time.

The tool and the processes that it follows connect on localhost: without flags, those of all runs on
the same 10 ports, from 49152 on.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
from collections.abc import Iterator

PORTS = 32  # of a run: one for each process that uses CUDA, and some still closing
FIRST = 20000  # services tend to listen below
BLOCK = 1 + PORTS  # the first port is held for as long as the others are taken
EPHEMERAL = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')


@contextlib.contextmanager
def reserved() -> Iterator[int]:
    """Yields the first of `PORTS` free ports; until the end, no other caller gets any of them.

    A bound socket on the port before them keeps them from other callers, also in other processes:
    whoever wants the same ports binds that one first. They are outside of the range from which the
    system takes ports for outgoing connections, as long as some there are free.

    Raises:
      RuntimeError: no such block of ports is free.
    """
    for base in _blocks():
        with socket.socket() as holder:
            if _bound(holder, base) and all(map(_is_free, range(base + 1, base + BLOCK))):
                yield base + 1
                return
    raise RuntimeError(
        f'compute-sanitizer needs {PORTS} ports in a row; none are free on localhost from {FIRST} '
        'on; end programs that listen there'
    )


def flags(first: int) -> list[str]:
    """Returns the tool's flags for the ports from `first` on; they change no result."""
    return ['--port', str(first), '--max-connections', str(PORTS)]


def _blocks() -> list[int]:
    """Returns the first port of each block; those that avoid the ephemeral ports come first.

    All callers use the same blocks, whatever their order, so that no two overlap.
    """
    low, high = 32768, 60999  # Linux's default
    with contextlib.suppress(OSError):
        low, high = map(int, EPHEMERAL.read_text(encoding='utf-8').split())
    blocks = range(FIRST, 2**16 - BLOCK + 1, BLOCK)
    return sorted(blocks, key=lambda base: base <= high and low < base + BLOCK)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return _bound(probe, port)


def _bound(socket_: socket.socket, port: int) -> bool:
    """Binds a socket to a port of localhost; returns whether the port was free."""
    try:
        socket_.bind(('127.0.0.1', port))
    except OSError:
        return False
    return True
