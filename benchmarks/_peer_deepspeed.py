"""DeepSpeed's member of the peers benchmark: PipelineEngine on two processes.

Run by `benchmarks.peers` with the peers' interpreter: python -m benchmarks._peer_deepspeed CASE
"""

import itertools
import logging
from collections.abc import Callable

import torch

from benchmarks._peer_member import ADAM, Case, read_case, serve
from benchmarks._peer_torch import RANKS, layers, loss_fn, read_tokens


def pipelined_step(case: Case) -> Callable[[], float]:
    """The engine's `train_batch`."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    deepspeed.init_distributed("gloo")
    model = PipelineModule(
        list(layers(case, 0, case.num_blocks + 2)),
        num_stages=RANKS,
        loss_fn=loss_fn,
        partition_method="type:block|recomputed",
    )
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    config = {
        "train_micro_batch_size_per_gpu": case.microbatch_size,
        "gradient_accumulation_steps": case.num_microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    batches = itertools.cycle(list(zip(*read_tokens(case), strict=True)))
    return lambda: float(engine.train_batch(batches))


def main() -> None:
    """Be the member that the command line names."""
    case = read_case()
    torch.set_num_threads(1)
    serve(pipelined_step(case))


if __name__ == "__main__":
    main()
