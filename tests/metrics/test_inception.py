"""FID's Inception beside pytorch-fid's: against numbers that it computed, and, where it is
installed, against itself.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import pickle
import socket
import struct
import threading

import jax
import numpy as np
import pytest
from support.inception_case import COLUMNS, GOLDEN, images, of_pytorch_fid, random_state, summary

from jaxunet.metrics import features, inception, inception_weights
from jaxunet.metrics.inception_weights import from_state, read_state
from jaxunet.metrics.torch_legacy import MAGIC, read_legacy
from jaxunet.runtime import download, paths
from jaxunet.runtime.errors import UserError
from jaxunet.weights.torch_file import write_torch
from jaxunet.weights.torch_pickle import dump

TOLERANCE = 1e-4  # as a share of a layer's largest value


@pytest.fixture(scope='module')
def state() -> dict[str, np.ndarray]:
    return random_state()


@pytest.fixture(scope='module')
def computed(state) -> dict[str, np.ndarray]:
    """Every layer's output by name, and `features` and `logits`."""

    def everything(params: inception.Parameters, pixels: jax.Array) -> dict[str, jax.Array]:
        outputs: dict[str, jax.Array] = {}
        pooled = inception.pool3(params, inception.prepare(pixels), outputs.__setitem__)
        return {**outputs, 'features': pooled, 'logits': inception.logits(params, pooled)}

    params = from_state(state, 'random')
    return {
        name: np.asarray(value) for name, value in jax.jit(everything)(params, images()).items()
    }


def test_every_layer_against_golden_numbers(computed):
    with np.load(GOLDEN) as golden:
        assert set(golden) == set(computed)
        assert len(golden) == 94 + 11 + 2 + 2  # convolutions, blocks, pools, results
        for name, expected in golden.items():
            found = (
                computed[name][:, : COLUMNS[name]] if name in COLUMNS else summary(computed[name])
            )
            np.testing.assert_allclose(
                found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=name
            )


def test_every_layer_against_pytorch_fid(state, computed):
    pytest.importorskip('torch')
    try:
        import pytorch_fid.inception  # noqa: F401, PLC0415
    except (
        ImportError,
        RuntimeError,
    ) as error:  # torchvision raises the second when it was built for another torch
        pytest.skip(f'pytorch_fid: {error}')
    outputs = of_pytorch_fid(state)
    assert set(outputs) == set(computed)
    for name, expected in outputs.items():
        np.testing.assert_allclose(
            computed[name], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=name
        )


def test_resizing_is_torchs():
    """Half-pixel centres, edges clamped, no antialiasing; both ways."""
    for size in ((8, 13), (400, 299), (350, 500)):
        pixels = np.random.default_rng(0).integers(0, 256, (1, *size, 3), dtype=np.uint8)
        expected = pixels.astype(np.float64) / 255
        for axis, n in enumerate(size, start=1):
            at = np.clip((np.arange(299) + 0.5) * n / 299 - 0.5, 0, n - 1)
            low = np.floor(at).astype(int)
            high = np.minimum(low + 1, n - 1)
            share = (at - low).reshape([-1 if i == axis else 1 for i in range(4)])
            expected = expected.take(low, axis) * (1 - share) + expected.take(high, axis) * share
        np.testing.assert_allclose(
            inception.prepare(pixels), 2 * expected - 1, atol=2e-4 if max(size) > 299 else 2e-5
        )


def test_resizing_for_adm_is_that_of_tensorflow_1():
    """Pixel i lies at i · n/299, edges clamped, no antialiasing; then (p − 128)/128."""
    for size in ((8, 13), (299, 350)):
        pixels = np.random.default_rng(0).integers(0, 256, (1, *size, 3), dtype=np.uint8)
        expected = np.empty((1, 299, 299, 3))
        for i in range(299):
            y = i * size[0] / 299
            top, bottom = int(y), min(int(y) + 1, size[0] - 1)
            row = pixels[0, top] * (1 - (y - top)) + pixels[0, bottom] * (y - top)
            x = np.arange(299) * size[1] / 299
            left = x.astype(int)
            right = np.minimum(left + 1, size[1] - 1)
            share = (x - left)[:, None]
            expected[0, i] = row[left] * (1 - share) + row[right] * share
        found = inception.prepare_as_tensorflow(pixels)
        np.testing.assert_allclose(found, (expected - 128) / 128, atol=1e-5)


def test_spatial_features_are_adms(computed, monkeypatch):
    """The first 7 channels of TensorFlow's mixed_6/conv, 17×17, in the order of NHWC."""

    def replay(params, x, tap):
        for name, value in computed.items():
            tap(name, jax.numpy.asarray(value))
        return jax.numpy.asarray(computed['features'])

    monkeypatch.setattr(inception, 'pool3', replay)
    prepared = jax.numpy.zeros((2, 299, 299, 3))
    both = np.asarray(inception.pool3_and_spatial({}, prepared))
    assert both.shape == (2, inception.DIMENSION + inception.SPATIAL_DIMENSION) == (2, 2048 + 2023)
    np.testing.assert_array_equal(both[:, :2048], computed['features'])
    maps = both[:, 2048:].reshape(2, 17, 17, 7)
    np.testing.assert_array_equal(maps, computed['Mixed_6d.branch1x1'][:, :, :, :7])


def pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)


def legacy(tensors: dict[str, np.ndarray], **changes: bytes) -> bytes:
    """Returns a file as torch.save wrote it before version 1.6."""
    sizes = {'short': 2, 'int': 4, 'long': 4}
    machine = {'protocol_version': 1001, 'little_endian': True, 'type_sizes': sizes}
    state = dump({name: value.shape for name, value in tensors.items()})
    parts = {
        'magic': pickled(MAGIC),
        'protocol': pickled(1001),
        'machine': pickled(machine),
        # A reference to a storage has one part more than in the new format.
        'state': state.replace(b'tQ', b'NtQ'),
        'keys': pickled([str(i) for i in range(len(tensors))]),
        'data': b''.join(
            struct.pack('<q', value.size) + value.astype('<f4').tobytes()
            for value in tensors.values()
        ),
    }
    return b''.join((parts | changes).values())


SMALL = {'a.weight': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.array([1.5], np.float32)}


def read_bytes(data: bytes, path: pathlib.Path) -> dict[str, np.ndarray]:
    path.write_bytes(data)
    with path.open('rb') as file:
        return read_legacy('old.pth', file)


def test_old_torch_files(tmp_path):
    found = read_bytes(legacy(SMALL), tmp_path / 'old.pth')
    assert list(found) == list(SMALL)
    for name, value in SMALL.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (legacy(SMALL)[:-1], 'truncated'),
        (legacy(SMALL)[:200], 'damaged or truncated'),
        (legacy(SMALL, magic=pickled(1)), 'does not start as one'),
        (legacy(SMALL, keys=pickled([])), 'the list of storages is not that of the tensors'),
        (legacy(SMALL, state=pickled({})), 'expected a dict of tensors'),
        (legacy(SMALL, state=b'\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.'), 'could run code'),
        (
            legacy(SMALL, machine=pickled({'little_endian': False})),
            'little_endian: expected True, found False',
        ),
        (legacy(SMALL, state=dump({'a': (6,), 'b': (1,)})), 'not a view of another'),
    ],
)
def test_old_torch_files_that_are_damaged_or_hostile(data, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_bytes(data, tmp_path / 'old.pth')


def test_old_torch_files_of_torch_itself(tmp_path):
    torch = pytest.importorskip('torch')
    tensors = {name: torch.from_numpy(value) for name, value in SMALL.items()} | {
        'view': torch.arange(12.0).reshape(3, 4).T[1:]
    }
    torch.save(tensors, tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    with (tmp_path / 'old.pth').open('rb') as file:
        found = read_legacy('old.pth', file)
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value.numpy())


def test_weights_as_npz_and_as_torch_file(state, tmp_path):
    expected = from_state(state, 'random')
    np.savez(tmp_path / 'w.npz', **state, **{'Conv2d_1a_3x3.bn.num_batches_tracked': np.array(7)})
    with (tmp_path / 'w.pth').open('wb') as file:
        write_torch(file, state, {})
    for name in ('w.npz', 'w.pth'):
        found = from_state(read_state(tmp_path / name), name)
        assert found.keys() == expected.keys()
        for key in (
            'Conv2d_1a_3x3.conv.weight',
            'Mixed_7c.branch_pool.bn.running_var',
            'fc.weight',
        ):
            np.testing.assert_array_equal(found[key], expected[key])


def test_weights_of_another_network(state, tmp_path):
    with pytest.raises(UserError, match=r'1 are missing \(fc\.bias\) and 1 unknown \(fc\.offset\)'):
        from_state(
            {('fc.offset' if name == 'fc.bias' else name): value for name, value in state.items()},
            'w',
        )
    with pytest.raises(
        UserError, match=r'w: fc\.weight: expected shape \(1008, 2048\), found \(1000, 2048\)'
    ):
        from_state(state | {'fc.weight': np.zeros((1000, 2048), np.float32)}, 'w')
    with pytest.raises(UserError, match=r'fc\.bias: expected finite numbers'):
        from_state(state | {'fc.bias': np.full(1008, np.nan, np.float32)}, 'w')
    with pytest.raises(UserError, match='variances of 0 or more, found -1'):
        from_state(state | {'Conv2d_1a_3x3.bn.running_var': np.full(32, -1, np.float32)}, 'w')
    (tmp_path / 'w.npz').write_bytes(b'nothing')
    with pytest.raises(UserError, match=r'not a readable \.npz file'):
        read_state(tmp_path / 'w.npz')
    with pytest.raises(
        UserError, match=r"ends in \.pth, \.pt, \.npz, \.safetensors, found '\.bin'"
    ):
        read_state(tmp_path / 'w.bin')
    with (tmp_path / 'large.pth').open('wb') as file:
        file.truncate(2**29 + 1)
    with pytest.raises(
        UserError, match=r'large\.pth: .* in at most 536,870,912 bytes, found 536,870,913; give'
    ):
        read_state(tmp_path / 'large.pth')


def test_download_is_kept_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    source = tmp_path / 'source'
    source.write_bytes(b'weights')
    monkeypatch.setattr(inception_weights, 'URL', source.as_uri())
    with pytest.raises(UserError, match=r'SHA-256 \w+, expected 6726825d0af5\w{52};'):
        inception_weights.find_or_download()
    folder = paths.cache_dir()
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(inception_weights, 'SHA256', download.digest(source, 'sha256'))
    target = inception_weights.find_or_download()
    assert target.read_bytes() == b'weights'
    source.unlink()
    assert inception_weights.find_or_download() == target  # from the cache
    target.write_bytes(b'damaged')
    with pytest.raises(UserError, match='damaged: remove it'):
        inception_weights.find_or_download()


def test_without_a_network_connection_the_message_tells_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(inception_weights, 'URL', 'http://127.0.0.1:9/weights.pth')
    with pytest.raises(
        UserError,
        match=r'features=inception: cannot download .*refused.*; fetch it elsewhere and give its '
        r'path \(--features /path/to/pt_inception.*; or train features on images with classes, '
        r'by python -m jaxunet.metrics.train_features, and give their file$',
    ):
        features.load_features('inception')
    # A path would stand for images prepared as by pytorch-fid.
    with pytest.raises(
        UserError,
        match=r'features=inception_tensorflow: cannot download .* elsewhere and put it into /',
    ):
        features.load_features('inception_tensorflow')


@pytest.mark.parametrize('answer', [b'', b'HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nwei'])
def test_a_network_that_does_not_answer_is_told_soon(
    answer: bytes,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As behind a firewall, or where the connection is lost; meanwhile, a line says what for."""
    assert download.TIMEOUT <= 15
    monkeypatch.setattr(download, 'TIMEOUT', 0.2)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    with socket.create_server(('127.0.0.1', 0)) as server, contextlib.ExitStack() as held:

        def serve() -> None:
            connection = held.enter_context(server.accept()[0])
            connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f'http://127.0.0.1:{server.getsockname()[1]}/weights.pth'
        monkeypatch.setattr(inception_weights, 'URL', url)
        with (
            caplog.at_level(logging.INFO),
            pytest.raises(UserError, match=rf'cannot download {url}: timed out; fetch it else'),
        ):
            features.load_features('inception')
    assert f'downloading {url} to {paths.cache_dir()}' in caplog.text
    assert list(paths.cache_dir().iterdir()) == []


def test_feature_files(tmp_path, monkeypatch):
    path = tmp_path / 'tiny.npz'
    np.savez(path, jaxunet_features=np.array('tiny'), weights=np.ones((2, 3)))
    with pytest.raises(UserError, match=r"jaxunet_features: expected .*found 'tiny'"):
        features.load_features(str(path))

    def reader(
        path: pathlib.Path, arrays: dict[str, np.ndarray], digest: str
    ) -> features.FeatureNetwork:
        assert arrays.keys() == {'weights'}
        return features.FeatureNetwork(
            f'tiny-{digest[:8]}', 3, lambda pixels: jax.numpy.ones((len(pixels), 3)), False, 'none'
        )

    monkeypatch.setitem(features.READERS, 'tiny', reader)
    assert features.load_features(str(path)).name == f'tiny-{download.digest(path, "sha256")[:8]}'
    with pytest.raises(UserError, match=r'found no file .*tinny\.npz.*did you mean "tiny\.npz"'):
        features.load_features(str(tmp_path / 'tinny.npz'))
    with pytest.raises(UserError, match='did you mean "inception"'):
        features.load_features('inceptoin')
