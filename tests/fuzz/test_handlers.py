"""Wrong calls of the FFI handlers, with up to three mistakes each: a result or an error that names
the handler; never a crash.
"""

import contextlib
import functools
import random

import jax
import pytest
from support.fuzzing import fuzz, st
from support.handler_calls import HANDLERS, MISTAKES, right, spoil

import xla_ffi

pytestmark = pytest.mark.extension
DEVICES = ['cpu', pytest.param('gpu', marks=[pytest.mark.gpu, pytest.mark.extension('_cuda')])]


@st.composite
def calls(draw):
    chance = random.Random(draw(st.integers(0, 2**32)))
    call = right(draw(st.integers(0, len(HANDLERS) - 1)), chance)
    for mistake in draw(st.lists(st.sampled_from([*MISTAKES, 'empty']), min_size=1, max_size=3)):
        with contextlib.suppress(ValueError, IndexError):  # no array or size left to spoil
            spoiled = emptied if mistake == 'empty' else functools.partial(spoil, mistake=mistake)
            call = spoiled(call, draw=chance)
    return call


def emptied(call, draw):
    """The call with a size of 0 in an operand or result."""
    name = draw.choice(['operands', 'results'])
    arrays = list(getattr(call, name))
    at = draw.randrange(len(arrays))
    shape, kind = list(arrays[at][0]), arrays[at][1]
    shape[draw.randrange(len(shape))] = 0
    arrays[at] = (tuple(shape), kind)
    return call._replace(**{name: arrays})


def test_there_are_calls_of_every_handler():
    assert sorted(HANDLERS) == sorted(xla_ffi._cpu.registrations())


@pytest.mark.parametrize('platform', DEVICES)
def test_wrong_calls(platform):
    device = jax.local_devices(backend=platform)[0]

    def check(call):
        told = ''
        try:
            call(device)
        except jax.errors.JaxRuntimeError as error:
            told = str(error)
        assert not told or call.target in told, told
        return told

    fuzz('handlers' if platform == 'cpu' else f'handlers, {platform}', 40, calls(), check)
