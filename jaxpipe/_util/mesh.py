"""The mesh that a program has set around its calls of this library."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh

P = ParamSpec("P")
R = TypeVar("R")

NO_MESH = AbstractMesh((), ())


def no_mesh() -> AbstractContextManager[None]:
    """A context without the mesh that the caller has set with `jax.set_mesh`, in this thread."""
    # The programs of this library name their own mesh, and JAX refuses them inside a mesh of other
    # devices or axes.
    try:
        return jax.set_mesh(None)
    except ValueError:  # JAX is tracing the caller's own jit
        return jax.sharding.use_abstract_mesh(NO_MESH)


def off_mesh(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run without the mesh that its caller has set."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with no_mesh():
            return function(*args, **kwargs)

    return call
