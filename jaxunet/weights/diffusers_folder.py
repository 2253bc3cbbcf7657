"""Reads and writes folders of diffusers, in which a pipeline of a UNet2DModel is saved.

    model_index.json, README.md
    unet/config.json, unet/diffusion_pytorch_model.safetensors
    scheduler/scheduler_config.json

The weights may also be a `.bin` of torch or several files with an index, `unet_ema/` may hold
averages, and both JSON files and the weights may lie in the folder itself. A folder written here
also states the whole config, in the metadata of the weights, so that it loads unchanged.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError, itemized, listed
from jaxunet.runtime.untrusted import check_fields, opened, read_json, shown
from jaxunet.weights.diffusers import (
    CLASS,
    LABELS,
    POSITIONAL,
    QKV,
    constants,
    label_rows,
    unet_config,
)
from jaxunet.weights.diffusers_config import infer
from jaxunet.weights.diffusers_scheduler import process_fields
from jaxunet.weights.fields import differences, diffusion_fields
from jaxunet.weights.inference import Inferred, stated_config, states_all
from jaxunet.weights.names import Shape
from jaxunet.weights.own_metadata import METADATA, load_metadata
from jaxunet.weights.safetensors_file import SafetensorsFile
from jaxunet.weights.state_dicts import Given, Weights, read_state
from jaxunet.weights.torch_checkpoint import takes_averages
from jaxunet.weights.torch_file import TorchFile

INDEX, CONFIG = 'model_index.json', 'config.json'
AVERAGES, UNET = 'unet_ema', 'unet'
UNETS = (UNET, AVERAGES, '')  # folders that may hold the network; '' = the folder itself
SCHEDULER, SCHEDULER_CONFIG = 'scheduler', 'scheduler_config.json'
WEIGHTS = 'diffusion_pytorch_model'
SHARDS = '.index.json'
CARD = 'README.md'
TOLERANCE = 1e-4  # of constants
ADVICE = 'save the pipeline again with diffusers'
# Components of pipelines that are not models of pixels.
LATENT = ('vae', 'vqvae', 'vae_decoder', 'movq')
OLD_NAMES = {'query': 'to_q', 'key': 'to_k', 'value': 'to_v', 'proj_attn': 'to_out.0'}
OLD_NAME = re.compile(rf'(?<=attentions\.\d\.)({"|".join(OLD_NAMES)})(?=\.)')


def is_folder(path: pathlib.Path) -> bool:
    """Returns True if a path is a folder with a pipeline or a network of diffusers."""
    return (path / INDEX).is_file() or any((path / unet / CONFIG).is_file() for unet in UNETS)


class _State:
    """The tensors of a UNet2DModel under the names of `diffusers.table`.

    Attributes: as `SafetensorsFile`, which `jaxunet.weights.state_dicts` reads.
    """

    def __init__(self, path: str, files: Sequence[SafetensorsFile | TorchFile], note: str) -> None:
        self.path, self.note, self.metadata = path, note, files[0].metadata
        # Name -> the file and the full name of the tensors that are its rows.
        self._parts: dict[str, list[tuple[SafetensorsFile | TorchFile, str]]] = {}
        self._rows: dict[str, int] = {}
        self.shapes: dict[str, Shape] = {}
        for file in files:
            for full, shape in file.shapes.items():
                name = OLD_NAME.sub(lambda old: OLD_NAMES[old[0]], full)
                if name in self.shapes:
                    raise UserError(f'{path}: {full}: twice, expected once; {ADVICE}')
                self.shapes[name], self._parts[name] = shape, [(file, full)]
        for name in [name for name in self.shapes if '.to_q.' in name]:
            self._join(name)

    def _join(self, query: str) -> None:
        """Joins the layers of q, k and v."""
        names = [query.replace('.to_q.', f'.to_{part}.') for part in 'qkv']
        shapes = [self.shapes.pop(name, None) for name in names]
        rows, *rest = shapes[0] or (0,)
        if wrong := [name for name, shape in zip(names, shapes, strict=True) if shape != shapes[0]]:
            at = names.index(wrong[0])
            found = 'none' if shapes[at] is None else f'shape {shapes[at]}'
            raise UserError(f'{self.path}: {wrong[0]}: expected shape {shapes[0]}, found {found}')
        name = query.replace('to_q', QKV)
        self.shapes[name] = (3 * rows, *rest)
        self._parts[name] = [part for one in names for part in self._parts.pop(one)]

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32. Raises UserError: a number that is not finite."""
        parts = [file.read(full) for file, full in self._parts[name]]
        value = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return value[: self._rows.get(name)]

    def fit(self, config: Config) -> None:
        """Leaves out the tensors that were added for a config's network.

        Raises:
          UserError: they have other values than those that were written.
        """
        for name, (shape, make) in constants(config).items():
            if self.shapes.get(name) != shape or not np.allclose(
                self.read(name), make(), rtol=0, atol=TOLERANCE
            ):
                raise UserError(
                    f'{self.path}: {name}: expected the constant that stands for an operation '
                    f'without parameters in the network of the metadata {METADATA}; remove the '
                    'metadata if it was trained'
                )
            del self.shapes[name]
        if LABELS in self.shapes and label_rows(config) > config.model.num_classes:
            self._rows[LABELS] = config.model.num_classes
            self.shapes[LABELS] = (config.model.num_classes, *self.shapes[LABELS][1:])


def read(path: str, given: Given, ema: str) -> Weights:
    """Reads the weights and the config of a folder of diffusers.

    Args:
      ema: of a folder with both `unet/` and `unet_ema/`: '' = the averages, 'none' = the weights
        themselves, or the rate that is stored with the averages.

    Raises:
      UserError: a model that is not of pixels or not unconditional or class-conditional, an option
        that our network or process does not have, damaged or missing files.
    """
    unet, note, values = _described(pathlib.Path(path), ema)
    with contextlib.ExitStack() as stack:
        files = [_open(file, stack) for file in _weight_files(unet)]
        state = _State(path, files, note)
        own = load_metadata(path, state.metadata).config
        if own is not None:
            _check_same(unet_config(own), values, path, free=('sample_size', 'dropout'))
            state.fit(own)
            classes = own.model.num_classes or None
            values |= {'time_embedding_type': POSITIONAL, 'num_class_embeds': classes}
        inferred = _with_process(infer(values, str(unet / CONFIG)), unet, own, path)
        return read_state(state, given, inferred)


def stated_config_of(path: str) -> Config | None:
    """Returns the config of the averages in a folder; None if no scheduler states the process.

    Raises:
      UserError: as `read`.
    """
    unet, _, values = _described(pathlib.Path(path), '')
    with contextlib.ExitStack() as stack:
        own = load_metadata(path, _open(_weight_files(unet)[0], stack).metadata).config
    if own is not None:
        return own
    inferred = _with_process(infer(values, str(unet / CONFIG)), unet, None, path)
    return stated_config(inferred, path, {}).config if states_all(inferred) else None


def _described(path: pathlib.Path, ema: str) -> tuple[pathlib.Path, str, dict[str, Any]]:
    """Returns the folder of the network, which weights these are, and the network's JSON."""
    _check_components(path)
    unet, note = _chosen(path, ema)
    values = read_json(unet / CONFIG, advice=ADVICE)
    _check_class(values, str(unet / CONFIG))
    return unet, note, values


def _with_process(
    inferred: Inferred, unet: pathlib.Path, own: Config | None, path: str
) -> Inferred:
    """Adds the process of the scheduler beside the folder of a network, if there is one.

    Args:
      own: the config in our metadata.
    """
    scheduler = _scheduler(unet)
    if scheduler is None:
        return inferred
    values = read_json(scheduler, advice=ADVICE, finite=False)  # DPM-Solver's has -Infinity
    fields = process_fields(values, learned=inferred.learn_sigma, source=str(scheduler))
    if own is not None:
        named = {f'diffusion.{name}': value for name, value in fields.items()}
        _check_same(diffusion_fields(own), named, path, free=('diffusion.rescale_timesteps',))
    return inferred._replace(constants=inferred.constants | fields)


def _check_components(folder: pathlib.Path) -> None:
    """Raises UserError if the pipeline has more than a network and a scheduler."""
    names = [name for name in LATENT if (folder / name).is_dir()]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, advice=ADVICE)
        names += [
            name
            for name, value in index.items()
            if name not in (*UNETS, SCHEDULER) and isinstance(value, list) and any(value)
        ]
    if latent := [name for name in names if name in LATENT]:
        raise UserError(
            f'{folder}: {latent[0]}: a model of latents, which are drawn by a UNet and decoded by '
            'an autoencoder, is not supported; give a model of pixels'
        )
    if names:
        raise UserError(
            f'{folder / INDEX}: expected a pipeline of unet and scheduler, found '
            f'{listed(sorted(map(str, names)))} beside them; only unconditional and '
            'class-conditional models of pixels are supported'
        )


def _chosen(folder: pathlib.Path, ema: str) -> tuple[pathlib.Path, str]:
    """Returns the folder of the network, and which weights these are if there are several.

    Raises:
      UserError: `ema` names weights that are not there, or there is no network.
    """
    there = [name for name in UNETS if (folder / name / CONFIG).is_file()]
    if not there:
        raise UserError(
            f'{folder}: expected {UNET}/{CONFIG} or {CONFIG} of a {CLASS}, found neither; give a '
            'folder that diffusers saved'
        )
    if AVERAGES not in there:
        if ema:
            raise UserError(f'--ema: {folder} holds one set of weights; leave the flag out')
        return folder / there[0], ''
    decay = read_json(folder / AVERAGES / CONFIG, advice=ADVICE).get('decay')
    plain = f'{UNET}/' if UNET in there else ''
    averaged, note = takes_averages(ema, decay, plain, f'{AVERAGES}/', folder)
    return folder / (AVERAGES if averaged else UNET), note


def _check_class(values: Mapping[str, Any], source: str) -> None:
    kind = values.get('_class_name')
    if kind == CLASS:
        return
    text = isinstance(kind, str) and 'Condition' in kind
    why = ', whose cross attention reads a text or another condition' if text else ''
    raise UserError(
        f'{source}: _class_name: expected {CLASS}, found {shown(kind)}{why}; only unconditional '
        'and class-conditional models of pixels are supported'
    )


def _scheduler(unet: pathlib.Path) -> pathlib.Path | None:
    """Returns the `scheduler_config.json` that belongs to the folder of a network."""
    folders = [unet / SCHEDULER, unet]
    if unet.name in (UNET, AVERAGES):
        folders += [unet.parent / SCHEDULER, unet.parent]
    paths = (folder / SCHEDULER_CONFIG for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files with the weights; a .safetensors wins over its .bin.

    Raises:
      UserError: there are none, or an index names something else than files in the folder.
    """
    for suffix in ('.safetensors', '.bin'):
        whole = folder / (WEIGHTS + suffix)
        if whole.is_file():
            return [whole]
        index = folder / (WEIGHTS + suffix + SHARDS)
        if index.is_file():
            values = read_json(index, advice=ADVICE)
            check_fields(values, {'weight_map': dict}, str(index), advice=ADVICE)
            names = list(values['weight_map'].values())
            for name in names or [None]:
                if not isinstance(name, str) or not re.fullmatch(rf'[\w.-]+\{suffix}', name):
                    raise UserError(
                        f'{index}: weight_map: expected names of {suffix} files beside it, found '
                        f'{shown(name)}'
                    )
            return [folder / name for name in dict.fromkeys(names)]
    there = sorted(path.name for path in folder.iterdir() if path.name != CONFIG)
    raise UserError(
        f'{folder}: expected {WEIGHTS}.safetensors or {WEIGHTS}.bin, found '
        f'{listed(there) or "no file"}'
    )


def _open(path: pathlib.Path, stack: contextlib.ExitStack) -> SafetensorsFile | TorchFile:
    file = stack.enter_context(opened(path))
    if path.suffix == '.bin':
        return stack.enter_context(TorchFile(str(path), file))
    return SafetensorsFile(str(path), file)


def _check_same(
    expected: Mapping[str, object], found: Mapping[str, object], path: str, *, free: Sequence[str]
) -> None:
    """Checks the fields of a JSON file against the config in our metadata.

    Args:
      free: fields that may differ.

    Raises:
      UserError: they describe different models.
    """
    fixed = {name: value for name, value in expected.items() if name not in free}
    if problems := differences(fixed, {name: found.get(name) for name in expected}):
        raise UserError(
            f'{path}: the JSON files do not describe the model of the metadata {METADATA} in the '
            f'weights:{itemized(problems)}'
        )
