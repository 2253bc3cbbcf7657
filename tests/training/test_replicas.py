"""Devices whose training state differs end a run (`train.check_replicas_every`)."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from support.counting_step import count_only
from support.tiny import tiny_config

from jaxunet.checkpoint.state import TrainState
from jaxunet.data.sources import open_source
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError
from jaxunet.training.loop import train
from jaxunet.training.parallel import Parallel
from jaxunet.training.replicas import Replicas
from jaxunet.training.session import Session


def with_flipped_bits(array, bits):
    """The replicas of an array with the lowest bit of one number flipped, by number of device."""
    parts = []
    for number, shard in enumerate(array.addressable_shards):
        value = np.array(shard.data)
        if number in bits:
            value.reshape(-1).view(np.uint32)[-1] ^= bits[number]
        parts.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def state_of(params, moments):
    empty = dict.fromkeys(field.name for field in dataclasses.fields(TrainState))
    return TrainState(**empty | {'params': params, 'opt_state': moments})


@pytest.mark.parametrize('mode', ['jit', 'pmap'])
def test_a_flipped_bit_names_its_device(mode):
    config = tiny_config(parallel={'mode': mode}, train={'check_replicas_every': 2})
    parallel = Parallel(config, choose('xla'))
    assert len(parallel.devices) == 4
    replicas = Replicas(config, parallel)
    put = parallel.replicate
    params = put({'a': np.full((2, 3), np.nan, np.float32), 'b': np.float32(7)})
    moments = put({'count': np.int32(9)})
    replicas.check(state_of(params, moments), 4, 2)
    names = [str(device) for device in parallel.devices]

    def found(params, moments):
        with pytest.raises(UserError, match='training stopped at step 4: ') as caught:
            replicas.check(state_of(params, moments), 4, 2)
        assert str(caught.value).endswith('resumes from the last checkpoint, step 2.')
        return str(caught.value)

    one = {**params, 'a': with_flipped_bits(params['a'], {2: 1})}
    assert (
        f"{names[2]} differs from the other 3 in 1 of 3 arrays (first: ['params']['a'])"
    ) in found(one, moments)
    count = {'count': with_flipped_bits(moments['count'], {0: 1 << 31})}
    assert f"{names[0]} differs from the other 3 in 1 of 3 arrays (first: ['opt_state']" in found(
        params, count
    )
    two = {**params, 'a': with_flipped_bits(params['a'], {1: 1, 3: 1})}
    assert f'{" and ".join(names)} differ from each other in 1 of 3' in found(two, moments)


def test_a_run_ends_and_keeps_its_last_good_checkpoint(tmp_path, monkeypatch):
    def compile_step(self, *, cache):
        """A step that only counts, and flips a bit on one device."""
        count_only(self, cache=cache)
        count = self.step

        def step(state, data):
            new, metrics = count(state, data)
            if int(self.parallel.local(new.step)) == 3:
                leaves, tree = jax.tree.flatten(new.params)
                leaves[0] = with_flipped_bits(leaves[0], {1: 1 << 20})
                new = dataclasses.replace(new, params=jax.tree.unflatten(tree, leaves))
            return new, metrics

        self.step = step

    monkeypatch.setattr(Session, 'compile', compile_step)
    config = tiny_config(parallel={'devices': 2}, train={'check_replicas_every': 6})
    source = open_source('digits:', image_shape=(8, 8, 1))
    with pytest.raises(UserError, match=r'at step 4: .*checkpoint, step 2\.'):
        train(config, tmp_path, source)
    assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == ['2']


def test_a_single_device_is_told(caplog):
    config = tiny_config(parallel={'devices': 1}, train={'check_replicas_every': 2})
    Replicas(config, Parallel(config, choose('xla'))).check(state_of({}, {}), 2, None)
    assert 'nothing to compare on a single device' in caplog.text
