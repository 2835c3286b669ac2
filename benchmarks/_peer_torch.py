"""Torch's members of the peers benchmark.

A plain step in one process, and torch.distributed.pipelining.

Run by `benchmarks.peers` with the peers' interpreter: python -m benchmarks._peer_torch CASE
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks._peer_member import ADAM, HEADS, VOCAB, Case, read_case, serve

RANKS = 2
NAMES = {
    "Embed": {"Embed_0": "tokens", "position": "position"},
    "Head": {"LayerNorm_0": "norm", "Dense_0": "logits"},
    "Block": {
        "LayerNorm_0": "norm1",
        "Dense_0": "qkv",
        "Dense_1": "mix",
        "LayerNorm_1": "norm2",
        "Dense_2": "down",
        "Dense_3": "up",
    },
}
"""Per class the parts' names in torch, by their names in Flax."""


class Embed(nn.Module):
    """Token and position embedding."""

    def __init__(self, dim: int, time: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.zeros(time, dim))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map `[batch, time]` to `[batch, time, dim]`."""
        return self.tokens(tokens) + self.position


class Block(nn.Module):
    """The block of `benchmarks._gpt`, operation by operation."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.mix = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, time, dim]` to the same shape."""
        batch, time, dim = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, dim // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (dim // HEADS) ** 0.5
        future = torch.ones(time, time, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -1e9).softmax(-1)
        x = x + self.mix((weights @ v).transpose(1, 2).reshape(batch, time, dim))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):
    """Final norm and logits."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, time, dim]` to logits `[batch, time, vocab]`."""
        return self.logits(self.norm(x))


class Recomputed(nn.Module):
    """A block whose inside is computed again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, time, dim]` to the same shape."""
        return checkpoint(self.inner, x, use_reentrant=False)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats."""
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def read_tokens(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, `[num_microbatches, microbatch_size, time]`."""
    with np.load(case.weights) as held:
        return torch.from_numpy(held["x"]).long(), torch.from_numpy(held["y"]).long()


def layer(case: Case, index: int) -> nn.Module:
    """Layer `index` of the model, with the weights that JAX made."""
    last = case.num_blocks + 1
    made = (
        Embed(case.dim, case.time)
        if index == 0
        else Head(case.dim)
        if index == last
        else Block(case.dim)
    )
    with np.load(case.weights) as held:
        paths = [name.split("/") for name in held.files if "/" in name]
        mine = [path for path in paths if path[1].split("_")[0] == str(index)]
        made.load_state_dict(
            dict(
                _translated(NAMES[type(made).__name__], path, held["/".join(path)]) for path in mine
            )
        )
    return made


def layers(case: Case, start: int, stop: int) -> nn.Sequential:
    """Layers `start` to `stop - 1`, blocks recomputed where the case says so."""
    made = [layer(case, i) for i in range(start, stop)]
    return nn.Sequential(
        *[Recomputed(one) if case.recompute and isinstance(one, Block) else one for one in made]
    )


def plain_step(case: Case) -> Callable[[], float]:
    """One process: gradients of all microbatches summed, one update."""
    model = layers(case, 0, case.num_blocks + 2)
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    x, y = read_tokens(case)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for tokens, targets in zip(x, y, strict=True):
            loss = loss_fn(model(tokens), targets) / len(x)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def pipelined_step(case: Case) -> Callable[[], float]:
    """This rank's stages under one of torch's schedules."""
    from torch import distributed
    from torch.distributed import pipelining

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    num_stages = RANKS * case.num_chunks
    is_v = case.schedule == "ScheduleZBVZeroBubble"
    mine = [rank, num_stages - 1 - rank] if is_v else list(range(rank, num_stages, RANKS))
    stages = [
        pipelining.PipelineStage(
            layers(case, *_bounds(case, i, num_stages)), i, num_stages, torch.device("cpu")
        )
        for i in mine
    ]
    schedule = getattr(pipelining, case.schedule)(
        stages if case.num_chunks > 1 else stages[0],
        n_microbatches=case.num_microbatches,
        loss_fn=loss_fn,
    )
    optimizer = torch.optim.Adam([p for stage in stages for p in stage.submod.parameters()], **ADAM)
    x, y = (part.flatten(0, 1) for part in read_tokens(case))
    has_first, has_last = 0 in mine, num_stages - 1 in mine

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = {"target": y, "losses": losses} if has_last else {}
        schedule.step(*((x,) if has_first else ()), **given)
        optimizer.step()
        return torch.stack(losses).mean().item() if has_last else float("nan")

    return step


def _bounds(case: Case, stage: int, num_stages: int) -> tuple[int, int]:
    """The layers of a stage: equally many blocks each, embedding and head at the ends."""
    each = case.num_blocks // num_stages
    start, stop = 1 + stage * each, 1 + (stage + 1) * each
    return start - (stage == 0), stop + (stage == num_stages - 1)


def _translated(
    names: dict[str, str], path: list[str], value: np.ndarray
) -> tuple[str, torch.Tensor]:
    """A parameter's name and value in torch, from its path and value in Flax.

    The path is `layers/<index>_<class>/<part>/<leaf>`.
    """
    part, leaf = names[path[2]], path[-1]
    if leaf == "kernel":
        value = np.ascontiguousarray(value.T)
    suffix = "" if leaf == "position" else ".bias" if leaf == "bias" else ".weight"
    return part + suffix, torch.from_numpy(value)


def main() -> None:
    """Be the member that the command line names."""
    case = read_case()
    torch.set_num_threads(1)
    serve(pipelined_step(case) if case.schedule else plain_step(case))


if __name__ == "__main__":
    main()
