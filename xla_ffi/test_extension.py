"""The extension as a whole: what it says when it cannot run, and an op split over devices."""

import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_ffi
from jaxunet.ops import backends as ops

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = re.escape(f'build it with "JAXUNET_CUDA=1 pip install -e ." in {ROOT}')


def module(
    names: list[str], driver: int = 13000, needed: int = 13000, architectures: str = '80,90a-real'
) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        registrations=lambda: dict.fromkeys(names),
        driver_version=lambda: driver,
        needed_driver=needed,
        architectures=architectures,
    )


@pytest.mark.parametrize(
    ('cpu', 'cuda', 'platform', 'capability', 'message'),
    [
        (None, None, 'gpu', '9.0', rf'the extension is not built \(.*\); {BUILD}'),
        (module(['a']), None, 'gpu', '9.0', f'built without CUDA kernels .*; {BUILD}'),
        (module(['a', 'b']), module(['a']), 'gpu', '9.0', 'no CUDA kernels yet for b'),
        (
            module(['a']),
            module(['a'], 0),
            'cpu',
            '',
            'version 580 or later.*found no NVIDIA driver',
        ),
        (module(['a']), module(['a'], 12080), 'gpu', '9.0', 'found a driver for CUDA 12.8'),
        (
            module(['a']),
            module(['a'], 11080, 12000),
            'gpu',
            '9.0',
            'built with CUDA 12 .* version 525 or later.*CUDA 11.8',
        ),
        (
            module(['a']),
            module(['a'], 13000, 14000),
            'gpu',
            '9.0',
            'driver of CUDA 14.0 or later; found',
        ),
        (module(['a']), module(['a']), 'cpu', '', 'JAX runs on cpu'),
        (
            module(['a']),
            module(['a']),
            'gpu',
            '7.5',
            'compute capability 8.0 or later; some GPU has 7.5',
        ),
        (
            module(['a']),
            module(['a'], architectures='86-real,89-real'),
            'gpu',
            '9.0',
            f'built for 86-real,89-real; some GPU has compute capability 9.0; {BUILD}',
        ),
    ],
)
def test_what_is_missing_is_said(monkeypatch, cpu, cuda, platform, capability, message):
    monkeypatch.setattr(xla_ffi, '_cpu', cpu)
    monkeypatch.setattr(xla_ffi, '_cuda', cuda)
    device = types.SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind='some GPU'
    )
    monkeypatch.setattr(jax, 'devices', lambda: [device])
    with pytest.raises(ops.UserError, match=rf'backend=cuda: .*{message}'):
        ops.choose('cuda')


def test_nothing_is_missing(monkeypatch):
    monkeypatch.setattr(xla_ffi, '_cpu', module(['a']))
    monkeypatch.setattr(xla_ffi, '_cuda', module(['a'], 12080, 12000))
    device = types.SimpleNamespace(platform='gpu', compute_capability='9.0', device_kind='some GPU')
    monkeypatch.setattr(jax, 'devices', lambda: [device])
    assert ops.choose('cuda').ops == ops.choose('cuda', here=False).ops
    assert (
        str(ops.choose('cuda'))
        == 'ops: conv3x3=cuda, norm_silu_conv3x3=cuda, group_norm=cuda, attention=cuda, '
        'linear=cuda, adamw=cuda'
    )


def test_an_installation_without_sources_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(xla_ffi, '_cpu', None)
    monkeypatch.setattr(xla_ffi, '__file__', str(tmp_path / 'xla_ffi' / '__init__.py'))
    missing = xla_ffi.unavailable()
    assert missing is not None
    assert 'install a wheel of jaxunet with kernels (named manylinux, not none-any)' in missing
    assert '"JAXUNET_CUDA=1 pip install --force-reinstall --no-deps SOURCE"' in missing


@pytest.mark.parametrize(
    ('architectures', 'runs', 'fails'),
    [
        ('80,90a-real', ['8.0', '8.6', '9.0', '10.0', '12.0'], []),
        ('90a-real', ['9.0'], ['8.0', '10.0']),
        ('90a-virtual', ['9.0'], ['8.0', '10.0']),
        ('86-real', ['8.6', '8.9'], ['8.0', '9.0', '12.0']),
        ('80', ['8.0', '8.9', '12.0'], ['9.0']),  # without 90a, the Hopper kernels are empty
        ('100-real', ['10.0', '10.3'], ['9.0', '12.0']),
    ],
)
def test_code_runs_on_the_gpus_that_it_was_built_for(architectures, runs, fails):
    assert [c for c in runs if not xla_ffi._runs_on(architectures, c)] == []
    assert [c for c in fails if xla_ffi._runs_on(architectures, c)] == []


@pytest.mark.extension
@pytest.mark.extension('_cuda')
def test_the_cpu_and_the_cuda_module_have_the_same_handlers():
    assert set(xla_ffi._cpu.registrations()) == set(xla_ffi._cuda.registrations())
    assert xla_ffi._cuda.architectures


@pytest.mark.extension
def test_split_over_devices_as_in_training():
    """The op and its gradient under shard_map, on the CPU handlers."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices(backend='cpu')[:4]), ('batch',))
    spec = jax.sharding.PartitionSpec('batch')

    def pull(x):
        return jax.grad(
            lambda v: jnp.sum(jnp.sin(ops.choose('cuda', here=False).ops.attention(v, num_heads=2)))
        )(x)

    qkv = jax.random.normal(jax.random.key(0), (8, 5, 24))
    split = jax.jit(jax.shard_map(pull, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
        qkv
    )
    assert float(jnp.max(jnp.abs(split - pull(qkv)))) == 0


def test_no_launch_returns_the_error_of_an_earlier_call():
    """cudaGetLastError() may do so, and a launch with <<<...>>> reports errors only through it."""
    sources = [path for path in (ROOT / 'xla_ffi').rglob('*') if path.suffix in ('.cu', '.cuh')]
    assert any(path.name == 'launch.cuh' for path in sources)
    for path in sources:
        code = re.sub(r'//.*', '', path.read_text())
        assert not re.search(r'cudaGetLastError|<<<', code), path.name
