"""Files written whole or not at all."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess

from jaxunet.runtime.whole_files import machine, replacing


def test_what_killed_processes_left_is_removed(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen(['true']) as process:
        ended = process.pid
    host, target = machine(), tmp_path / 'a.png'
    left = {tmp_path / f'.{name}.png.{host}.{ended}.partial' for name in 'ab'}
    old = {  # of a container that ran here before this one, and of an earlier version
        tmp_path / f'.c.png.{platform.node()}.1.{os.getppid()}.partial',
        tmp_path / f'.c.png.{platform.node()}.{ended}.partial',
    }
    kept = {
        tmp_path / f'.a.png.{host}.{os.getppid()}.partial',
        tmp_path / f'.a.png.elsewhere.{ended}.partial',
        tmp_path / f'.a.png.{platform.node()}.1.{ended}.partial',  # of another container
        tmp_path / f'.a.png.{host}.x.partial',
    }
    for path in left | old | kept:
        path.touch()
    for path in old:
        os.utime(path, (0, 0))
    with replacing(target) as partial:
        assert not any(path.exists() for path in left | old)
        partial.write_text('new')
    assert set(tmp_path.iterdir()) == kept | {target}
    assert target.read_text() == 'new'


def test_every_name_that_the_file_system_takes_can_be_written(tmp_path: pathlib.Path) -> None:
    longest = os.pathconf(tmp_path, 'PC_NAME_MAX')
    start = 'é' * ((longest - 5) // 2) + 'x' * ((longest - 5) % 2)
    first, second = tmp_path / f'{start}1.bin', tmp_path / f'{start}2.bin'
    with replacing(first) as one, replacing(second) as two:
        one.write_text('1')
        two.write_text('2')
        assert one.name.startswith('.é')
    assert (first.read_text(), second.read_text()) == ('1', '2')
    with subprocess.Popen(['true']) as process:
        ended = process.pid
    left = one.with_name(one.name.replace(f'.{os.getpid()}.', f'.{ended}.'))
    left.touch()
    with replacing(first):
        assert not left.exists()
        one.touch()
