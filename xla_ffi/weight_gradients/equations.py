"""The equations of a traced function: what they read, what depends on them, and running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array

Values = dict[Var, Array]


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of a variable or literal."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def value_of(atom: Any, values: Values) -> Any:
    """Returns the value of a variable or literal."""
    return atom.val if isinstance(atom, Literal) else values[atom]


def variables(atoms: Sequence[Any]) -> set[Var]:
    """Returns the variables among operands."""
    return {atom for atom in atoms if isinstance(atom, Var)}


def read(equations: Sequence[JaxprEqn]) -> set[Var]:
    """Returns the variables that equations read."""
    return {var for equation in equations for var in variables(equation.invars)}


def split(
    equations: Sequence[JaxprEqn],
    removed: Sequence[JaxprEqn],
    replaced: Sequence[tuple[JaxprEqn, JaxprEqn]] = (),
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Returns the other equations: those that do not depend on removed ones, and those that do.

    Args:
      replaced: pairs of an equation and its replacement, which does not depend on removed ones.
        What depends on results that the replacement lacks belongs to the second list.
    """
    gone = {id(equation) for equation in removed}
    instead = {id(old): new for old, new in replaced}
    dependent = {var for equation in removed for var in equation.outvars}
    dependent |= {var for old, new in replaced for var in set(old.outvars) - set(new.outvars)}
    before, after = [], []
    for equation in equations:
        if id(equation) in gone:
            continue
        if dependent.isdisjoint(read([equation])):
            before.append(instead.get(id(equation), equation))
        else:
            after.append(equation)
            dependent.update(equation.outvars)
    return before, after


def needed(equations: Sequence[JaxprEqn], wanted: set[Var]) -> list[JaxprEqn]:
    """Returns the equations that have effects or whose results are needed.

    In a checked `jax.shard_map`, an equation whose result is not needed makes a workspace vary over
    mesh axes (`xla_ffi.call`), and the weight gradients of a merged call have
    no workspaces of their own.
    """
    variables_needed, kept = set(wanted), []
    for equation in reversed(equations):
        if equation.effects or not variables_needed.isdisjoint(equation.outvars):
            kept.append(equation)
            variables_needed |= read([equation])
    return kept[::-1]


def run(equations: Sequence[JaxprEqn], values: Values, wanted: set[Var], source: DebugInfo) -> None:
    """Runs equations with their scopes, and adds their results to the values if they are wanted.

    Args:
      values: of the variables that the equations read, by variable.
      wanted: the variables that are read later.
      source: the function that the equations come from.
    """
    results = [var for equation in equations for var in equation.outvars if var in wanted]
    reads = read(equations)
    arguments = [var for var in values if var in reads]
    part = ClosedJaxpr(Jaxpr([], arguments, results, equations, debug_info=source), [])
    values |= zip(results, jaxpr_as_fun(part)(*(values[var] for var in arguments)), strict=True)
