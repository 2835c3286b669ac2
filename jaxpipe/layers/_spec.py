"""Descriptions of layers that are built later: each stage allocates only its own layers."""

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import flax.linen as nn
from flax import nnx

from jaxpipe.distributed import log as write_log
from jaxpipe.errors import LayerError

from ._adapters import Adapters
from ._remat import RematMark


def is_equinox(kind: type) -> bool:
    """True if a class is an Equinox module."""
    # By name, because Equinox is an optional dependency that must not be imported to ask.
    return any(
        base.__name__ == "Module" and base.__module__.startswith("equinox.")
        for base in kind.__mro__
    )


class LayerSpec:
    """A layer that is built later, from its class and arguments.

    The name is DeepSpeed's. The class may be a Flax Linen module, a Flax NNX module (built with
    `rngs=`), an Equinox module (built with `key=`, called per sample), or any callable that returns
    a Linen module or a plain function.

    Args:
        typename: The class, a callable that makes the layer, or a built Linen module.
        *module_args: Positional arguments of the class.
        forward_fn: `forward_fn(module, inputs)` is called instead of the layer's own call, for a
            block that takes or returns more than a pipeline passes between layers. `module` is the
            bound Linen module, the NNX object or the Equinox object. The function also receives
            `train`, `deterministic`, `rngs` or a side input if it names them.
        **module_kwargs: Keyword arguments of the class.

    Raises:
        LayerError: `typename` is a built NNX or Equinox module instead of its class, or is a built
            Linen module with arguments.

    Example:
        >>> import flax.linen as nn
        >>> LayerSpec(nn.Dense, 4, use_bias=False)
        Dense(4, use_bias=False)
        >>> attention = nn.MultiHeadDotProductAttention
        >>> LayerSpec(attention, 4, forward_fn=lambda block, x, mask: x + block(x, mask=mask))
        MultiHeadDotProductAttention(4, forward_fn=<lambda>)
    """

    def __init__(
        self,
        typename: Callable[..., Any] | nn.Module,
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        **module_kwargs: Any,
    ) -> None:
        is_built = isinstance(typename, (nn.Module, nnx.Module)) or is_equinox(type(typename))
        takes_built = isinstance(typename, nn.Module) and not module_args and not module_kwargs
        if is_built and not takes_built:
            raise LayerError(
                "LayerSpec must be given a class or a callable that makes a layer, but got "
                f"typename={type(typename).__name__} instance. Write LayerSpec(Class, "
                "arguments...); only a Linen module may be a built one, without arguments."
            )
        self.typename = typename
        self.forward_fn = forward_fn
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.remat_mark: RematMark | None = None
        self.adapters: tuple[Adapters, ...] = ()
        """Those of each call of `lora`."""
        self.is_causal = False
        """Whether `causal` has marked the layer."""
        self.train_flags: dict[str, bool] = {}
        """Flags named by `train_flag`, with their values in training."""

    def remat(self, policy: Callable[..., Any] | None = None) -> Self:
        """The same layer, marked to be recomputed in training whatever the module's interval is.

        A marked layer is not part of the groups of `activation_checkpoint_interval`. A
        `jax.checkpoint` that the user writes around it replaces this policy with its own.

        Args:
            policy: A `jax.checkpoint` policy, such as `jax.checkpoint_policies.dots_saveable`, that
                says which inner values are kept. None keeps the layer's inputs, stored as set by
                `jaxpipe.checkpointing.configure`. If the layer is sharded inside a stage, None also
                keeps the values that the layer names; see `jaxpipe.checkpointing.save_reduced`.

        Returns:
            A copy; this spec is unchanged.

        Raises:
            LayerError: The policy is not callable.

        Example:
            >>> import flax.linen as nn
            >>> LayerSpec(nn.Dense, 4).remat()
            Dense(4).remat()
        """
        marked = copy.copy(self)
        marked.remat_mark = RematMark(policy)
        return marked

    def causal(self) -> Self:
        """The same layer, marked to compute each position from it and earlier ones alone.

        What it computes for a position then depends neither on later positions nor on how many
        there are. If all layers are marked, `engine.generate` runs texts of all lengths with one
        program. Nothing checks the mark.

        Returns:
            A copy; this spec is unchanged.

        Example:
            >>> import flax.linen as nn
            >>> LayerSpec(nn.Dense, 4).causal()
            Dense(4).causal()
        """
        marked = copy.copy(self)
        marked.is_causal = True
        return marked

    def train_flag(self, name: str, *, in_training: bool = True) -> Self:
        """The same layer, with an argument that receives whether the model is training.

        The common names need no `train_flag`: `train`, `training`, `is_training`, `is_train`,
        `train_mode`, and with the opposite value `deterministic`, `inference` and
        `use_running_average`.

        Args:
            name: An argument of the layer's call (or of `forward_fn`), a boolean field of a Linen
                module, or a boolean attribute of an NNX module or a module in it.
            in_training: Its value in training; it has the opposite value in evaluation.

        Returns:
            A copy; this spec is unchanged.

        Raises:
            LayerError: The argument is not a name. `PipelineModule` raises it if the layer has no
                argument, field or attribute of this name.

        Example:
            >>> import flax.linen as nn
            >>> LayerSpec(nn.Dense, 4).train_flag("add_noise")
            Dense(4).train_flag('add_noise')
        """
        if not name.isidentifier():
            raise LayerError(
                f"train_flag must be given the name of an argument, but got name={name!r}. Write "
                "for instance LayerSpec(...).train_flag('add_noise')."
            )
        marked = copy.copy(self)
        marked.train_flags = {**self.train_flags, name: bool(in_training)}
        return marked

    def given_names(self) -> tuple[str, ...]:
        """Names of the class's arguments that this spec sets.

        If the class has no signature, only keyword arguments are listed.
        """
        try:
            given = (
                inspect.signature(self.typename)
                .bind_partial(*self.module_args, **self.module_kwargs)
                .arguments
            )
        except (TypeError, ValueError):
            given = self.module_kwargs
        return tuple(given)

    def build(self, log: bool = False, **more: Any) -> Any:
        """Make the layer.

        Args:
            log: Whether to log the build.
            **more: Keyword arguments in addition to the stored ones, such as `rngs` for an NNX
                module.

        Returns:
            The result of the class.
        """
        if log:
            write_log(logging.INFO, "building %r", self)
        if isinstance(self.typename, nn.Module):
            return self.typename.clone(**more) if more else self.typename
        return self.typename(*self.module_args, **self.module_kwargs, **more)

    def __repr__(self) -> str:
        args = [repr(a) for a in self.module_args] + [
            f"{k}={v!r}" for k, v in self.module_kwargs.items()
        ]
        if self.forward_fn is not None:
            args.append(f"forward_fn={getattr(self.forward_fn, '__name__', repr(self.forward_fn))}")
        marks = "" if self.remat_mark is None else f".{self.remat_mark!r}"
        marks += ".causal()" if self.is_causal else ""
        for name, in_training in self.train_flags.items():
            marks += f".train_flag({name!r}{'' if in_training else ', in_training=False'})"
        name = getattr(self.typename, "__name__", repr(self.typename))
        if isinstance(self.typename, nn.Module):
            name = "LayerSpec"
            args = [type(self.typename).__name__ + " instance", *args]
        return f"{name}({', '.join(args)}){marks}"


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with every other layer of the same key.

    The shared parameters exist once, under `tied/<key>` in the parameter tree, and their gradients
    are summed over all uses. Unlike in DeepSpeed, the default shares the whole parameter tree of
    the layer, not one attribute.

    Args:
        key: Layers with equal keys share parameters.
        typename: As in `LayerSpec`.
        *module_args: Positional arguments of the class.
        forward_fn: As in `LayerSpec`.
        tied_weight_attr: Dotted path, or paths, of the parameters to share, such as `"embedding"`
            or `"token.embedding"`; a path that names a subtree shares all of it. None shares
            everything.
        **module_kwargs: Keyword arguments of the class.

    Raises:
        LayerError: As in `LayerSpec`; or the key is not a non-empty string without a slash, or
            `tied_weight_attr` is empty or holds an empty string.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any] | nn.Module,
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] | None = None,
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, forward_fn=forward_fn, **module_kwargs)
        if not key or "/" in key:
            raise LayerError(
                "TiedLayerSpec must have a non-empty string without '/' as its key, but got "
                f"key={key!r}. The key names the shared parameters, as in tied/<key>."
            )
        self.key = key
        attrs = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tied_weight_attr
        if attrs is not None and not (attrs and all(attrs)):
            raise LayerError(
                "tied_weight_attr must be a dotted path or a non-empty list of them, but got "
                f"tied_weight_attr={tied_weight_attr!r}. Leave it out to share all parameters of "
                "the layer."
            )
        self.tied_weight_attr = None if attrs is None else tuple(attrs)
