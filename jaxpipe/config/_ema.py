"""The section that sets how parameters are averaged."""

from dataclasses import dataclass
from typing import ClassVar

from ._section import Section, setting
from ._values import number, read_flag


@dataclass(frozen=True)
class EMASection(Section):
    """The section `ema`: an exponential moving average of the trained parameters.

    DeepSpeed has no such section. The average is stored in float32 or wider, and
    `zero_optimization` shards it like the optimiser's state. Pass `"ema"` to use it in
    `engine.evaluate`, `eval_batch`, `predict`, `log_probs` and `module_state_dict`, and when
    reading checkpoints.

    Attributes:
        decay: Fraction of the average that an update keeps, at least 0 and below 1.
        warmup: Whether update `t` keeps at most `(1 + t) / (10 + t)` of the average, so that the
            first parameters are soon forgotten.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: ClassVar[str] = "ema"

    decay: float = setting(0.999, number(0.0, below=1.0))
    warmup: bool = setting(True, read_flag)
