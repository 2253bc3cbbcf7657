"""Reads a state dict of any program: recognizes the program, finds the config, converts tensors.

A folder of diffusers states its network and process in JSON files beside the state dict.

improved-diffusion and our own writer use guided-diffusion's names; unet.cu and ddpm-torch have
their own. Prefixes that PyTorch's wrappers add to names are removed.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from absl import logging

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError, itemized
from jaxunet.weights import ddpm_torch, diffusers, diffusers_config, edm, guided_diffusion, unetcu
from jaxunet.weights.edm_pickle import NetworkPickle
from jaxunet.weights.fields import network_differences
from jaxunet.weights.inference import (
    ORDER_FLAGS,
    ForeignModel,
    Inferred,
    Stated,
    check_against_shapes,
    config_like,
    stated_config,
    states_all,
)
from jaxunet.weights.names import Entry, Shape, Tree, check_shapes, flatten, to_tree
from jaxunet.weights.own_metadata import METADATA, OwnMetadata, load_metadata
from jaxunet.weights.presets import preset_of
from jaxunet.weights.torch_adam import adam_state
from jaxunet.weights.torch_file import TorchFile
from jaxunet.weights.torch_pickle import TensorView

MOMENTS = ('optimizer.mu.', 'optimizer.nu.')  # prefixes of AdamW's moments in .safetensors
WRAPPERS = ('module.', '_orig_mod.')  # prefixes of DistributedDataParallel and torch.compile

ReadTensor = Callable[[str], np.ndarray]  # name -> tensor


@dataclass(frozen=True)
class Weights:
    """The contents of a weight file.

    Fields:
      params: our parameter tree, float32 numpy arrays.
      config: the model's config: the given one, the file's, or one inferred from shapes and from
        what was stated.
      moments: Adam's first and second moments, trees like `params`; None if the file has none.
      note: kind of file, number of parameters and assumptions, for reports.
      class_names: names of the labels 0, 1, ...; empty if the file has none.
      new_attention_order: order of qkv's rows in the file, as guided-diffusion's
        `use_new_attention_order`; None if its program has one order, or the network one head.
    """

    params: Tree
    config: Config
    moments: tuple[Tree, Tree] | None
    note: str
    class_names: tuple[str, ...] = ()
    new_attention_order: bool | None = None


class Given(NamedTuple):
    """Facts about the model of a file that the caller of a reader knows.

    Fields:
      config: the model that the weights must belong to; None = the file's own.
      stated: without a config, further facts that the file leaves open.
      new_order: guided-diffusion's `use_new_attention_order`; None = the file states it.
      like: instead of `config`, the config of a run that is to start from the weights.
    """

    config: Config | None
    stated: Stated
    new_order: bool | None
    like: Config | None


class _Program(NamedTuple):
    """A program with its own names of tensors.

    Fields:
      infer: (shapes, source) -> the model that the shapes show.
      table: config -> the tensors of its state dict.
      orders: True if it has two orders of qkv's rows.
    """

    name: str
    infer: Callable[[Mapping[str, Shape], str], Inferred]
    table: Callable[[Config], list[Entry]]
    orders: bool


GUIDED_DIFFUSION = _Program(
    guided_diffusion.PROGRAM, guided_diffusion.infer, guided_diffusion.table, orders=True
)
UNETCU = _Program(unetcu.PROGRAM, unetcu.infer, unetcu.table, orders=False)
EDM = _Program(edm.PROGRAM, edm.infer, edm.table, orders=False)
DDPM_TORCH = _Program(ddpm_torch.PROGRAM, ddpm_torch.infer, ddpm_torch.table, orders=False)
# Its `infer` reads the config.json beside the tensors.
DIFFUSERS = _Program(diffusers.PROGRAM, diffusers_config.infer, diffusers.table, orders=False)


@dataclass(frozen=True)
class _Known:
    """Facts about the model of a state dict that its tensors do not show.

    Fields:
      path: path of the file; error messages begin with it.
      program: the program whose names the tensors have.
      given: what the caller knows.
      own: metadata of our own writer in the file.
    """

    path: str
    program: _Program
    given: Given
    own: OwnMetadata

    def check(self) -> None:
        """Checks what the caller gave against what the file states.

        Raises:
          UserError: the two contradict each other, or state the same thing twice.
        """
        path, given, own = self.path, self.given, self.own
        if (given.config or own.config) is not None and given.stated:
            raise UserError(
                f'{path}: {", ".join(given.stated)}: the config of this file is known; '
                'leave this out'
            )
        if given.config is not None and own.config is not None:
            side = min(given.config.image_shape[:2])
            problems = network_differences(given.config, own.config, side)
            if problems:
                raise UserError(f'{path}: not the network of the config:{itemized(problems)}')
        order = given.new_order
        if order is not None and not self.program.orders:
            option = 'init_from_order' if given.like is not None else 'new_attention_order'
            raise UserError(f'{path}: {option}: {self.program.name} has one order; leave this out')
        if order is not None and own.new_order is not None and order != own.new_order:
            raise UserError(
                f'{path}: new_attention_order: the file says {own.new_order}, '
                f'{order} was asked for; leave this out'
            )

    def model(self, inferred: Inferred) -> ForeignModel:
        """Returns the config of the model, and the assumptions behind it.

        Raises:
          UserError: something is neither known nor inferred, or does not fit the tensors.
        """
        path, given = self.path, self.given
        known = given.config or self.own.config
        assumed: list[str] = []
        if known is None and given.like is not None:
            known = config_like(inferred, path, given.like)
            heads = ["the config's attention heads"] if 'num_heads' not in inferred.fields else []
            return ForeignModel(known, [*heads, f'diffusion.objective={known.diffusion.objective}'])
        if known is None:
            known, assumed = stated_config(
                inferred,
                path,
                given.stated,
                order_known=given.new_order is not None or not self.program.orders,
                preset=preset_of(pathlib.Path(path).name),
            )
        if self.program is DDPM_TORCH:
            ddpm_torch.check_diffusion(known, path)
        return ForeignModel(known, assumed)

    def order(self) -> bool | None:
        """Returns the order of qkv's rows for several heads; None if the program has only one.

        Raises:
          UserError: nothing states it.
        """
        if not self.program.orders:
            return None
        new_order = self.own.new_order if self.own.new_order is not None else self.given.new_order
        if new_order is None:
            what = (
                f'give {ORDER_FLAGS}'
                if self.given.like is None
                else 'set init_from_order=new or legacy'
            )
            raise UserError(
                f"{self.path}: does not state the order of its attention's rows, "
                "guided-diffusion's use_new_attention_order (False in its scripts unless it is "
                f'set): {what}'
            )
        return new_order


class StateDict(Protocol):
    """Tensors by name; see `SafetensorsFile`."""

    path: str
    note: str
    shapes: dict[str, Shape]

    @property
    def metadata(self) -> dict[str, str]:
        """Texts that our writer stored beside the tensors, by name."""

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32."""


def read_state(state: StateDict, given: Given, stated: Inferred | None = None) -> Weights:
    """Returns the weights in a state dict.

    Args:
      stated: the model that the JSON files of a folder of diffusers describe; None for others.

    Raises:
      UserError: the network is not the given one, or something is neither in the file nor given.
    """
    path = state.path
    names = unwrapped(state.shapes, path)
    shapes = {name: state.shapes[full] for name, full in names.items()}
    moment_shapes = [_take(shapes, prefix) for prefix in MOMENTS]
    program = DIFFUSERS if stated else _program(shapes, path)
    if isinstance(state, NetworkPickle):
        program = EDM
    own = load_metadata(path, state.metadata)
    known_config = given.config or own.config
    pictures = known_config.model.condition_channels if known_config else 0
    inferred = stated or program.infer(guided_diffusion.without_pictures(shapes, pictures), path)
    if stated and own.config is None and states_all(stated):
        own = OwnMetadata(stated_config(stated, path, {}).config)
    if isinstance(state, NetworkPickle):
        own = OwnMetadata(state.config)
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(edm.FILTER)}
    if program is GUIDED_DIFFUSION and not pictures:
        model_at_hand = known_config or given.like
        inferred = guided_diffusion.settle_super_resolution(
            inferred, model_at_hand, given.stated, path
        )
    if own.config is not None:
        check_against_shapes(own.config, inferred, f'{path}: metadata {METADATA}')
    known = _Known(path, program, given, own)
    known.check()
    config, assumed = known.model(inferred)
    table = program.table(config)
    _check_names(shapes, table, program, path)
    new_order = known.order() if any(entry.heads > 1 for entry in table) else None

    def read(name: str) -> np.ndarray:
        return state.read(names[name])

    moments = None
    readers = _own_moments(read, moment_shapes, table, program, path)
    if readers is None and program is DDPM_TORCH:
        readers = _moments_of_torch(state, names)
    if readers is not None:
        mu, nu = (to_tree(moment, table, interleaved=new_order is False) for moment in readers)
        check_second_moments(path, nu)
        moments = mu, nu
    params = to_tree(read, table, interleaved=new_order is False)
    # Our own metadata also state an order for networks with one head, where it has no effect.
    order = new_order if own.new_order is None else own.new_order
    if assumed:
        logging.warning(
            '%s does not state everything about its model; assumed: %s', path, ', '.join(assumed)
        )
    total = sum(math.prod(shape) for shape in shapes.values())
    parts = [f'{program.name} names', f'{total:,} parameters']
    parts += ['with Adam moments'] * (moments is not None) + [state.note] * bool(state.note)
    note = ', '.join(parts) + (f'; assumed {", ".join(assumed)}' if assumed else '')
    return Weights(
        params, config, moments, note, own.class_names, order if program.orders else None
    )


def _own_moments(
    read: ReadTensor,
    shapes: list[dict[str, Shape]],
    table: list[Entry],
    program: _Program,
    path: str,
) -> list[ReadTensor] | None:
    """Returns functions that read the first and second moment of a parameter from our own file.

    Returns None if the file has no moments.

    Args:
      shapes: shapes of the tensors of the first and of the second moments.

    Raises:
      UserError: the moments are not those of the network.
    """
    if not any(shapes):
        return None
    for moment in shapes:
        _check_names(moment, table, program, f'{path} (moments)')
    return [lambda name, prefix=prefix: read(prefix + name) for prefix in MOMENTS]  # type: ignore[misc]


def _moments_of_torch(state: StateDict, names: Mapping[str, str]) -> list[ReadTensor] | None:
    """Returns functions that read both moments of a parameter from PyTorch's optimizer.

    Returns None if the file has none. Moments of early steps are biased toward 0. The bias is
    corrected here, because `jaxunet.checkpoint.optimizer` treats moments from other programs as
    those of a long run.

    Args:
      names: full names of the parameters by their names without wrappers' prefixes.

    Raises:
      UserError: the optimizer's state does not fit the weights.
    """
    if not isinstance(state, TorchFile) or (adam := adam_state(state)) is None:
        return None

    def moment(views: Mapping[str, TensorView], correction: float) -> ReadTensor:
        return lambda name: state.read_view(views[names[name]], name) / np.float32(correction)

    return [moment(*pair) for pair in zip(adam.moments, adam.corrections, strict=True)]


def unwrapped(shapes: Mapping[str, Shape], path: str) -> dict[str, str]:
    """Returns the full names of tensors by their names without the prefixes of wrappers.

    Raises:
      UserError: two tensors have the same name without prefixes.
    """
    names: dict[str, str] = {}
    for full in shapes:
        name = full.replace('._orig_mod.', '.')  # a part of the network was compiled
        while name.startswith(WRAPPERS):
            name = name.partition('.')[2]
        if name in names:
            raise UserError(
                f'{path}: {names[name]} and {full} are both {name} without the prefixes of DDP '
                'and torch.compile; give a file with one of them'
            )
        names[name] = full
    return names


def _program(shapes: Mapping[str, Shape], path: str) -> _Program:
    """Returns the program whose names these are; guided-diffusion if no program is recognized.

    Raises:
      UserError: the names are those of diffusers, which needs the JSON files beside them.
    """
    if any(name.endswith(diffusers.FIRST) for name in shapes):
        raise UserError(
            f'{path}: expected the folder of this file of diffusers, which describes its model; '
            f'give {pathlib.Path(path).parent}'
        )
    if any(name.endswith(ddpm_torch.FIRST) for name in shapes):
        return DDPM_TORCH
    if f'input_blocks.1.0.{unetcu.NAMES.res_block["norm_1"]}.weight' in shapes:
        return UNETCU
    return GUIDED_DIFFUSION


def _check_names(
    shapes: Mapping[str, Shape], table: list[Entry], program: _Program, source: str
) -> None:
    """Raises UserError if names or shapes are not those of the config's network."""
    expected = {entry.name: entry.shape for entry in table}
    advice = f"expected {program.name}'s names and shapes for this model"
    check_shapes(shapes, expected, source, advice)


def _take(shapes: dict[str, Shape], prefix: str) -> dict[str, Shape]:
    """Removes the tensors with a prefix from `shapes` and returns them without the prefix."""
    return {
        name.removeprefix(prefix): shapes.pop(name)
        for name in list(shapes)
        if name.startswith(prefix)
    }


def check_second_moments(source: str, tree: Tree) -> None:
    """Raises UserError if a second moment is negative."""
    for name, leaf in flatten(tree).items():
        if (leaf < 0).any():
            raise UserError(
                f'{source}: second moment of {"/".join(name)}: found {leaf.min()}, '
                'expected 0 or more (means of squares)'
            )
