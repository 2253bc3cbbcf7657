"""The bits that orders of images and dropout are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxunet.runtime.bits import mix_bits

# MurmurHash3's fmix32, by its published C code.
MIXED = {0: 0, 1: 0x514E28B7, 2: 0x30F4C306, 0xDEADBEEF: 0x0DE5C6A9, 0xFFFFFFFF: 0x81F16F39}


@pytest.mark.parametrize('mix', [mix_bits, jax.jit(mix_bits)], ids=['numpy', 'jax'])
def test_the_bits_are_those_of_murmurhash(mix):
    words = np.array(list(MIXED), np.uint32)
    mixed = mix(words)
    assert mixed.dtype == jnp.uint32
    assert mixed.tolist() == list(MIXED.values())
