"""The sections that name an optimiser and a learning-rate schedule."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from jaxpipe.errors import ConfigError, shown

from ._params import Params, infinite_in, read_params
from ._section import Section, join, required
from ._values import read_text, wrong_value

_ONE_BIT = (
    "sends momenta of one bit each, which XLA's collectives cannot; it approximates a reduction in "
    "full precision",
    {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"},
)
_MUP = (
    "scales the rates by base shapes that the package mup records on PyTorch modules; for rates by "
    "path, pass optax.multi_transform as optimizer= to initialize",
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
    """Read the name of an optimiser, and refuse the ones that exist only in PyTorch."""
    name = read_text(value, path)
    if name.lower() in _REFUSED_TYPES:
        reason, instead = _REFUSED_TYPES[name.lower()]
        raise wrong_value(
            path, "an optimizer that JAX can run", value, f"Use {instead!r}: {name} {reason}"
        )
    # Whether the name exists is checked by `jaxpipe.optim`.
    return name


@dataclass(frozen=True)
class OptimizerSection(Section):
    """The section `optimizer`.

    Attributes:
        type: Name of an optimiser of DeepSpeed or Optax.
        params: Settings of the optimiser, stored frozen, with lists as tuples. They are checked
            when the optimiser is created.

    Raises:
        ConfigError: A value is of the wrong type, the optimiser exists only in PyTorch, or `params`
            asks for clipping.
    """

    path: ClassVar[str] = "optimizer"

    type: str = required(read_optimizer_type)
    params: Params = field(default=Params({}), metadata={"reader": read_params})

    def check(self) -> Iterable[ConfigError]:
        """Refuse clipping among the optimiser's settings, and numbers that are not finite."""
        yield from infinite_in(self.params, join(self.path, "params"))
        if "max_grad_norm" in self.params:
            norm = self.params["max_grad_norm"]
            repair = (
                f"Set gradient_clipping={shown(norm)} outside the optimizer: it clips by the norm "
                "over all stages"
            )
            yield wrong_value(join(self.path, "params.max_grad_norm"), "left out", norm, repair)


@dataclass(frozen=True)
class SchedulerSection(Section):
    """The section `scheduler`.

    Attributes:
        type: Name of a learning-rate schedule of DeepSpeed or Optax.
        params: Settings of the schedule, stored frozen, with lists as tuples. They are checked when
            the schedule is created.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "scheduler"

    type: str = required(read_text)
    params: Params = field(default=Params({}), metadata={"reader": read_params})

    def check(self) -> Iterable[ConfigError]:
        """Refuse numbers that are not finite."""
        return infinite_in(self.params, join(self.path, "params"))
