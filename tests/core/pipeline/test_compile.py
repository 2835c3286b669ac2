"""The step is compiled once, and its program does not grow with the number of microbatches."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import MODELS, Block, Embed, Head, cross_entropy
from _oracle import Case, make_batch
from _settings import make_settings

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule, initialize
from jaxpipe.topology import make_pipeline_mesh

SGD = optax.sgd(0.1, momentum=0.9)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the functions that XLA compiles while the test runs."""
    names: list[str] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(stages=2, data=2, cut="trunk", optimizer=SGD),
            Case(stages=1, optimizer=SGD),
            Case(stages=4, model="tied", optimizer=SGD),
            Case(stages=2, model="side", optimizer=SGD),
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize("on_device", sweep(1, [True, False]), ids=["device", "host"])
def test_the_functional_step_is_compiled_once(
    case: Case, on_device: bool, compiled: list[str]
) -> None:
    pipeline = case.pipeline()

    def batch(seed: int) -> Any:
        return pipeline.batches.place(case.batch(seed)) if on_device else case.batch(seed)

    state, _ = pipeline.step(pipeline.init(), batch(0))
    tree = pipeline.params_tree(state.params)
    assert compiled
    compiled.clear()
    for seed in range(1, 4):
        state, metrics = pipeline.step(state, batch(seed))
        float(metrics["loss"])
    state, _ = pipeline.step(pipeline.states.replace(state, params=tree), batch(5))
    assert compiled == []
    state, _ = pipeline.step(pipeline.states.init_from(tree), batch(6))
    pipeline.step(pipeline.init(), batch(7))
    assert not any("checked" in name for name in compiled)


@pytest.mark.slow
def test_evaluation_between_steps_compiles_nothing_more(compiled: list[str]) -> None:
    case = Case(stages=2, optimizer=SGD)
    pipeline = case.pipeline()
    state = pipeline.init()
    pipeline.evaluate(state, case.batch())
    state, _ = pipeline.step(state, case.batch())
    compiled.clear()
    for seed in range(3):
        pipeline.evaluate(state, case.batch(seed=seed))
        state, _ = pipeline.step(state, case.batch(seed=seed))
    assert compiled == []


def test_the_engine_compiles_once(compiled: list[str]) -> None:
    model = MODELS["linen"]
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    engine, *_ = initialize(model=model.module(4), optimizer=SGD, config=config)

    def entries(seed: int) -> Any:
        batch = make_batch(model, 3, 2, seed)
        return iter([jax.tree.map(lambda x, m=m: x[m], batch) for m in range(3)])

    engine.train_batch(entries(0))
    engine.eval_batch(entries(0))
    saved = engine.module_state_dict()
    compiled.clear()
    engine.train_batch(entries(1))
    engine.eval_batch(entries(1))
    for dtype in (np.float32, np.float64, np.float16):
        engine.load_module_state_dict(jax.tree.map(lambda x, d=dtype: x.astype(d), saved))
        engine.train_batch(entries(2))
    assert compiled == []


def hlo_size(case: Case) -> int:
    pipeline = case.pipeline()
    text = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile().as_text()
    return sum(" = " in line for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", sweep(1, ["1f1b", "gpipe", "train", "interleaved", "zero-bubble", "split"])
)
def test_the_program_does_not_grow_with_microbatches(schedule: str) -> None:
    few, many = (hlo_size(Case(stages=4, microbatches=m, schedule=schedule)) for m in (16, 64))
    assert many <= 1.05 * few


def test_a_scanned_trunk_does_not_grow_with_depth() -> None:
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1))
    entry = jax.tree.map(lambda x: x[0], Case().batch())

    def products(blocks: int) -> int:
        layers = [LayerSpec(Embed), *[LayerSpec(Block) for _ in range(2 * blocks)], LayerSpec(Head)]
        module = PipelineModule(
            layers, num_stages=2, loss_fn=cross_entropy, partition_method="trunk"
        )
        pipeline = Pipeline(module, SGD, mesh, entry, 3, make_settings(scan_trunk=True))
        jaxpr = jax.make_jaxpr(pipeline.gradients)(pipeline.states.struct, pipeline.batches.struct)
        return str(jaxpr).count("dot_general")

    assert products(2) == products(6)


LOWER = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import jax
jax.config.update("jax_num_cpu_devices", 8)
from _oracle import Case
for case in (
    Case(model="tied", stages=2, data=2),
    Case(model="attention", stages=2, schedule="zero-bubble"),
):
    pipeline = case.pipeline()
    text = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).as_text()
    print(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.slow
def test_every_process_lowers_the_same_program() -> None:
    """Whatever the order of its sets.

    Processes of one job must agree, and a cache of programs must be hit.
    """
    script = LOWER.format(tests=str(Path(__file__).parents[2]))
    texts = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.split()
        for seed in ("0", "1", "2")
    ]
    assert len(texts[0]) == 2
    assert texts[0] == texts[1] == texts[2]
