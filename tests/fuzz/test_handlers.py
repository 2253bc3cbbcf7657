"""Wrong calls of the FFI handlers, with up to three mistakes each: a result or an error that names
the handler; never a crash.
"""

import random

import jax
import pytest
from hypothesis import strategies as st
from support.fuzzing import fuzz
from support.handler_calls import MISTAKES, right, spoil

pytestmark = pytest.mark.extension
HANDLERS = 13


@st.composite
def calls(draw):
    chance = random.Random(draw(st.integers(0, 2**32)))
    call = right(draw(st.integers(0, HANDLERS - 1)), chance)
    for mistake in draw(st.lists(st.sampled_from([*MISTAKES, 'empty']), min_size=1, max_size=3)):
        if mistake == 'empty':
            call = emptied(call, chance)
        elif call.operands and call.results:
            call = spoil(call, mistake, chance)
    return call


def emptied(call, chance):
    """The call with a size of 0 in an operand or result."""
    arrays = list(chance.choice([call.operands, call.results]))
    at = chance.randrange(len(arrays) or 1)
    if not arrays or not arrays[at][0]:
        return call
    shape = list(arrays[at][0])
    shape[chance.randrange(len(shape))] = 0
    changed = [*arrays[:at], (tuple(shape), arrays[at][1]), *arrays[at + 1 :]]
    if arrays == call.operands:
        return call._replace(operands=changed)
    return call._replace(results=changed)


def test_wrong_calls():
    def check(call):
        told = ''
        try:
            call()
        except jax.errors.JaxRuntimeError as error:
            told = str(error)
        assert not told or call.target in told, told
        return told

    fuzz('handlers', 40, calls(), check)
