"""The sections that name an optimizer and a learning-rate schedule."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from jaxpipe.errors import ConfigError, shown

from ._params import Params, infinite_in, read_params
from ._section import Section, join, required
from ._values import read_text, wrong_value

_ONE_BIT = (
    "sends momenta of one bit each, which XLA's collectives cannot; a reduction in full precision "
    "gives what it approximates",
    {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"},
)
_MUP = (
    "scales the rates by base shapes that the package mup records on PyTorch modules; for rates by "
    "path pass optax.multi_transform as optimizer= to initialize",
    {"muadam": "Adam", "muadamw": "AdamW", "musgd": "SGD"},
)
_REFUSED_TYPES = MappingProxyType(
    {
        name: (reason, instead)
        for reason, names in (_ONE_BIT, _MUP)
        for name, instead in names.items()
    }
)


def read_optimizer_type(value: object, path: str) -> str:
    """Read the name of an optimizer; refuses one that only PyTorch has.

    Whether there is one of that name is checked where optimizers are known.
    """
    name = read_text(value, path)
    if name.lower() in _REFUSED_TYPES:
        reason, instead = _REFUSED_TYPES[name.lower()]
        raise wrong_value(
            path, "an optimizer that JAX can run", value, f"Use {instead!r}: {name} {reason}"
        )
    return name


@dataclass(frozen=True)
class OptimizerSection(Section):
    """The section `optimizer`.

    Attributes:
        type: Name of the optimizer, DeepSpeed's or optax's.
        params: Its settings, frozen: lists are tuples. They are checked where optimizers are known.

    Raises:
        ConfigError: A value is of the wrong type, the optimizer is one that only PyTorch has, or
            `params` asks for clipping.
    """

    path: ClassVar[str] = "optimizer"

    type: str = required(read_optimizer_type)
    params: Params = field(default=Params({}), metadata={"reader": read_params})

    def check(self) -> Iterable[ConfigError]:
        """Refuse clipping among the optimizer's settings, and numbers that are none."""
        yield from infinite_in(self.params, join(self.path, "params"))
        if "max_grad_norm" in self.params:
            norm = self.params["max_grad_norm"]
            repair = (
                f"Set gradient_clipping={shown(norm)} beside the optimizer: it clips by the norm "
                "over all stages"
            )
            yield wrong_value(join(self.path, "params.max_grad_norm"), "left out", norm, repair)


@dataclass(frozen=True)
class SchedulerSection(Section):
    """The section `scheduler`.

    Attributes:
        type: Name of the learning-rate schedule, DeepSpeed's or optax's.
        params: Its settings, frozen: lists are tuples. They are checked where schedules are known.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "scheduler"

    type: str = required(read_text)
    params: Params = field(default=Params({}), metadata={"reader": read_params})

    def check(self) -> Iterable[ConfigError]:
        """Refuse numbers that are none."""
        return infinite_in(self.params, join(self.path, "params"))
