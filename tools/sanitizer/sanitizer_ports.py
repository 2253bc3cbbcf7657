"""Reserves ports for a run of compute-sanitizer, so that no other run uses them at the same time.

The tool and the processes that it follows connect on localhost. Without flags, all runs use the
same 10 ports, from 49152 on.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
from collections.abc import Iterator

PORTS = 32  # ports of a run: one for each process that uses CUDA, and some that still close
FIRST = 20000  # services usually listen below
BLOCK = 1 + PORTS  # the first port of a block is held while the others are in use
EPHEMERAL = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')


@contextlib.contextmanager
def reserved() -> Iterator[int]:
    """Yields the first of `PORTS` free ports; during the block, no other caller gets any of them.

    A socket bound to the port before them reserves them, also against other processes: every caller
    binds that port first. If possible, the ports are outside of the range from which the system
    takes ports for outgoing connections.

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
    """Returns the tool's flags for the ports from `first` on; they do not change results."""
    return ['--port', str(first), '--max-connections', str(PORTS)]


def _blocks() -> list[int]:
    """Returns the first port of each block; blocks outside of the ephemeral ports come first.

    All callers have the same blocks, in any order, so that no two blocks overlap.
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
    """Binds a socket to a port of localhost; returns False if the port is in use."""
    try:
        socket_.bind(('127.0.0.1', port))
    except OSError:
        return False
    return True
