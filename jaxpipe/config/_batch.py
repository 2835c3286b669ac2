"""The three sizes of a batch."""

from dataclasses import dataclass

from jaxpipe.errors import ConfigError

from ._values import integer_of_at_least

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_EQUATION = (
    "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
    "data_parallel_size"
)


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes that are consistent with each other.

    Attributes:
        train_batch_size: Samples per optimiser step, over all replicas.
        train_micro_batch_size_per_gpu: Samples per microbatch on one replica.
        gradient_accumulation_steps: Microbatches per step.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


def resolve_batch_sizes(
    train_batch_size: int | None = None,
    train_micro_batch_size_per_gpu: int | None = None,
    gradient_accumulation_steps: int | None = None,
    *,
    data_parallel_size: int,
) -> BatchSizes:
    """Complete the sizes of a batch: any two of the first three determine the third.

    The sizes satisfy `train_batch_size = train_micro_batch_size_per_gpu x
    gradient_accumulation_steps x data_parallel_size`: samples over all replicas are samples per
    microbatch on one replica x microbatches x replicas. If only one of the first two is given,
    there is one accumulation step.

    Example:
        >>> sizes = resolve_batch_sizes(64, 4, data_parallel_size=2)
        >>> sizes.gradient_accumulation_steps
        8
    """
    batch = train_batch_size
    micro = train_micro_batch_size_per_gpu
    steps = gradient_accumulation_steps
    given = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "data_parallel_size": data_parallel_size,
    }
    positive = integer_of_at_least(1)
    for name, value in given.items():
        if value is not None or name == "data_parallel_size":
            positive(value, name)
    if batch is None and micro is None:
        raise ConfigError(
            f"{_EQUATION} must be given train_batch_size or train_micro_batch_size_per_gpu, but "
            f"got {_equation(given)}. Add one of the two keys.",
            paths=_SIZES,
        )
    if steps is None and (batch is None or micro is None):
        steps = given["gradient_accumulation_steps"] = 1
    if batch is None:
        batch = (micro or 1) * (steps or 1) * data_parallel_size
    # An unknown size counts as 1, so the batch must be a multiple of the known factors.
    factor = (micro or 1) * (steps or 1) * data_parallel_size
    if batch % factor or (micro and steps and batch != factor):
        repair = _repair(batch, micro, steps, factor)
        raise ConfigError(
            f"{_EQUATION} must hold, but got {_equation(given)}. {repair}", paths=_SIZES
        )
    return BatchSizes(batch, micro or batch // factor, steps or batch // factor)


def _equation(given: dict[str, int | None]) -> str:
    batch, *factors = ("?" if value is None else str(value) for value in given.values())
    return f"{batch} {'=' if None in given.values() else '!='} {' x '.join(factors)}"


def _repair(batch: int, micro: int | None, steps: int | None, factor: int) -> str:
    if micro and steps:
        return f"Use train_batch_size={factor}, or leave out one of the three keys."
    multiples = [
        size for size in (batch // factor * factor, (batch // factor + 1) * factor) if size
    ]
    nearest = " or ".join(map(str, multiples))
    return (
        f"Use a train_batch_size that is a multiple of {factor}: the nearest to {batch} is "
        f"{nearest}."
    )
