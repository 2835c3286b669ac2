"""The section that says how parameters are averaged."""

from dataclasses import dataclass
from typing import ClassVar

from ._section import Section, setting
from ._values import number, read_flag


@dataclass(frozen=True)
class EMASection(Section):
    """The section `ema`: an exponential moving average of the trained parameters.

    DeepSpeed has none. The average lies beside the optimiser's state, in float32 or wider, and is
    divided by `zero_optimization` as that is. `"ema"` names it in `engine.evaluate`,
    `eval_batch`, `predict`, `log_probs` and `module_state_dict`, and where checkpoints are read.

    Attributes:
        decay: What is kept of the average in an update, from 0 to below 1.
        warmup: Whether the update `t` keeps at most `(1 + t) / (10 + t)`, so that the first
            parameters are soon forgotten.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: ClassVar[str] = "ema"

    decay: float = setting(0.999, number(0.0, below=1.0))
    warmup: bool = setting(True, read_flag)
