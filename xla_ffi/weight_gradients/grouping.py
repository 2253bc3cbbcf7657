"""Merges the calls of a function that compute small weight gradients into one call.

At small batches, a weight gradient is too little work for the GPU, and its call takes two launches:
the kernel, and the sum of its splits. One call of `jaxunet_weight_gradients` computes many of them
in a few launches. It comes after everything that does not need its results, so its operands stay in
memory until then. Its last launch also adds the gradients of norms over the samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxunet.ops.adamw.packed import LATE_SHARE
from jaxunet.ops.transformations import vary, varying_axes
from jaxunet.runtime import device
from xla_ffi.conv3x3 import parameter_gradients
from xla_ffi.conv3x3.split_k import MULTIPROCESSORS
from xla_ffi.linear import vjp as linear

TARGET = 'jaxunet_weight_gradients'
CONVOLUTION, LINEAR = 'jaxunet_conv3x3_weight_gradient', 'jaxunet_linear_weight_gradient'
NORMS = ('jaxunet_group_norm_gradient', 'jaxunet_group_norm_dropout_gradient')
# Largest product of a call that is merged; it bounds the memory in which operands wait. To refit,
# time steps of batches 64 to 256 with half and with twice as much (tests/gpu/steps.py), and compare
# their memory (tests/gpu/compile.py).
MOST_FLOPS = 120e9
BLOCKS = 4  # blocks per multiprocessor whose partial sums the workspace holds

Run = TypeVar('Run', bound=Callable[..., Any])
Values = dict[Var, Array]


class Member(NamedTuple):
    """A call that computes the weight gradient of one convolution or linear layer.

    Fields:
      target: `CONVOLUTION` or `LINEAR`.
      attributes: by name, without `kernels`.
      kernels: the attribute of that name (`xla_ffi.call`); '' if the call has none.
    """

    equation: JaxprEqn
    target: str
    attributes: dict[str, Any]
    kernels: str

    @property
    def dy(self) -> jax.ShapeDtypeStruct:
        """The gradient of the layer's output, (batch, height, width, features)."""
        return _shape(self.equation.invars[self.attributes.get('parts', 1)])

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and types of all results but the workspace."""
        return [_shape(var) for var in self.equation.outvars[:-1]]

    @property
    def weights(self) -> int:
        """The number of weights, those of a shortcut included."""
        kernel, _, *others = self.results
        shortcut = others[:1] if self.attributes.get('residuals', 0) else []
        return sum(math.prod(result.shape) for result in (kernel, *shortcut))

    @property
    def flops(self) -> int:
        """The floating-point operations of the matrix product."""
        return 2 * math.prod(self.dy.shape[:3]) * self.weights

    @property
    def sums(self) -> int:
        """The float32 elements of the workspace that the sums of dy take."""
        batch, *_, features = self.dy.shape
        of_dy = linear.sums_of_dy if self.target == LINEAR else parameter_gradients.sums_of_dy
        return of_dy(batch, features)

    @property
    def own_workspace(self) -> int:
        """The float32 elements of the workspace of the call itself."""
        return _shape(self.equation.outvars[-1]).shape[0]


class Norm(NamedTuple):
    """A call of a norm's gradient whose sums a merged call adds over the samples.

    Fields:
      without: the same call without the gradients of scale and offset.
    """

    equation: JaxprEqn
    without: JaxprEqn

    @property
    def sums(self) -> Var:
        """The sums of each sample, (batch, 2, channels)."""
        return self.without.outvars[0]

    @property
    def gradients(self) -> list[Var]:
        """The gradients of scale and offset, both (1, channels)."""
        return self.equation.outvars[1:3]


def grouped_if_faster(function: Run, devices: int = 1) -> Run:
    """Returns `grouped(function)` where it is faster: on Hopper, with the fastest kernels.

    The portable kernels compute the members of a call one after the other.

    Args:
      devices: if there are several, they sum the gradients, so the call is cut in two: all but the
        last gradients can then be summed beside the end of the backward pass.
    """
    if device.family() is not device.Target.HOPPER:
        return function
    return grouped(function, tail=LATE_SHARE if devices > 1 else 0.0)


def grouped(function: Run, *, tail: float = 0.0) -> Run:
    """Returns a function with the same results that computes its small weight gradients together.

    It merges the calls of `CONVOLUTION` and `LINEAR` whose images have 16 bits and whose product
    has at most `MOST_FLOPS`, separately by type. It leaves calls alone that depend on a merged
    call, and calls inside loops, branches and functions of their own (`jax.lax.scan`,
    `jax.lax.cond`, `jax.checkpoint`, `jax.jit`).

    Calls of `NORMS` whose samples share scale and offset then return only the sums of each sample,
    and the first merged call adds them. It leaves those alone whose gradients a merged call needs.

    Args:
      function: takes positional arguments, trees of arrays, and returns a tree of arrays; it is
        traced.
      tail: the largest share of the weights that a second call may have (`_cut`); 0 = one call.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _evaluate(closed, jax.tree.leaves(arguments), tail)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run  # type: ignore[return-value]


def _evaluate(closed: ClosedJaxpr, arguments: Sequence[Array], tail: float) -> list[Array]:
    """Runs a traced function, with the members of each group in one call, or two (`_cut`)."""
    jaxpr = closed.jaxpr
    groups = [part for group in _groups(jaxpr.eqns) for part in _cut(group, tail)]
    members = [member.equation for group in groups for member in group]
    wanted = _variables(jaxpr.outvars)
    norms = _norms(jaxpr.eqns, members, wanted) if groups else []
    before, after = _split(jaxpr.eqns, members, norms)
    after = _needed(after, wanted)
    values: Values = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True)
    )
    # The parts of the function have other arguments and results than the function.
    source = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    operands = _read(members) | {norm.sums for norm in norms}
    _run(before, values, wanted | operands | _read(after), source)
    for group, own in zip(groups, _shared(norms, groups, jaxpr.eqns), strict=True):
        _call(group, own, values)
    _run(after, values, wanted, source)
    return [_value(atom, values) for atom in jaxpr.outvars]


def _groups(equations: Sequence[JaxprEqn]) -> list[list[Member]]:
    """Returns the groups of calls to merge, each of at least two."""
    found: dict[tuple[DTypeLike, str], list[Member]] = {}
    dependent: set[Var] = set()  # what depends on a member
    for equation in equations:
        member = _member(equation)
        if not dependent.isdisjoint(_read([equation])):
            dependent.update(equation.outvars)
        elif member is not None:
            found.setdefault((member.dy.dtype, member.kernels), []).append(member)
            dependent.update(equation.outvars)
    return [group for group in found.values() if len(group) > 1]


def _cut(group: list[Member], tail: float) -> list[list[Member]]:
    """Cuts a group in two where the images change in size, or returns it whole.

    The second part is the largest that has at most the share `tail` of the weights. In a network
    with levels, it belongs to its first levels, which have the most pixels and the fewest weights.
    """
    weights = [member.weights for member in group]
    for i in range(1, len(group)):
        resized = group[i].dy.shape[1:3] != group[i - 1].dy.shape[1:3]
        if resized and sum(weights[i:]) <= tail * sum(weights):
            return [group[:i], group[i:]]
    return [group]


def _shared(
    norms: Sequence[Norm], groups: Sequence[Sequence[Member]], equations: Sequence[JaxprEqn]
) -> list[list[Norm]]:
    """Returns the norms of each group: of the first that has a member after the norm's equation.

    Norms after all members go to the last group.
    """
    place = {id(equation): i for i, equation in enumerate(equations)}
    shared: list[list[Norm]] = [[] for _ in groups]
    for norm in norms:
        ends = [place[id(group[-1].equation)] for group in groups]
        after = [i for i, end in enumerate(ends) if end > place[id(norm.equation)]]
        shared[after[0] if after else -1].append(norm)
    return shared


def _member(equation: JaxprEqn) -> Member | None:
    """Returns an equation as a member; None if it is not a call to merge."""
    if equation.primitive.name != 'ffi_call':
        return None
    target = equation.params['target_name']
    if target not in (CONVOLUTION, LINEAR):
        return None
    attributes = dict(equation.params['attributes'])
    member = Member(equation, target, attributes, attributes.pop('kernels', ''))
    narrow = member.dy.dtype in (jnp.bfloat16, jnp.float16)
    return member if narrow and member.flops <= MOST_FLOPS else None


def _norms(
    equations: Sequence[JaxprEqn], members: Sequence[JaxprEqn], wanted: set[Var]
) -> list[Norm]:
    """Returns the norms whose sums the merged calls can add, in the order of the equations.

    They do not depend on members, and neither members nor the sums of other norms depend on their
    gradients.
    """
    before, _ = _split(equations, members)
    used, needed, found = wanted | _read(equations), _read(members), []
    for equation in reversed(before):
        norm = _norm(equation, used)
        if norm is not None and needed.isdisjoint(norm.gradients):
            found.append(norm)
        elif needed.isdisjoint(equation.outvars):
            continue
        needed |= _read([equation])
    return found[::-1]


def _norm(equation: JaxprEqn, used: set[Var]) -> Norm | None:
    """Returns an equation as a norm; None if it is no call that adds sums over the samples.

    Args:
      used: the variables that are read or wanted. If the sums are not, they get a new variable,
        because JAX does not name results that are not used.
    """
    if equation.primitive.name != 'ffi_call' or equation.params['target_name'] not in NORMS:
        return None
    attributes = dict(equation.params['attributes'])
    sums, *results = [_shape(var) for var in equation.outvars]
    if not attributes['samples'] or any(row.shape[0] != 1 for row in results[:2]):
        return None
    # Traced instead of copied: the other parameters of the call belong to the version of JAX.
    shapes = [sums, *results[2:]]
    method = equation.params['vmap_method']
    call = jax.ffi.ffi_call(equation.params['target_name'], shapes, vmap_method=method)
    traced = jax.make_jaxpr(functools.partial(call, **attributes | {'samples': False}))
    (alone,) = traced(*(_shape(atom) for atom in equation.invars)).jaxpr.eqns
    own = equation.outvars[0]
    outvars = [own if own in used else alone.outvars[0], *equation.outvars[3:]]
    return Norm(equation, equation.replace(params=alone.params, outvars=outvars))


def _split(
    equations: Sequence[JaxprEqn], members: Sequence[JaxprEqn], norms: Sequence[Norm] = ()
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Returns the other equations: those that do not depend on members, and those that do.

    Args:
      norms: those whose gradients the members' call computes; they do not depend on members.
    """
    chosen = {id(equation) for equation in members}
    without = {id(norm.equation): norm.without for norm in norms}
    dependent = {var for equation in members for var in equation.outvars}
    dependent |= {var for norm in norms for var in norm.gradients}
    before, after = [], []
    for equation in equations:
        if id(equation) in chosen:
            continue
        if dependent.isdisjoint(_read([equation])):
            before.append(without.get(id(equation), equation))
        else:
            after.append(equation)
            dependent.update(equation.outvars)
    return before, after


def _needed(equations: Sequence[JaxprEqn], wanted: set[Var]) -> list[JaxprEqn]:
    """Returns the equations that have effects or whose results are needed.

    In a checked `jax.shard_map`, an equation whose result is not needed makes a workspace vary over
    mesh axes (`xla_ffi.call`), and the members of a merged call have no workspaces.
    """
    needed, found = set(wanted), []
    for equation in reversed(equations):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            found.append(equation)
            needed |= _read([equation])
    return found[::-1]


def _run(
    equations: Sequence[JaxprEqn], values: Values, wanted: set[Var], source: DebugInfo
) -> None:
    """Runs equations with their scopes, and adds their results to the values if they are wanted.

    Args:
      values: of the variables that the equations read, by variable.
      wanted: the variables that are read later.
      source: the function that the equations come from.
    """
    results = [var for equation in equations for var in equation.outvars if var in wanted]
    reads = _read(equations)
    read = [var for var in values if var in reads]
    part = ClosedJaxpr(Jaxpr([], read, results, equations, debug_info=source), [])
    values |= zip(results, jaxpr_as_fun(part)(*(values[var] for var in read)), strict=True)


def _call(group: Sequence[Member], norms: Sequence[Norm], values: Values) -> None:
    """Runs the members in one call that also adds sums of norms; adds all results to the values."""
    operands = [_value(atom, values) for member in group for atom in member.equation.invars]
    operands += [values[norm.sums] for norm in norms]
    names = [var for member in group for var in member.equation.outvars[:-1]]
    names += [var for norm in norms for var in norm.gradients]
    shapes = [*map(_shape, names), jax.ShapeDtypeStruct((_workspace(group),), jnp.float32)]
    attributes: dict[str, Any] = {'members': np.int64(len(group)), 'norms': np.int64(len(norms))}
    for i, member in enumerate(group):
        attributes[f'linear_{i}'] = member.target == LINEAR
        attributes |= {f'{name}_{i}': value for name, value in member.attributes.items()}
    if group[0].kernels:
        attributes['kernels'] = group[0].kernels
    # Not by `xla_ffi.call`: the equations that make the members' results vary over mesh axes are
    # among those that follow.
    call = jax.ffi.ffi_call(TARGET, shapes, vmap_method='sequential')
    with jax.named_scope('backward'):  # its phase for jaxunet.profile
        *found, _ = call(*vary(operands, varying_axes(operands)), **attributes)
    values |= zip(names, found, strict=True)


def _workspace(group: Sequence[Member]) -> int:
    """Returns the float32 elements of the workspace of a merged call.

    It holds the gradients and the sums of dy of all members, and partial sums of `BLOCKS` blocks
    per multiprocessor, but never more than the workspaces of the members' own calls.
    """
    blocks = BLOCKS * device.multiprocessors(MULTIPROCESSORS)
    partial = blocks * parameter_gradients.PARTIAL_SUMS
    needed = sum(member.weights + member.sums for member in group)
    return min(needed + partial, sum(member.own_workspace for member in group))


def _variables(atoms: Sequence[Any]) -> set[Var]:
    return {atom for atom in atoms if isinstance(atom, Var)}


def _read(equations: Sequence[JaxprEqn]) -> set[Var]:
    """Returns the variables that equations read."""
    return {var for equation in equations for var in _variables(equation.invars)}


def _shape(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _value(atom: Any, values: Values) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]
