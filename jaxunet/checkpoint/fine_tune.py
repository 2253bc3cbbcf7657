"""Fits the weights of one model to the network of another config, to start a run from them.

The networks may differ in classes, image size, image channels, the learned variance, and the layer
of `data.augment=edm`. The layers that depend on these are initialized from `config.seed`, and
everything else is kept. No weight depends on the image size. The report of `fit` lists what happens
to each layer that is not simply kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config
from jaxunet.model.encoder import AUGMENTATION
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import listed
from jaxunet.weights.fields import check_reusable, diffusion_fields
from jaxunet.weights.names import Path, flatten, parameter_shapes, unflatten

LABELS: Path = ('label_embed', 'embedding')
LABEL_BIAS: Path = ('label_embed', 'bias')  # with model.label_position=input
AUGMENTATION_LAYER: Path = (AUGMENTATION, 'kernel')
SINES = [4, 6]  # its rows for the sines of angles (`jaxunet.training.augmentation`)
CONV_IN, CONV_OUT = 'conv_in', 'conv_out'


@dataclass(frozen=True)
class Fitted:
    """Weights that fit a config's network.

    Attributes:
      params: float32 numpy arrays.
      complete: True if they are exactly the weights of the other model.
      report: one line for each layer that is not simply kept, and for each change of meaning.
    """

    params: Params
    complete: bool
    report: tuple[str, ...]


class Network(NamedTuple):
    """A model whose weights are given, or a run that is to start from them.

    Fields:
      config: its config.
      class_names: names of the labels 0, 1, ...; empty if they are not known.
    """

    config: Config
    class_names: Sequence[str]


def fit(params: Params, there: Network, here: Network, source: str) -> Fitted:
    """Fits weights to the network of a run.

    Args:
      params: the weights of `there`, float32 numpy arrays.
      there: the model with these weights.
      here: the run that starts from them.
      source: path of the weights, for messages.

    Raises:
      UserError: the networks differ by more than the module's docstring says. The message lists
        the config fields to set.
    """
    check_reusable(there.config, here.config, source)
    given = flatten(params)
    work = _Work(dict(given), there.config, here.config)
    work.convolutions()
    work.labels(*_comparable(there.class_names, here.class_names))
    work.augmentation()
    kept = sum(leaf.size for leaf in work.leaves.values()) - work.fresh_count
    total = sum(math.prod(shape) for shape in parameter_shapes(here.config).values())
    report = (
        f'kept: {kept:,} of {total:,} parameters',
        *work.report,
        *_meanings(there.config, here.config),
    )
    complete = given.keys() == work.leaves.keys() and all(
        work.leaves[path] is leaf for path, leaf in given.items()
    )
    return Fitted(unflatten(work.leaves), complete, report)


@dataclass
class _Work:
    """The leaves while they are changed from one network to the other.

    Attributes:
      leaves: the leaves by path; at first, those of `theirs`.
      report: a line for each layer that is not simply kept.
      fresh_count: parameters initialized so far.
    """

    leaves: dict[Path, np.ndarray]
    theirs: Config
    ours: Config
    report: list[str] = field(default_factory=list)
    fresh_count: int = 0
    _fresh: dict[Path, np.ndarray] = field(default_factory=dict)

    def fresh(self, path: Path) -> np.ndarray:
        """Returns a copy of a leaf of a fresh network."""
        if not self._fresh:
            self._fresh = flatten(fresh_state(self.ours).params)
        return np.array(self._fresh[path])

    def start_fresh(self, *paths: Path) -> None:
        """Adds leaves of a fresh network, or replaces those that are there."""
        for path in paths:
            self.leaves[path] = self.fresh(path)
            self.fresh_count += self.leaves[path].size

    def convolutions(self) -> None:
        """Adapts the outer convolutions to the image channels and the learned variance."""
        there, here = self.theirs.model.image_channels, self.ours.model.image_channels
        if there != here:
            for layer, which in ((CONV_IN, 'first'), (CONV_OUT, 'last')):
                self.start_fresh((layer, 'kernel'), (layer, 'bias'))
                self.report.append(
                    f'fresh: {layer}, the {which} convolution: {there} image channels there, '
                    f'{here} here'
                )
            return
        had, has = self.theirs.diffusion.learn_sigma, self.ours.diffusion.learn_sigma
        if had == has:
            return
        for leaf in ('kernel', 'bias'):
            value = self.leaves[CONV_OUT, leaf]
            if has:
                wider = self.fresh((CONV_OUT, leaf))
                wider[..., :here] = value
                self.fresh_count += wider.size - value.size
            self.leaves[CONV_OUT, leaf] = wider if has else np.array(value[..., :here])
        self.report.append(
            f'fresh: the outputs of {CONV_OUT} for the variance (diffusion.learn_sigma); those for '
            'the image are kept'
            if has
            else f'left out: the outputs of {CONV_OUT} for the variance (diffusion.learn_sigma)'
        )

    def augmentation(self) -> None:
        """Adds, leaves out or turns the layer of data.augment=edm, which only such runs have."""
        had, has = AUGMENTATION_LAYER in self.leaves, self.ours.augmentation_inputs > 0
        if has and not had:
            self.start_fresh(AUGMENTATION_LAYER)
            self.report.append(f'fresh: {AUGMENTATION}, the layer of data.augment=edm')
        elif had and not has:
            del self.leaves[AUGMENTATION_LAYER]
            self.report.append(
                f'left out: {AUGMENTATION}, the layer of data.augment=edm; samples do not need it'
            )
        elif has and self.theirs.data.augment_rule != self.ours.data.augment_rule:
            turned = np.array(self.leaves[AUGMENTATION_LAYER])
            turned[SINES] *= -1
            self.leaves[AUGMENTATION_LAYER] = turned
            self.report.append(
                f'turned: {AUGMENTATION}, the layer of data.augment=edm: with augment_rule='
                f'{self.theirs.data.augment_rule} the same inputs mean the opposite angles'
            )

    def labels(self, their_names: Sequence[str], our_names: Sequence[str]) -> None:
        """Adapts the label table to the classes.

        If both sides have names, rows are matched by name. Otherwise a table with the same number
        of classes is kept, and any other starts fresh.
        """
        there, here = self.theirs.model.num_classes, self.ours.model.num_classes
        table, bias = self.leaves.pop(LABELS, None), self.leaves.pop(LABEL_BIAS, None)
        if here and self.ours.model.label_position == 'input':
            if bias is None:
                self.start_fresh(LABEL_BIAS)
            else:
                self.leaves[LABEL_BIAS] = bias
        if here == 0:
            if table is not None:
                self.report.append(
                    f'left out: the label table: {there} classes there, model.num_classes=0 here'
                )
            return
        if table is None:
            self._fresh_labels('unconditional there')
            return
        if their_names and our_names:
            self._named_labels(table, their_names, our_names)
        elif there == here:
            self.leaves[LABELS] = table
            self.report.append('label table: kept by number, without names for both sides')
        else:
            self._fresh_labels(f'{there} classes there, without names for both sides')

    def _fresh_labels(self, reason: str) -> None:
        self.start_fresh(LABELS)
        here = self.ours.model.num_classes
        self.report.append(f'fresh: the label table: {reason}, {here} classes here')

    def _named_labels(
        self, table: np.ndarray, their_names: Sequence[str], our_names: Sequence[str]
    ) -> None:
        """Keeps the rows of classes with the same name, in the order of `our_names`."""
        here = self.ours.model.num_classes
        rows = [their_names.index(name) if name in their_names else -1 for name in our_names]
        rows += [-1] * (here - len(our_names))
        if rows == list(range(len(table))):
            self.leaves[LABELS] = table
            return
        kept = [name for name in our_names if name in their_names]
        ours = np.array(rows) >= 0
        result = np.empty((here, table.shape[1]), np.float32)
        result[ours] = table[np.array(rows)[ours]]
        if not ours.all():
            result[~ours] = self.fresh(LABELS)[~ours]
        self.leaves[LABELS] = result
        self.fresh_count += result[~ours].size
        new = [name for name in our_names if name not in their_names]
        new += [f'label {i}' for i in range(len(our_names), here)]
        parts = [f'kept by name: {listed(kept)}'] if kept else []
        parts += [f'fresh: {listed(new)}'] if new else []
        if gone := [name for name in their_names if name not in our_names]:
            parts.append(f'left out: {listed(gone)}')
        self.report.append(f'label table: {"; ".join(parts)}')


def _comparable(theirs: Sequence[str], ours: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the names of both sides; () for names that are only the numbers of the labels.

    Such numbers are names after all if the other side has some of them in another order.
    """
    numbers = [all(name == str(i) for i, name in enumerate(names)) for names in (theirs, ours)]
    if not all(numbers) and set(theirs) & set(ours):
        return theirs, ours
    return () if numbers[0] else theirs, () if numbers[1] else ours


def _meanings(theirs: Config, ours: Config) -> list[str]:
    """Returns a line for each change in the meaning of the kept weights."""
    lines = []
    if theirs.image_shape[:2] != ours.image_shape[:2]:
        there, here = ('x'.join(map(str, c.image_shape[:2])) for c in (theirs, ours))
        lines.append(f'image size: {there} pixels there, {here} here; no weights depend on it')
    our_fields = diffusion_fields(ours)
    levels = 'timesteps stand for other noise levels'
    consequences = {
        'diffusion.steps': levels,
        'diffusion.schedule': levels,
        'diffusion.rescale_timesteps': 'the network reads other times',
        'diffusion.objective': 'the output of the last layer means something else',
        'diffusion.edm_sigma_data': 'input and output have other scales',
        'diffusion.edm_time_scale': 'the network reads other times',
    }
    tunes = ours.diffusion.objective == 'consistency'
    for name, value in diffusion_fields(theirs).items():
        if tunes and name == 'diffusion.objective':
            lines.append(f'tuned: the prediction of {ours.diffusion.prediction}, for consistency')
        elif name in our_fields and our_fields[name] != value:
            lines.append(
                f'changed: {name}: {value} there, {our_fields[name]} here; {consequences[name]}'
            )
    if theirs.diffusion.continuous != ours.diffusion.continuous:
        lines.append('changed: the time that the network reads stands for other noise levels')
    return lines
