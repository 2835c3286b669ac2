"""The section that sets how checkpoints are written and which ones are kept."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from jaxpipe.errors import ConfigError

from ._section import Section, setting
from ._values import integer_of_at_least, optional, read_flag


@dataclass(frozen=True)
class CheckpointSection(Section):
    """The section `checkpoint`.

    These keys are specific to jaxpipe. DeepSpeed's key `tag_validation` has no effect, because tags
    that differ between processes are always an error.

    Attributes:
        async_save: Whether `save_checkpoint` returns before everything is on disk, so that training
            continues during the write. Call `wait_for_checkpoint` before the program ends.
        keep_last: Number of checkpoints to keep among the tags of the form `global_step<N>`. By
            default all are kept.
        keep_every: Also keep the tags whose N is a multiple of this number.

    Raises:
        ConfigError: A value is of the wrong type or out of range, or `keep_every` is given without
            `keep_last`.
    """

    path: ClassVar[str] = "checkpoint"

    async_save: bool = setting(False, read_flag)
    keep_last: int | None = setting(None, optional(integer_of_at_least(1)))
    keep_every: int | None = setting(None, optional(integer_of_at_least(1)))

    def check(self) -> Iterable[ConfigError]:
        """Check that `keep_every` is given only together with `keep_last`."""
        if self.keep_every is not None and self.keep_last is None:
            yield ConfigError(
                "checkpoint.keep_every must come with checkpoint.keep_last, without which nothing "
                f"is removed, but got checkpoint.keep_every={self.keep_every} alone. Add for "
                "instance checkpoint.keep_last=3.",
                paths=["checkpoint.keep_every", "checkpoint.keep_last"],
            )
