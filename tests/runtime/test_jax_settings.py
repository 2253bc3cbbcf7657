"""The types and random generator of a run do not depend on those of the process."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import checksum, read
from jaxunet.data.sources import open_source
from jaxunet.runtime.jax_settings import fixed_jax_settings
from jaxunet.training.loop import train


def drawn() -> tuple[str, int]:
    return str(jnp.arange(2).dtype), jax.random.key_data(jax.random.key(0)).size


def drawn_in_a_thread() -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    thread = threading.Thread(target=lambda: found.append(drawn()))
    thread.start()
    thread.join()
    return found


@pytest.fixture(params=['process', 'thread'])
def theirs(request, monkeypatch):
    """Other defaults of the process, as by environment variables, or of the caller's thread."""
    if request.param == 'thread':
        with jax.enable_x64(True), jax.default_prng_impl('rbg'):
            yield
        return
    jax.config.update('jax_enable_x64', True)
    jax.config.update('jax_default_prng_impl', 'rbg')
    try:
        yield
    finally:
        jax.config.update('jax_enable_x64', False)
        jax.config.update('jax_default_prng_impl', 'threefry2x32')


def test_ours_hold_in_all_threads(theirs) -> None:
    before = drawn()
    assert before == ('int64', 4)
    with fixed_jax_settings():
        assert [drawn(), *drawn_in_a_thread()] == [('int32', 2)] * 2
    assert drawn() == before


def test_blocks_of_threads_overlap(theirs) -> None:
    """The first to end must not restore what the process had: the other still needs ours."""
    first, second = fixed_jax_settings(), fixed_jax_settings()
    before = drawn_in_a_thread()
    threads = [threading.Thread(target=block.__enter__) for block in (first, second)]
    for thread in threads:
        thread.start()
        thread.join()
    for block, expected in ((first, [('int32', 2)]), (second, before)):
        block.__exit__(None, None, None)
        assert drawn_in_a_thread() == expected


def test_a_block_that_cannot_begin_leaves_nothing_behind(theirs, monkeypatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = drawn()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, 'start', refuse)
        with pytest.raises(RuntimeError, match='new thread'), fixed_jax_settings():
            pass
    with fixed_jax_settings():
        assert drawn() == ('int32', 2)
    assert drawn() == before


def test_a_fresh_state_is_the_same(theirs) -> None:
    found = fresh_state(tiny_config())
    with fixed_jax_settings():
        assert checksum(found) == checksum(fresh_state(tiny_config()))
    assert found.rng.shape == (2,)


def test_a_run_is_the_same(tmp_path) -> None:
    """It trains, saves, resumes and is read with other defaults of the process."""
    source = open_source('digits:', image_shape=(8, 8, 1))
    config = tiny_config(train={'steps': 3}, parallel={'devices': 1})
    assert train(config, tmp_path / 'plain', source) == 3
    with jax.enable_x64(True), jax.default_prng_impl('rbg'):
        assert train(config.replace(train={'steps': 2}), tmp_path / 'other', source) == 2
        assert train(config, tmp_path / 'other', source) == 3
        found = read(tmp_path / 'other').state
    assert checksum(found) == checksum(read(tmp_path / 'plain').state)
