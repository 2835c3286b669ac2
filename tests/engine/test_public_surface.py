"""The names that users of DeepSpeed type, on both engines."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import flax.linen as nn
import optax
import pytest
from _small import MICROBATCHES, build, entry, mean_square

import jaxpipe

NAMES = """
    add_monitor backward config data_shard eval eval_batch evaluate flush_monitors forward
    generate get_additional_losses get_batch_info get_global_grad_norm get_lr get_mom
    global_samples global_steps gradient_accumulation_steps grid is_first_stage
    is_gradient_accumulation_boundary is_last_stage load_checkpoint load_huggingface
    load_module_state_dict load_opt_state_tree log_probs loss_scale lower lr_scheduler mesh
    metrics micro_batch_size micro_batches micro_steps module module_collections module_state_dict
    next_stage num_stages opt_state_tree optimizer pipeline predict prev_stage
    reset_activation_shape save_checkpoint save_on_preemption schedule_trace set_batch_fn
    set_dataiterator set_dataloader set_hyperparams set_lr set_train_batch_size
    set_train_micro_batch_size skipped_steps stage_id state step train train_batch
    train_batch_size train_micro_batch_size_per_gpu training_dataloader wait_for_checkpoint
    was_step_applied world_size
"""


ROOT = str(Path(jaxpipe.__file__).parent)


def unpipelined() -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICROBATCHES}
    return jaxpipe.initialize(
        model=nn.Dense(1), optimizer=optax.adam(0.1), loss_fn=mean_square, config=config
    )[0]


@pytest.mark.parametrize(("make", "more"), [(build, ()), (unpipelined, ("training",))])
def test_the_public_names(make: Callable[[], Any], more: tuple[str, ...]) -> None:
    engine = make()
    assert callable(engine)
    assert {name for name in dir(engine) if not name.startswith("_")} == {*NAMES.split(), *more}
    undocumented = [
        name
        for name in dir(type(engine))
        if name in NAMES.split() and not getattr(type(engine), name).__doc__
    ]
    assert undocumented == []


def test_a_step_makes_few_calls() -> None:
    """The host must be done before the devices are.

    Comprehensions and calls within JAX do not count.
    """
    engine, calls = build(example_batch=entry()), []
    iterator = itertools.cycle([entry(seed) for seed in range(MICROBATCHES)])

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(ROOT)
            and not code.co_name.startswith("<")
        ):
            calls.append(code.co_qualname)

    for _ in range(3):
        engine.train_batch(iterator)
    sys.setprofile(count)
    try:
        engine.train_batch(iterator)
    finally:
        sys.setprofile(None)
    assert len(calls) < 105, sorted(calls)
