"""The code of docs/own_networks.md runs, on every backend, with the results of XLA."""

import contextlib
import pathlib
import re

import jax
import numpy as np
import pytest
from support.mosaic import simulated

from jaxunet.config import OPS
from jaxunet.ops import backends as seam

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'own_networks.md'
SECTIONS = {
    section.partition('\n')[0]: '\n'.join(
        re.findall(r'^```python\n(.*?)^```', section, re.M | re.S)
    )
    for section in PAGE.read_text(encoding='utf-8').split('\n## ')
}
LIBRARIES = {'Flax linen': 'flax', 'Flax nnx': 'flax', 'Equinox': 'equinox'}
BLOCK = compile(SECTIONS['A block'], str(PAGE), 'exec')


def run(library: str, backend: str) -> dict[str, object]:
    """Returns the names that the page's code defines, with the ops of a backend as `auto`."""
    names: dict[str, object] = {'__name__': 'page'}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, '_auto', lambda precision: dict.fromkeys(OPS, backend))
        patch.setattr(seam, '_unavailable', lambda name: None)
        with (
            simulated() if backend == 'pallas' else contextlib.nullcontext(),
            jax.numpy_dtype_promotion('standard'),
            jax.numpy_rank_promotion('allow'),
        ):
            exec(BLOCK, names)
            exec(compile(SECTIONS[library], str(PAGE), 'exec'), names)
    return names


@pytest.mark.parametrize(
    ('library', 'backend'),
    [
        *(pytest.param(name, 'cuda', marks=pytest.mark.extension) for name in LIBRARIES),
        ('Flax linen', 'pallas'),  # one of them: simulated kernels are slow
    ],
)
def test_a_network_trains_alike_on_kernels(library, backend):
    pytest.importorskip(LIBRARIES[library])
    want, found = run(library, 'xla'), run(library, backend)
    np.testing.assert_allclose(found['value'], want['value'], rtol=1e-4)
    leaves = [jax.tree.leaves(names['params']) for names in (found, want)]
    assert len(leaves[0]) == 12
    for got, exact in zip(*leaves, strict=True):
        # The gradient of the bias of k is 0, and AdamW divides the noise in it by itself.
        if got.shape != (24,):
            np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-3)
