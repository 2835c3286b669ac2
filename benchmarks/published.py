"""How near to measured steps and memory does `jaxpipe.plan` come?

`published.csv` has runs of Megatron-LM, its relatives and FSDP on A100s and H100s, as their papers
and repositories print them, with the sizes that a job needs. Each is planned as the same job here:
the model, the cut, the schedule, the axes, the recompute. They are runs of other programs, so that
a part of each difference is theirs: overlapped collectives, another order of 1F1B, sums of
gradients in half precision, and kernels of 2021. Two schedules of one job share most of it. ZB-1p
is `zero-bubble-h1` here, and ZB-2p `zero-bubble`.

Expected before the first run: steps from .6 to 1 of the measured ones with the optimistic shares,
ratios of schedules within 5 %, memory within 20 %.

Run: JAX_PLATFORMS=cpu python -m benchmarks.published [--only zb] [--rows]
"""

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp

import jaxpipe
from benchmarks._table import print_head, print_row
from jaxpipe import DeepSpeedTransformerLayer, LayerSpec
from jaxpipe.errors import JaxpipeError
from jaxpipe.forecast import Forecast
from jaxpipe.models import GPT2Config, LlamaConfig, gpt2, llama


@dataclass(frozen=True)
class Run:
    """A published run; the columns of `published.csv`.

    Attributes:
        chunks: Virtual stages of a device.
        data: Replicas.
        zero: The stage of ZeRO; 3 is FSDP.
        recompute: Whether each layer is recomputed.
        attention: "flash", or "plain" with the scores in memory.
        split_vocabulary: 1 if the stages share embedding and head, "best" for a cut by time.
        step_s: Seconds of a step.
        peak_gb: GB of the fullest device, NaN if unknown.
    """

    run: str
    reference: str
    gpu: str
    gpus: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    gated: int
    vocab: int
    seq: int
    stages: int
    chunks: int
    schedule: str
    data: int
    zero: int
    micro: int
    batch: int
    recompute: int
    dtype: str
    attention: str
    split_vocabulary: str
    step_s: float
    peak_gb: float

    @classmethod
    def of(cls, row: dict[str, str]) -> Self:
        """Read a row."""
        kinds: dict[str, Any] = {each.name: each.type for each in fields(cls)}
        return cls(**{name: kind(row[name] or "nan") for name, kind in kinds.items()})

    @property
    def job(self) -> Self:
        """What the schedules of one job have in common."""
        return replace(
            self, run="", schedule="", chunks=0, split_vocabulary="", step_s=0.0, peak_gb=0.0
        )

    def specs(self) -> list[LayerSpec]:
        """The model."""
        if self.gated:
            return llama(
                LlamaConfig(
                    vocab_size=self.vocab,
                    hidden_size=self.hidden,
                    intermediate_size=self.ffn,
                    num_hidden_layers=self.layers,
                    num_attention_heads=self.heads,
                    num_key_value_heads=self.kv_heads,
                )
            )
        config = GPT2Config(
            vocab_size=self.vocab,
            n_positions=self.seq,
            n_embd=self.hidden,
            n_layer=self.layers,
            n_head=self.heads,
            n_inner=self.ffn,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            # Megatron's first and last stage each have a copy of tied weights.
            tie_word_embeddings=self.stages == 1,
        )
        embedding, positions, *_, norm, head = gpt2(config)
        kernel = "xla" if self.attention == "plain" else "auto"
        sizes = replace(config.block(), attention=kernel)
        block = LayerSpec(DeepSpeedTransformerLayer, sizes).causal()
        return [embedding, positions, *([block] * self.layers), norm, head]

    def cut(self) -> Any:
        """The boundaries of equal parts; if need be, embedding and head count as a layer each."""
        parts = self.stages * self.chunks
        if self.split_vocabulary == "best" or parts == 1:
            return "best"
        before = len(self.specs()) - self.layers - 2
        counts = [self.layers // parts] * parts
        if self.layers % parts:
            counts = [-(-(self.layers + 2) // parts)] * parts
            counts[0] -= 1
            counts[-1] -= sum(counts) - self.layers
        if min(counts) < 1:
            return "best"
        counts[0] += before
        counts[-1] += 2
        return [0, *accumulate(counts)]

    def plan(self, assume: str) -> Forecast:
        """Forecast the step of the same job."""
        model = jaxpipe.PipelineModule(
            self.specs(),
            topology=jaxpipe.PipeDataParallelTopology(num_pp=self.stages, num_dp=self.data),
            loss_fn=jaxpipe.losses.cross_entropy,
            activation_checkpoint_interval=self.recompute,
        )
        section: dict[str, Any] = {"schedule": self.schedule}
        section["split_vocabulary"] = self.split_vocabulary == "1"
        if self.chunks > 1:
            section["num_chunks"] = self.chunks
        config = {
            "train_micro_batch_size_per_gpu": self.micro,
            "train_batch_size": self.batch,
            "pipeline": section,
            "zero_optimization": {"stage": self.zero},
            self.dtype: {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        tokens = jax.ShapeDtypeStruct((self.micro, self.seq), jnp.int32)
        found = jaxpipe.plan(
            model,
            config,
            (tokens, tokens),
            f"{self.gpu}:{self.gpus}",
            schedules=[self.schedule],
            num_chunks=[self.chunks],
            partition=[self.cut()],
            recompute=[self.recompute],
            assume=assume,
            alternatives=False,
        )
        return found.shown


def main() -> None:
    """Plan the runs, and print what is forecast beside what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="runs whose names begin with this")
    parser.add_argument("--rows", action="store_true", help="print each run too")
    args = parser.parse_args()
    with Path(__file__).with_name("published.csv").open() as file:
        runs = [Run.of(row) for row in csv.DictReader(file) if row["run"].startswith(args.only)]
    found = dict[Run, dict[str, Forecast]]()
    if args.rows:
        print_head("run", "step s", "optimistic", "fair", "GB", "plan GB")
    with jax.numpy_rank_promotion("allow"):
        for run in runs:
            try:
                plans = {assume: run.plan(assume) for assume in ("optimistic", "fair")}
            except JaxpipeError as error:
                print(f"{run.run}: {error}")
                continue
            found[run] = plans
            if args.rows:
                steps = [f"{one.step_s / run.step_s:.2f}" for one in plans.values()]
                memory = f"{plans['fair'].memory.total / 1e9:.1f}"
                print_row(run.run, run.step_s, *steps, run.peak_gb, memory)
    _print_groups(found)
    _print_pairs(found)


def _print_groups(found: dict[Run, dict[str, Forecast]]) -> None:
    groups = defaultdict[str, list[Run]](list)
    for run in found:
        groups[run.reference].append(run)
    print_head(
        "runs of",
        "number",
        "step, optimistic",
        "step, fair",
        "memory",
    )
    for name, runs in groups.items():
        columns = [
            _spread([found[run][assume].step_s / run.step_s for run in runs])
            for assume in ("optimistic", "fair")
        ]
        memory = [
            found[run]["fair"].memory.total / 1e9 / run.peak_gb for run in runs if run.peak_gb > 0
        ]
        print_row(name, len(runs), *columns, _spread(memory))


def _print_pairs(found: dict[Run, dict[str, Forecast]]) -> None:
    jobs = defaultdict[Run, list[Run]](list)
    for run in found:
        jobs[run.job].append(run)
    ratios = defaultdict[str, list[tuple[float, float]]](list)
    for runs in jobs.values():
        for name, one, other in _pairs(runs):
            measured = one.step_s / other.step_s
            forecast = found[one]["fair"].step_s / found[other]["fair"].step_s
            ratios[name].append((measured, forecast))
    print_head(
        "step against that of the same job with 1f1b",
        "pairs",
        "measured",
        "forecast",
        "forecast / measured",
    )
    for name, pairs in ratios.items():
        measured, forecast = zip(*pairs, strict=True)
        print_row(
            name,
            len(pairs),
            _spread(measured),
            _spread(forecast),
            _spread([b / a for a, b in pairs]),
        )


def _pairs(runs: Sequence[Run]) -> Iterator[tuple[str, Run, Run]]:
    base = [run for run in runs if run.schedule == "1f1b" and run.split_vocabulary == "0"]
    for run in runs:
        for other in base[:1]:
            if run is not other:
                cut = {"0": "", "1": ", split vocabulary", "best": ", best cut"}[
                    run.split_vocabulary
                ]
                yield run.schedule + cut, run, other


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
