"""What differs between the processes of a job is an error in all of them.

The error comes before the difference costs anything.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from _job import Job, run_job

import jaxpipe

REPLICAS: dict[str, Any] = {"stages": 1, "data": 2}
STAGES: dict[str, Any] = {"stages": 2, "data": 1}


@pytest.mark.slow
def test_replicas_that_differ_are_told_and_cost_no_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "kept")
    actions = [
        *(["train", 0, 1], ["save", path], ["error", "load_apart"], ["train", 1, 2], ["flip"]),
        *(["error", "save", path], ["load", path], ["train", 1, 2], ["save", path]),
    ]
    results = run_job(tmp_path, 2, 1, REPLICAS, actions)
    for _, _, apart, trained, flipped, refused, loaded, again, saved in results:
        assert apart[0] == "LayerError"
        assert "must have the same parameters, but got layers/" in apart[1]
        assert refused[0] == "CheckpointError"
        leaf = "/".join(["params", *flipped.split("/")[2:]])
        assert f"different ones of {leaf} (in process 0 and in process 1). Nothing" in refused[1], (
            flipped
        )
        assert [loaded[0], again, saved] == [f"{path}/global_step1", trained, True]
    assert set(jaxpipe.checkpoint.committed_tags(path)) == {"global_step1", "global_step2"}
    for tag in ("global_step1", "global_step2"):
        jaxpipe.checkpoint.verify_checkpoint(path, tag)


@pytest.mark.soak
def test_replicas_of_one_process_that_differ_are_told(tmp_path: Path) -> None:
    actions = [
        ["train", 0, 1],
        ["save", str(tmp_path / "a")],
        ["error", "flip_here", str(tmp_path / "a")],
    ]
    ((_, _, (kind, text)),) = run_job(tmp_path, 1, 2, REPLICAS, actions)
    assert kind == "CheckpointError"
    assert "(in process 0 and in process 0)" in text
    assert sorted(jaxpipe.checkpoint.committed_tags(tmp_path / "a")) == ["global_step1"]


@pytest.mark.soak
def test_later_batches_that_differ_within_a_replica(tmp_path: Path) -> None:
    """Each is told, and training goes on after it."""
    told = [["error", "train_other_samples", step] for step in range(1, 20)]
    actions = [
        ["train", 0, 1],
        *told,
        ["train", 1, 2],
        ["error", "predict_apart"],
        ["error", "train_or_evaluate"],
    ]
    results = run_job(tmp_path, 2, 1, STAGES, [*actions, ["error", "set_apart"], ["train", 2, 3]])
    for _, *errors, trained, predicted, evaluated, size, last in results:
        assert [kind for kind, _ in errors] == ["DataError"] * 19
        assert all("different ones in process 0, 1, all of shard 0" in text for _, text in errors)
        assert "different ones in process 0, 1, all of shard 0. Give all" in predicted[1]
        assert "process 0: train_batch of Batch" in evaluated[1]
        assert "process 1: eval_batch of Batch" in evaluated[1]
        assert size[0] == "ConfigError"
        assert "train_batch_size: 8 in process 0, 16 in process 1. Make" in size[1]
        assert len(trained) == len(last) == 1


@pytest.mark.soak
def test_one_process_reads_checkpoints_by_itself(tmp_path: Path) -> None:
    """And saving goes on after it."""
    path = str(tmp_path / "kept")
    actions = [
        ["train", 0, 1],
        ["save", path],
        ["read_alone", path],
        ["train", 1, 2],
        ["save", path],
        ["load", path],
    ]
    results = run_job(tmp_path, 2, 1, STAGES, actions)
    tag, num_leaves, is_inspected, num_files = results[0][2]
    assert [tag, is_inspected, num_files] == ["global_step1", True, 1]
    assert num_leaves > 1
    assert [each[5][2] for each in results] == [2, 2]


@pytest.mark.soak
@pytest.mark.soak
def test_a_process_whose_storage_takes_nothing_is_told_in_all(tmp_path: Path) -> None:
    """At once, or where a thread saves as soon as it has been silent for a while.

    The next save works.
    """
    path = str(tmp_path / "kept")
    outages = [["save_in_outage", path, background] for background in (False, True)]
    (_, at_once, after), (_, *others) = run_job(tmp_path, 2, 1, STAGES, [["train", 0, 1], *outages])
    for told, seconds in (at_once, after, *others):
        assert "/failed could not be written: " in told
        assert seconds < 30
    assert "process 1 failed with OSError: [Errno 5] Input/output error" in at_once[0]
    assert "process 1 has written nothing to " in after[0]
    assert list(jaxpipe.checkpoint.committed_tags(path)) == ["after"]
    jaxpipe.checkpoint.verify_checkpoint(path, "after")


@pytest.mark.soak
def test_an_error_whose_text_cannot_be_sent_or_made(tmp_path: Path) -> None:
    texts = ["\udcff", "\ud800", "none"]
    actions = [*(["error", "train_undecodable", text] for text in texts), ["train", 0, 1]]
    first, second = run_job(tmp_path, 2, 1, REPLICAS, actions)
    for text, (kind, said) in zip(texts, first[:3], strict=True):
        assert kind == "JaxpipeError"
        assert said.startswith("process 1 failed with ")
        assert (f"ValueError: no file {ascii(text)[1:-1]}" in said) == (text != "none")
    assert [kind for kind, _ in second[:3]] == ["ValueError", "ValueError", "UnprintableError"]
    assert len(first[3]) == len(second[3]) == 1


START = """
import os, sys
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
import jaxpipe
from jaxpipe.errors import JaxpipeError

jaxpipe.init_distributed()
is_first = jax.process_index() == 0
x64 = "jax_enable_x64"

def trained(
    config=None, width=8, layers=None, flag=None, optimizer=None, loss=None, rows=4, params=None,
    seed=1,
):
    more = {}
    layers = layers or [jaxpipe.LayerSpec(nn.Dense, width), nn.tanh, jaxpipe.LayerSpec(nn.Dense, 2)]
    if flag:
        before = getattr(jax.config, flag[0])
        jax.config.update(*flag)
    try:
        module = jaxpipe.PipelineModule(
            layers, topology=jaxpipe.PipeDataParallelTopology(2, 1), base_seed=seed,
            loss_fn=loss or (lambda y, t: ((y - t) ** 2).mean()),
        )
        config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, **(config or {})}
        if "optimizer" not in config:
            more["optimizer"] = optimizer or optax.adam(1e-2)
        example = tuple(jax.ShapeDtypeStruct((rows, dim), jnp.float32) for dim in (4, 2))
        if params is not None:
            params = module.init(jax.random.key(params), np.zeros((2, 4), np.float32))
        engine = jaxpipe.initialize(
            model=module, config=config, example_batch=example, model_parameters=params,
            reporter=None, **more
        )[0]
        data = iter([(np.ones((rows, 4), np.float32), np.zeros((rows, 2), np.float32))] * 2)
        return float(engine.train_batch(data))
    finally:
        if flag:
            jax.config.update(flag[0], before)

def adam(**params):
    return {"optimizer": {"type": "Adam", "params": params}}

def dense(**named):
    return [jaxpipe.LayerSpec(nn.Dense, 8, **named), nn.tanh, jaxpipe.LayerSpec(nn.Dense, 2)]

one, other = is_first, not is_first
KINDS = {
    "lr": dict(config=adam(lr=1e-2 if one else 1e-4)),
    "betas": dict(config=adam(lr=1e-2, betas=[0.9, 0.99 if one else 0.999])),
    "bf16": dict(config={"bf16": {"enabled": one}}),
    "clipping": dict(config={"gradient_clipping": 1.0 * one}),
    "accumulation": dict(config={"train_batch_size": None, "train_micro_batch_size_per_gpu": 4,
                                 "gradient_accumulation_steps": 2 if one else 4}),
    "schedule": dict(config={"pipeline": {"schedule": "1f1b" if one else "gpipe"}}),
    "bad key": dict(config={"lr": 1} if other else {}),
    "x64": dict(flag=(x64, other)),
    "precision": dict(flag=("jax_default_matmul_precision", "float32" if one else "bfloat16")),
    "keys": dict(flag=("jax_threefry_partitionable", one)),
    "width": dict(width=8 if one else 16),
    "more layers": dict(layers=[*dense(), *([] if one else [nn.tanh])]),
    "bias": dict(layers=dense(use_bias=one)),
    "seed": dict(seed=1 + one),
    "parameters": dict(params=int(one)),
    "rows": dict(config={"train_batch_size": 8 if one else 4}, rows=4 if one else 2),
    "optimizer": dict(optimizer=optax.adam(1e-2 if one else 1e-3)),
    "momentum": dict(optimizer=optax.sgd(1e-2, momentum=0.9 if one else 0.8)),
    "loss": dict(loss=lambda y, t: ((y - t) ** 2).mean() * (1 if one else 2)),
    "activation": dict(layers=[jaxpipe.LayerSpec(nn.Dense, 8),
                               lambda x: nn.tanh(x * (1 if one else 2)),
                               jaxpipe.LayerSpec(nn.Dense, 2)]),
    "kept": dict(config={"checkpoint": {"keep_last": 1 + one}}),
    # What may differ.
    "same": dict(),
    "same silence": dict(config={"csv_monitor": {"enabled": False,
                                                 "output_path": "a" if one else "b"}}),
}
for name, kind in KINDS.items():
    try:
        trained(**kind)
        print(f"TOLD {name}: nothing", flush=True)
    except JaxpipeError as error:
        print(f"TOLD {name}: {type(error).__name__} {' '.join(str(error).split())}", flush=True)
"""

WANTED = {
    "lr": "configuration, but got optimizer.params.lr: 0.01 in process 0, 0.0001 in process 1. "
    "Start all",
    "betas": "optimizer.params.betas",
    "bf16": "bf16.enabled: True in process 0, False in process 1",
    "clipping": "gradient_clipping: 1.0 in process 0, 0.0 in process 1",
    "accumulation": "gradient_accumulation_steps: 2 in process 0, 4 in process 1",
    "schedule": "pipeline.schedule: 1f1b in process 0, gpipe in process 1",
    "bad key": "lr is not a known key",
    "x64": "JAX flags, but got jax_enable_x64: False in process 0, True in process 1",
    "precision": "jax_default_matmul_precision: float32 in process 0, bfloat16 in process 1",
    "keys": "jax_threefry_partitionable",
    "width": "shapes of layers, but got params/layers/0_Dense/bias: float32[8] in process 0, "
    "float32[16] in process 1",
    "more layers": "layers, but got layers[3]: nothing in process 0, 3_tanh in process 1",
    "bias": "params/layers/0_Dense/bias: float32[8] in process 0, nothing in process 1",
    "seed": "base_seed: 2 in process 0, 1 in process 1",
    "parameters": "model_parameters, but got layers/0_Dense/kernel: float32[4, 8] with checksum",
    "rows": "example_batch: (float32[4, 4], float32[4, 2]) in process 0, "
    "(float32[2, 4], float32[2, 2]) in process 1",
    "optimizer": "must run the same program for the training step, but got in its line",
    "momentum": "must run the same program for the training step",
    "loss": "must run the same program for the training step",
    "activation": "must run the same program for the training step",
    "kept": "checkpoint.keep_last: 2 in process 0, 1 in process 1",
    "same": "nothing",
    "same silence": "nothing",
}


@pytest.mark.slow
@pytest.mark.slow
def test_processes_that_begin_otherwise_are_told(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1).start([], {}, program=START)
    codes = [process.wait(400) for process in job.processes]
    assert codes == [0, 0], job.logs()
    for index in range(2):
        said = dict(
            re.findall(
                r"^TOLD ([\w ]+): (.*)$", (tmp_path / f"log{index}").read_text(), re.MULTILINE
            )
        )
        assert said.keys() == WANTED.keys()
        for name, wanted in WANTED.items():
            assert wanted in said[name], (index, name, said[name])


MEETING = """
import os, time
import jax, jaxpipe
from jaxpipe.distributed import meet
jaxpipe.init_distributed()
meet("initialize", 60)
if jax.process_index() == 1:
    time.sleep(60)
try:
    meet("initialize", 3)
except jaxpipe.errors.LaunchError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_process_that_never_comes_is_not_waited_for_without_end(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1).start([], {}, program=MEETING)
    try:
        assert job.processes[0].wait(120) == 0, job.logs()
    finally:
        job.kill()
    wanted = (
        "all 2 processes must call initialize, but process 0 waited 3 s for the others. Look for "
        "the process that"
    )
    assert wanted in job.log(0)
