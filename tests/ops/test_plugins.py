"""Backends of other packages: found by their entry point, used, and refused with a clear error when
they do not fit.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxunet.config import OPS, Config, resolve, to_dict
from jaxunet.ops import backends
from jaxunet.ops.activation import Activation
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.vocabulary import Ops
from jaxunet.runtime import plugins
from jaxunet.runtime.errors import UserError

TOY = """
    from jaxunet.ops.linear.reference import linear
    from jaxunet.runtime.plugins import Backend

    def three_times(x, kernel, bias, *, residual=None):
        return 3 * linear(x, kernel, bias, residual=residual)

    BACKEND = Backend(name='toy', title='toy kernels', api={api}, ops={{'linear': three_times}},
    unavailable=lambda: {missing!r})
"""


PLAIN_NORM = """
    import jax.numpy as jnp
    from jaxunet.runtime.plugins import Backend

    def zeros(x, norm, *, silu=False):
        return jnp.zeros_like(x.value)

    BACKEND = Backend(name='toy', title='toy kernels', api={api}, ops={{'group_norm': zeros}},
    unavailable=lambda: {missing!r})
"""


def test_the_ops_of_the_config_are_those_of_the_vocabulary():
    plain = [name for name in Ops._fields if name not in backends.VARIANTS]
    assert (*plain, 'adamw') == OPS
    assert set(backends.VARIANTS.values()) <= set(OPS)


def test_ours_are_installed_first():
    assert plugins.backend_names()[:2] == ('pallas', 'cuda')


def test_a_third_party_backend_is_used(install):
    install(TOY)
    assert backends.choose('toy').names == dict.fromkeys(OPS, 'xla') | {'linear': 'toy'}
    ops = backends.choose('xla+linear=toy').ops
    x, kernel, bias = jnp.ones((1, 1, 1, 2)), jnp.ones((2, 3)), jnp.zeros((1, 3))
    np.testing.assert_array_equal(ops.linear(x, kernel, bias), np.full((1, 1, 1, 3), 6))
    norm = ops.group_norm(Activation.of(x), Norm(jnp.ones((1, 2)), jnp.zeros((1, 2)), 1))
    np.testing.assert_array_equal(norm, np.zeros((1, 1, 1, 2)))
    assert resolve(to_dict(Config()) | {'backend': 'toy'}).backend == 'toy'
    with pytest.raises(
        UserError, match=r"backend: attention: expected one of xla, pallas, cuda, found 'toy'"
    ):
        backends.choose('xla+attention=toy')


def test_a_backend_with_a_plain_op_gets_its_variant(install):
    install(PLAIN_NORM)
    x, row = Activation.of(jnp.ones((1, 1, 1, 2))), jnp.ones((1, 2))
    found = backends.choose('toy').ops.group_norm_and_input(x, Norm(row, row, 1), copies=2)
    np.testing.assert_array_equal(found.result, np.zeros((1, 1, 1, 2)))
    assert found.copies == (x, x)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            {'api': 7},
            'backend=toy: toy 1.2 implements version 7 of the kernel interface, this jaxunet '
            f'version {plugins.API}; install',
        ),
        (
            {'missing': 'no toy device'},
            'backend=toy: no toy device; use backend=xla, which runs everywhere',
        ),
        (
            {'source': 'raise ImportError("no driver")'},
            'backend=toy: toy_kernels:BACKEND of toy 1.2 cannot be imported: ImportError: no dr',
        ),
        (
            {'target': 'toy_kernels:three_times'},
            'expected a jaxunet.runtime.plugins.Backend, found <function three_times',
        ),
    ],
)
def test_a_backend_that_does_not_fit_is_refused(install, options, message):
    install(**{'source': TOY} | options)
    with pytest.raises(UserError, match=f'^.*{message}'):
        backends.choose('toy')


def test_a_backend_that_is_not_installed(monkeypatch):
    with pytest.raises(
        UserError, match=r"backend: expected one of auto, xla, pallas, cuda, found 'toy'"
    ):
        backends.choose('toy')
    monkeypatch.setattr('jaxunet.config.checks.backend_names', lambda: ())
    with pytest.raises(
        UserError,
        match=r"found 'cuda'; cuda comes with jaxunet, which is not installed here: run .pip "
        r'install -e',
    ):
        backends.choose('cuda')
