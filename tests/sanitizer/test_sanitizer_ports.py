"""Ports of the sanitizer's runs: free, and of one run at a time."""

import itertools
import socket
import subprocess
import sys

import pytest
from support.fake_sanitizer import World

from tools.sanitizer import sanitizer, sanitizer_ports

FLAGS = ('--tools', 'memcheck', '--kernels', 'portable')
HOLDS = """\
import sys
sys.path.insert(0, 'tests')
from tools.sanitizer import sanitizer_ports
with sanitizer_ports.reserved() as first:
    print(first, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def ports(first):
    return set(range(first, first + sanitizer_ports.PORTS))


def test_pieces_at_the_same_time_have_ports_of_their_own(world):
    world.wait_for(3)
    assert world.run(*FLAGS, '--processes', '3') == 0
    found = world.ports()
    assert len(found) == 3
    for one, other in itertools.combinations(found, 2):
        assert not set(one) & set(other)


def test_an_occupied_port_is_not_taken(world):
    for offset in (0, 5, sanitizer_ports.PORTS - 1):
        with socket.socket() as other:
            with sanitizer_ports.reserved() as first:  # so that no other test has it
                occupied = first + offset
                other.bind(('127.0.0.1', occupied))
            other.listen()
            assert world.run(*FLAGS, '--again') == 0
            assert all(occupied not in found for found in world.ports()[-3:])
    assert len(world.ports()) == 3 * 3


def test_another_process_gets_other_ports():
    command = [sys.executable, '-c', HOLDS]
    with subprocess.Popen(
        command, cwd=sanitizer.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        held = ports(int(other.stdout.readline()))
        with sanitizer_ports.reserved() as first:
            assert not ports(first) & held
        other.stdin.close()
    assert other.returncode == 0


@pytest.mark.parametrize(('low', 'high'), [(32768, 60999), (15000, 50000), (60000, 65535)])
def test_the_ports_are_outside_of_the_ephemeral_ones(tmp_path, monkeypatch, low, high):
    file = tmp_path / 'range'
    file.write_text(f'{low}\t{high}\n')
    monkeypatch.setattr(sanitizer_ports, 'EPHEMERAL', file)
    with sanitizer_ports.reserved() as first:
        assert not ports(first) & set(range(low, high + 1))


def test_where_all_ports_are_ephemeral_some_of_them_are_taken(tmp_path, monkeypatch):
    file = tmp_path / 'range'
    file.write_text('1024\t65535\n')
    monkeypatch.setattr(sanitizer_ports, 'EPHEMERAL', file)
    with sanitizer_ports.reserved() as first, sanitizer_ports.reserved() as second:
        assert not ports(first) & ports(second)
        assert max(*ports(first), *ports(second)) < 2**16


def test_no_free_ports_are_an_error(monkeypatch):
    monkeypatch.setattr(sanitizer_ports, 'FIRST', 2**16 - sanitizer_ports.BLOCK)
    with (
        sanitizer_ports.reserved(),
        pytest.raises(RuntimeError, match='needs 32 ports in a row; none are free'),
        sanitizer_ports.reserved(),
    ):
        pass
