"""Every reader of untrusted files, each with the parts of a small valid file.

A part can be damaged before it is packed, so that the checksums of the package fit the damage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import importlib.util
import io
import json
import lzma
import pathlib
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxunet.benchmark.kernels.table import tables as kernel_tables
from jaxunet.benchmark.table import markdown
from jaxunet.checkpoint import meta, snapshots
from jaxunet.compare import step_cost
from jaxunet.compare.comparison_file import read_comparison
from jaxunet.config import to_dict
from jaxunet.data import cifar10
from jaxunet.data.picture import read_mask, read_picture
from jaxunet.data.png16 import write_png16
from jaxunet.data.reading import Reading
from jaxunet.data.sources import open_source
from jaxunet.metrics import classifier
from jaxunet.metrics.arrays import read_arrays
from jaxunet.metrics.frechet import is_statistics, load_statistics
from jaxunet.metrics.image_sets import open_images, read_grid
from jaxunet.metrics.torch_legacy import read_legacy
from jaxunet.prepare_data import prepare
from jaxunet.profile import report as profile_report
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError
from jaxunet.weights import read_weights
from jaxunet.weights.torch_adam import adam_state
from jaxunet.weights.torch_file import TorchFile
from jaxunet.weights.torch_pickle import dump
from support.data_files import (
    encoded,
    everything,
    official_files,
    python2_batch,
    random_pixels,
    write_tar,
)
from support.result_files import (
    Contents,
    choices_parts,
    comparison_file,
    profile_csv,
    read_choices,
    read_finished,
    read_metadata,
    read_parts,
    read_sweep,
    results,
    sweep_parts,
)
from support.tiny import tiny_config
from support.weight_cases import (
    SMALL,
    UNETCU_SMALL,
    archive,
    nested_torch_bytes,
    random_params,
    state,
)

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of file.

    Fields:
      file: name of its file.
      parts: returns the contents of a valid file.
      pack: packs contents to the bytes of a file.
      read: reads a file; raises UserError if it refuses the file.
      cases: number of damages that the default suite tries.
    """

    file: str
    parts: Callable[[], Contents]
    pack: Callable[[Contents], bytes]
    read: Callable[[pathlib.Path], object]
    cases: int = 7


def alone(contents: Contents) -> bytes:
    """Returns the only part of a file that is not a package of several."""
    (content,) = contents.values()
    return content


def deflated(contents: Contents) -> bytes:
    return archive(contents, zipfile.ZIP_DEFLATED)


def npz(**arrays: object) -> Contents:
    file = io.BytesIO()
    np.savez(file, **arrays)
    with zipfile.ZipFile(file) as saved:
        return {name: saved.read(name) for name in saved.namelist()}


@functools.cache
def plain_tar() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(
            pathlib.Path(folder) / 'x.tar',
            {
                'cat/' + 'long' * 40 + '.png': encoded(random_pixels(0, (8, 8, 3))),
                'dog/b.jpg': encoded(random_pixels(1, (8, 8, 3)), 'JPEG'),
            },
        )
        return path.read_bytes()


@functools.cache
def weights(suffix: str) -> bytes:
    from jaxunet.weights import write_weights  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f'x{suffix}'
        config = UNETCU_SMALL if suffix == '.bin' else SMALL
        write_weights(path, random_params(config), config)
        return path.read_bytes()


@functools.cache
def torch_parts() -> Contents:
    tensors = {name: value for name, value in list(state().items())[-4:]}
    parts = {'a/data.pkl': dump({name: value.shape for name, value in tensors.items()})}
    for i, value in enumerate(tensors.values()):
        parts[f'a/data/{i}'] = value.tobytes()
    return parts | {'a/version': b'3\n', 'a/byteorder': b'little'}


def legacy() -> Contents:
    """A file as torch.save wrote it before 1.6: two tensors in one storage."""
    tree = dump({'w': (2, 3)}).replace(b'J\x06\0\0\0tQ', b'J\x06\0\0\0NtQ')
    assert b'NtQ' in tree
    numbers = np.arange(6, dtype='<f4').tobytes()
    head = [0x1950A86A20F9469CFC6C, 1001, {'little_endian': True, 'type_sizes': {'int': 4}}]
    return {
        'head': b''.join(pickle.dumps(x, 2) for x in head),
        'tree': tree,
        'keys': pickle.dumps(['0'], 2),
        'numbers': (6).to_bytes(8, 'little') + numbers,
    }


def classifier_parts() -> Contents:
    architecture = classifier.Architecture(4, 4, 2, 3, (0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
    arrays = {
        name: np.ones(shape, classifier.DTYPES.get(name.rsplit('.', maxsplit=1)[-1], np.float32))
        for name, shape in architecture.shapes.items()
    }
    texts = {
        classifier.ARCHITECTURE: np.array(json.dumps(dataclasses.asdict(architecture))),
        classifier.TRAINING: np.array('{"reference": "digits:"}'),
    }
    return npz(**texts, **arrays)


def read_with_file(read: Callable) -> Callable[[pathlib.Path], object]:
    def run(path: pathlib.Path) -> object:
        with path.open('rb') as file:
            return read(str(path), file)

    return run


def read_torch(path: pathlib.Path) -> object:
    with path.open('rb') as file, TorchFile(str(path), file) as opened:
        return [opened.read(name) for name in opened.shapes], opened.metadata


def optimizer_parts() -> Contents:
    """A checkpoint of PyTorch: weights, and Adam's state of them."""
    weights = {'a': np.ones((2, 3), np.float32), 'b': np.ones(2, np.float32)}
    adam = {
        i: {'step': 3.0, 'exp_avg': value, 'exp_avg_sq': value}
        for i, value in enumerate(weights.values())
    }
    groups = [{'betas': (0.9, 0.999), 'params': [0, 1]}]
    tree = {'model': weights, 'optimizer': {'state': adam, 'param_groups': groups}}
    return unzipped_bytes(nested_torch_bytes(tree))


def read_optimizer(path: pathlib.Path) -> object:
    with path.open('rb') as file, TorchFile(str(path), file) as opened:
        adam = adam_state(opened)
        moments = adam.moments if adam else ()
        return [opened.read_view(views[name], name) for views in moments for name in views]


def read_images(path: pathlib.Path) -> object:
    return everything(open_source(str(path), image_shape=(8, 8, 3)))


def read_wide(path: pathlib.Path) -> object:
    return everything(open_source(str(path), image_shape=(8, 8, 3), reading=Reading(bits=16)))


def npy_bytes() -> bytes:
    file = io.BytesIO()
    np.save(file, random_pixels(0, (3, 8, 8, 3)).astype(np.uint16))
    return file.getvalue()


def read_compared(path: pathlib.Path) -> object:
    with open_images(str(path)) as source:
        return everything(source)


def read_prepared(path: pathlib.Path) -> object:
    return prepare(str(path), str(path.parent / 'out.npz'), (4, 4, 3))


def read_classifier(path: pathlib.Path) -> object:
    return classifier.from_arrays(str(path), read_arrays(path))


def read_statistics(path: pathlib.Path) -> object:
    return is_statistics(path) and load_statistics(path)


def pictures(kind: str) -> Callable[[], Contents]:
    return lambda: {'picture': encoded(random_pixels(0, (12, 8, 3)), kind)}


def grid_parts() -> Contents:
    from jaxunet.data.images import grid  # noqa: PLC0415

    return {'grid': encoded(grid(random_pixels(0, (4, 32, 32, 3))))}


IMAGES = {'images': random_pixels(0, (3, 8, 8, 3)), 'labels': np.arange(3)}
NAMED = IMAGES | {'class_names': np.array(['a', 'b', 'c'])}
MEMBERS = {
    'cat/a.png': encoded(random_pixels(0, (8, 8, 3))),
    'dog/b.gif': encoded(random_pixels(1, (8, 8, 3)), 'GIF'),
}


LABELLED = {
    'a.png': MEMBERS['cat/a.png'],
    'b.gif': MEMBERS['dog/b.gif'],
    'dataset.json': b'{"labels": [["a.png", 3], ["b.gif", 0]]}',
    'metadata.csv': b'file_name,kind\na.png,"x, y"\nb.gif,z\n',
    'labels.csv': b'file_name,breed\na.png,4\nb.gif,0\n',
    'a.json': b'{"way": 2}',
    'b.json': b'{"way": "north"}',
}


def read_labelled(path: pathlib.Path) -> object:
    sets = [open_source(str(path), image_shape=(8, 8, 3))]
    for how in ('kind', 'breed', 'way'):
        with contextlib.suppress(UserError):
            sets.append(open_source(str(path), image_shape=(8, 8, 3), labels=how))
    return [(each.labels, each.class_names) for each in sets]


def table_parts(kind: str) -> Callable[[], Contents]:
    def parts() -> Contents:
        from pyarrow import BufferOutputStream, ipc, parquet, table  # noqa: PLC0415

        rows = table({'image': list(MEMBERS.values()), 'label': [1, 0], 'kind': ['x', 'y']})
        file = BufferOutputStream()
        if kind == 'parquet':
            parquet.write_table(rows, file)
        else:
            with ipc.new_stream(file, rows.schema) as stream:
                stream.write_table(rows)
        return {'file': file.getvalue().to_pybytes()}

    return parts


def data_bin() -> Contents:
    header = np.zeros(256, '<i4')
    header[:5] = 20240620, 2, 3, 8, 8
    pixels = np.full((2, 3, 8, 8), 1 / 255, '<f4')
    return {'header': header.tobytes(), 'pixels': pixels.tobytes()}


def joined(contents: Contents) -> bytes:
    return b''.join(contents.values())


def lines(contents: Contents) -> bytes:
    return b'\n'.join(contents.values())


def snapshot_parts() -> Contents:
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(ema={'widths': (0.05,), 'snapshot_every': 2})
        writer = snapshots.SnapshotWriter(pathlib.Path(folder), config, 0)
        writer.write(2, 2, {'width_0.05': {'a': np.arange(6, dtype=np.float32)}})
        writer.wait()
        writer.close()
        return {'file': (pathlib.Path(folder) / 'snapshots' / '2.safetensors').read_bytes()}


def read_snapshots(path: pathlib.Path) -> object:
    target = path.parent / snapshots.FOLDER / path.name
    target.parent.mkdir()
    path.rename(target)
    return [found.read() for found in snapshots.find_snapshots(path.parent, 10)]


READERS = {
    'unet.cu model': Reader(
        'x.bin', lambda: {'file': weights('.bin')}, alone, read_weights, cases=2
    ),
    'snapshot': Reader('2.safetensors', snapshot_parts, alone, read_snapshots),
    'benchmark rows': Reader(
        'rows.jsonl', results('step/rows.jsonl'), lines, lambda p: markdown(rows.read(p))
    ),
    'kernel rows': Reader(
        'rows.jsonl', results('kernels/rows.jsonl'), lines, lambda p: kernel_tables(rows.read(p))
    ),
    'profile': Reader('x.csv', profile_csv, lines, profile_report.read_csv),
    'zip': Reader('x.zip', lambda: MEMBERS, archive, read_images),
    'deflated zip': Reader('x.zip', lambda: MEMBERS, deflated, read_compared),
    'labels': Reader('x.zip', lambda: LABELLED, archive, read_labelled),
    'tar': Reader('x.tar', lambda: {'tar': plain_tar()}, alone, read_images),
    'tar.gz': Reader(
        'x.tar.gz', lambda: {'tar': plain_tar()}, lambda c: gzip.compress(alone(c), 1), read_images
    ),
    'tar.xz': Reader(
        'x.tar.xz',
        lambda: {'tar': plain_tar()},
        lambda c: lzma.compress(alone(c), preset=0),
        read_compared,
    ),
    'prepare_data': Reader(
        'x.tgz', lambda: {'tar': plain_tar()}, lambda c: gzip.compress(alone(c), 1), read_prepared
    ),
    'npz': Reader('x.npz', lambda: npz(**NAMED), archive, read_images),
    'compressed npz': Reader('x.npz', lambda: npz(**NAMED), deflated, read_images),
    'compared npz': Reader('x.npz', lambda: npz(arr_0=IMAGES['images']), archive, read_compared),
    'npy': Reader('x.npy', lambda: {'file': npy_bytes()}, alone, read_wide),
    'bin': Reader('x.bin', data_bin, joined, read_images),
    'cifar10': Reader(
        'data_batch_1',
        lambda: {'batch': python2_batch(random_pixels(0, (2, 32, 32, 3)), [1, 2])},
        alone,
        lambda path: cifar10.read_batch(path.read_bytes(), str(path)),
    ),
    'cifar10 archive': Reader(
        'x.tar.gz',
        lambda: {'tar': plain_cifar()},
        lambda c: gzip.compress(alone(c), 1),
        lambda path: everything(open_source(f'cifar10:{path}', image_shape=(32, 32, 3))),
    ),
    'png': Reader('x.png', pictures('PNG'), alone, lambda p: read_picture(p, (8, 8, 3))),
    'png of 16 bits': Reader(
        'x.png',
        lambda: {'picture': write_png16(random_pixels(0, (12, 8, 4)).astype(np.uint16) * 257)},
        alone,
        lambda p: read_picture(p, (8, 8, 4), Reading('keep', 16)),
    ),
    'jpeg': Reader('x.jpg', pictures('JPEG'), alone, lambda p: read_picture(p, (8, 8, 3))),
    'webp': Reader('x.webp', pictures('WEBP'), alone, lambda p: read_picture(p, (8, 8, 3))),
    'tiff': Reader('x.tif', pictures('TIFF'), alone, lambda p: read_picture(p, (8, 8, 3))),
    'mask': Reader('x.gif', pictures('GIF'), alone, lambda p: read_mask(p, p, (8, 8, 3))),
    'grid': Reader('x.png', grid_parts, alone, lambda p: read_grid(p, (32, 32))),
    'safetensors': Reader(
        'x.safetensors', lambda: {'file': weights('.safetensors')}, alone, read_weights
    ),
    'pt': Reader('x.pt', lambda: unzipped_bytes(weights('.pt')), archive, read_weights),
    'torch file': Reader('x.pt', torch_parts, archive, read_torch),
    'torch optimizer': Reader('x.pt', optimizer_parts, archive, read_optimizer),
    'legacy torch': Reader('x.pth', legacy, joined, read_with_file(read_legacy)),
    'statistics': Reader(
        'x.npz',
        lambda: npz(mu=np.zeros(3), sigma=np.eye(3), jaxunet_protocol=np.array('{"a": 1}')),
        archive,
        read_statistics,
    ),
    'classifier': Reader('x.npz', classifier_parts, archive, read_classifier),
    'rows': Reader(
        'rows.jsonl', lambda: {'a.json': b'{"a": [1, 2.5]}', 'b.json': b'{}'}, lines, rows.read
    ),
    'sweep': Reader('x', sweep_parts, lines, read_sweep),
    'comparison': Reader('comparison.toml', comparison_file, alone, read_comparison),
    'choices': Reader('choices.json', choices_parts, alone, read_choices),
    'step configs': Reader(
        'x.json',
        lambda: {'x.json': json.dumps({'a': to_dict(tiny_config()), 'b': {}}).encode()},
        alone,
        lambda path: step_cost.read_configs(str(path)),
    ),
    'metadata': Reader(
        'metadata',
        lambda: {'metadata': json.dumps(meta.sealed({'config': {}, 'seconds': 1.5})).encode()},
        alone,
        read_metadata,
    ),
    'run.json': Reader(
        'run.json', lambda: {'run.json': b'{"a": 1, "b": [1.5, "x"]}'}, alone, read_parts
    ),
    'finished samples': Reader(
        'x.npz', lambda: npz(images=IMAGES['images'][:2]), archive, read_finished
    ),
}


if importlib.util.find_spec('pyarrow'):
    READERS |= {
        kind: Reader(f'x.{kind}', table_parts(kind), alone, read_images)
        for kind in ('parquet', 'arrow')
    }


@functools.cache
def plain_cifar() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_tar(pathlib.Path(folder) / 'x.tar', official_files(1)).read_bytes()


def unzipped_bytes(data: bytes) -> Contents:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}
