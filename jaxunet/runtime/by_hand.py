"""Processes that are started by hand: their flags, and the address that process 0 listens at."""

from __future__ import annotations

import ipaddress
import os
import socket

from absl import logging

from jaxunet.runtime.errors import UserError

BIND_VARIABLE = 'JAX_COORDINATOR_BIND_ADDRESS'  # read by JAX, too


def check_by_hand(coordinator: str, processes: int, process: int) -> None:
    """Raises `UserError` unless the flags of a start by hand are valid."""
    host, _, port = coordinator.rpartition(':')
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(
            '--coordinator: expected HOST:PORT of process 0, such as node1:12345, '
            f'found {coordinator!r}'
        )
    if processes < 1:
        raise UserError(f'--num_processes: expected 1 or more, found {processes}')
    if not 0 <= process < processes:
        raise UserError(
            f'--process_id: expected 0 to {processes - 1} for --num_processes={processes}, '
            f'found {process}'
        )


def listens_at(coordinator: str) -> str:
    """Returns HOST:PORT that process 0 listens at: `coordinator`, unless `BIND_VARIABLE` is set.

    JAX's default would be all interfaces of the machine. Warns if the host's name resolves to a
    loopback address, as a machine's own name does on many systems (127.0.1.1); other hosts know the
    machine by another address.
    """
    if chosen := os.environ.get(BIND_VARIABLE):
        return chosen
    host = coordinator.rpartition(':')[0].strip('[]')
    resolved = addresses(host)
    if resolved and host not in {*resolved, 'localhost'} and all(map(is_loopback, resolved)):
        logging.warning(
            '--coordinator: %s is %s on this machine, which no other host can reach; name its '
            'address if there are processes on others',
            host,
            ', '.join(sorted(resolved)),
        )
    return coordinator


def check_listens(address: str) -> None:
    """Raises `UserError` if this process cannot listen at HOST:PORT; JAX itself may then crash."""
    host, _, port = address.rpartition(':')
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip('[]'), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(where)
    except (OSError, ValueError):
        raise UserError(
            f'process 0 cannot listen at {address}: another program does, or this is no address of '
            'its machine. Choose another --coordinator, or JAX_COORDINATOR_PORT with a launcher, '
            f'or set {BIND_VARIABLE}=HOST:PORT.'
        ) from None


def shares_gpu(error: BaseException) -> bool:
    """Returns True for an exception of JAX that says that two processes use the same GPU."""
    return isinstance(error, RuntimeError) and 'Duplicate GPU detected' in str(error)


def shared_gpu_error() -> UserError:
    """Returns an error with a one-line message for an exception of `shares_gpu`."""
    seen = os.environ.get('CUDA_VISIBLE_DEVICES')
    return UserError(
        'two processes of the run use the same GPU: one that is started by hand uses all GPUs that '
        'it sees; give every process of a host its own, such as CUDA_VISIBLE_DEVICES=0 for the '
        f'first, found {"none set" if seen is None else seen}'
    )


def addresses(host: str) -> set[str]:
    """Returns the addresses of a host's name; an empty set if the name is unknown."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host.strip('[]'), None)}
    except OSError:
        return set()


def is_loopback(address: str) -> bool:
    """Returns True for an address that only this machine can reach."""
    return ipaddress.ip_address(address.partition('%')[0]).is_loopback
