"""The same training in one process and in several."""

import hashlib
import socket
from pathlib import Path
from typing import Any

import _disk_store  # noqa: F401
import jax
import numpy as np
import pytest
from _covering import sweep
from _job import Job, free_port, run_job
from _layouts import Layout, own_samples, shared_engine, text_lengths, train
from _tolerances import ROUNDING, assert_loss
from safetensors.numpy import save_file

import jaxpipe
from jaxpipe.errors import LaunchError
from jaxpipe.layers import flatten_dict, unflatten_dict

JOBS = {
    "2x2-stages-across": (2, 2, {"stages": 2, "data": 2, "spread": True}),
    "2x2-replicas-across": (2, 2, {"stages": 2, "data": 2, "inside": "stage", "zero": 1}),
    "4x1": (4, 1, {"stages": 2, "data": 2, "zero": 1, "model": "norm"}),
    "2x4": (2, 4, {"stages": 4, "data": 2, "schedule": "1f1b-v"}),
    "2x2-weights-shared-out": (2, 2, {"stages": 2, "data": 1, "fsdp": 2}),
    "4x1-weights-shared-out-across": (4, 1, {"stages": 2, "data": 1, "fsdp": 2, "zero": 1}),
    "2x2-weights-shared-out-across": (2, 2, {"stages": 2, "data": 2, "inside": "stage", "zero": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(1, sorted(JOBS)))
def test_the_same_losses_and_equal_replicas(name: str, tmp_path: Path) -> None:
    processes, devices, layout = JOBS[name]
    results = run_job(
        tmp_path, processes, devices, layout, [["train", 0, 5], ["evaluate"], ["rows"], ["params"]]
    )
    alone = Layout(**{**layout, "inside": "data", "spread": False})  # on one process
    engine = alone.engine()
    wanted = train(engine, alone, range(5))
    held: dict[str, set[str]] = {}
    for losses, evaluated, rows, params in results:
        assert_loss(losses, wanted, tolerance=ROUNDING)
        assert [evaluated, params] == [results[0][1], results[0][3]]
        for row, hashes in rows.items():
            held.setdefault(row, set()).update(hashes)
    assert all(len(hashes) == 1 for hashes in held.values())
    outputs = engine.predict(next(alone.entries(51))[0])
    losses = engine.eval_batch(alone.entries(50), reduce_output=None)
    assert_loss(
        results[0][1],
        [*losses.tolist(), float(outputs.astype(float).sum())],
        tolerance=10 * ROUNDING,
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "counts"),
    sweep(
        1,
        [
            ({"stages": 2, "data": 2, "spread": True}, (7,)),
            ({"stages": 1, "data": 2}, (13, 4)),
            ({"stages": 2, "data": 1, "fsdp": 2}, (9,)),
        ],
        unpack=True,
    ),
)
def test_sets_of_samples(layout: dict[str, Any], counts: tuple[int, ...], tmp_path: Path) -> None:
    """Each process has a number of its own."""
    devices = layout["stages"] * layout["data"] * layout.get("fsdp", 1) // 2
    results = run_job(
        tmp_path,
        2,
        devices,
        layout,
        [
            ["evaluate_set", *counts],
            ["error", "evaluate_set", *[0 for _ in counts[1:]], 3],
            ["error", "evaluate_set_broken"],
            ["train", 0, 2],
        ],
    )
    engine = Layout(1, 1).engine()
    samples = [own_samples(count, seed) for seed, count in enumerate(counts)]
    tokens, labels = (np.concatenate(each) for each in zip(*samples, strict=True))
    engine.predict(tokens)
    logits = engine.module.apply(engine.module_state_dict(), tokens)
    wanted = engine.module.loss(logits, labels)
    sums = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), labels[..., None], -1)
    for shard, (found, empty, broken, losses) in enumerate(results):
        loss, num_samples, own_sums, new = found
        assert_loss(loss, wanted, tolerance=ROUNDING)
        assert num_samples == sum(counts)
        start = sum(counts[:shard]) if len(counts) > 1 else 0
        own = sums.sum((1, 2))[start : start + len(own_sums)]
        np.testing.assert_allclose(own_sums, own, rtol=1e-5)
        index = shard if len(counts) > 1 else 0
        for text, length, made in zip(
            samples[index][0], text_lengths(counts[index], index), new, strict=True
        ):
            for step, token in enumerate(made):
                so_far = np.array([[*text[:length], *made[:step]]], np.int32)
                logits = engine.module.apply(engine.module_state_dict(), so_far)
                assert token == logits[0, -1].argmax()
        if len(counts) > 1:
            assert "each process must have at least one sample" in empty[1]
        assert "the shard must be readable" in broken[1]
        assert len(losses) == 2


@pytest.mark.slow
def test_checkpoints_of_any_number_of_processes(tmp_path: Path) -> None:
    """Written by four processes, opened by two and by one, and back; each goes on alike."""
    four: dict[str, Any] = {"stages": 4, "data": 1}
    two: dict[str, Any] = {"stages": 2, "data": 2, "zero": 1}
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    written = run_job(
        tmp_path / "a", 4, 1, four, [["train", 0, 3], ["save", first], ["train", 3, 5], ["params"]]
    )
    opened = run_job(tmp_path / "b", 2, 2, two, [["load", first], ["params"], ["train", 3, 5]])
    assert opened[0][0] == [f"{first}/global_step3", {"by": 4}, 3]
    assert_loss(opened[0][2], written[0][2], tolerance=ROUNDING)
    for layout in (Layout(1, 1), Layout(4, 2, zero=1)):
        engine = shared_engine(layout)
        engine.load_checkpoint(first)
        assert_loss(train(engine, layout, range(3, 5)), written[0][2], tolerance=ROUNDING)
    engine.load_checkpoint(first)
    engine.save_checkpoint(second)
    back = run_job(tmp_path / "c", 4, 1, four, [["load", second], ["train", 3, 5], ["params"]])
    assert [back[0][1], back[0][2]] == [written[0][2], written[0][3]]
    assert set(jaxpipe.checkpoint.committed_tags(tmp_path / "first")) == {"global_step3"}


@pytest.mark.soak
def test_checkpoints_on_a_store(tmp_path: Path) -> None:
    """Written by two processes, in the background too, and opened by one and by four.

    In the memory of each process it is refused, and where the store of one fails all hear of it.
    """
    two: dict[str, Any] = {"stages": 2, "data": 1}
    path, failed = f"disk://{tmp_path}/bucket/run", f"disk://{tmp_path}/bucket/failed"
    written = run_job(
        tmp_path / "a",
        2,
        1,
        two,
        [
            ["train", 0, 1],
            ["error", "save", "memory://bucket/run"],
            ["save_in_outage", failed, True],
            ["save_in_outage", failed, False],
            ["save_often", path],
            ["train", 6, 8],
        ],
    )
    for results in written:
        assert "must be a directory that all processes see" in results[1][1]
        for told, _ in results[2:4]:
            assert "could not be written: " in told
            assert "[Errno 5] Input/output error" in told
    assert set(jaxpipe.checkpoint.committed_tags(failed)) == {"after"}
    engine = shared_engine(Layout(1, 1))
    assert engine.load_checkpoint(path)[0] == f"{path}/global_step7"
    assert_loss(train(engine, Layout(1, 1), range(6, 8)), written[0][5], tolerance=ROUNDING)
    assert jaxpipe.checkpoint.verify_checkpoint(path).num_bytes > 0
    four: dict[str, Any] = {"stages": 4, "data": 1}
    opened = run_job(tmp_path / "b", 4, 1, four, [["load", path], ["train", 6, 8]])
    assert opened[0][0][0] == f"{path}/global_step7"
    assert_loss(opened[0][1], written[0][5], tolerance=ROUNDING)


@pytest.mark.soak
def test_data_go_on_where_they_stood_with_fewer_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "kept")
    layout: dict[str, Any] = {"stages": 1, "data": 2}
    written = run_job(
        tmp_path / "a", 2, 1, layout, [["train_loader", 2], ["save", path], ["train_loader", 3]]
    )
    alone = run_job(tmp_path / "b", 1, 2, layout, [["load", path], ["train_loader", 3]])
    assert_loss(alone[0][1], written[0][2], tolerance=ROUNDING)


@pytest.mark.soak
def test_files_of_another_library_are_read_by_two_processes_or_by_none(tmp_path: Path) -> None:
    layout: dict[str, Any] = {"stages": 2, "data": 1}
    engine = Layout(**layout).engine()
    train(engine, Layout(**layout), range(1))
    changed = {path: leaf + 1 for path, leaf in flatten_dict(engine.module_state_dict()).items()}
    for name in ("good", "own0", "own1"):
        (tmp_path / name).mkdir()
        save_file(
            {".".join(path): leaf for path, leaf in changed.items()},
            tmp_path / name / "model.safetensors",
        )
    damaged = tmp_path / "own1" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    actions = [
        *(["train", 0, 1], ["load_named", str(tmp_path / "good")], ["params"]),
        *(["error", "load_named_apart", str(tmp_path / "own")], ["params"], ["train", 1, 2]),
    ]
    results = run_job(tmp_path, 2, 1, layout, actions)
    leaves = jax.tree.leaves(unflatten_dict(changed))
    wanted = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    for _, _, loaded, (kind, text), after, losses in results:
        assert loaded == after == wanted
        assert kind == "CheckpointError"
        assert "damaged" in text
        assert len(losses) == 1


@pytest.mark.slow
def test_one_process_s_mistake_is_every_process_s_error(tmp_path: Path) -> None:
    """And training goes on after it."""
    actions = [
        ["train", 0, 1],
        ["error", "train_uneven"],
        ["error", "train_misshapen"],
        ["error", "train_failing"],
        ["error", "save_tags", str(tmp_path / "tags")],
        ["error", "save_apart", str(tmp_path / "apart")],
        ["train", 1, 2],
    ]
    results = run_job(tmp_path, 2, 1, {"stages": 1, "data": 2}, actions)
    for _, uneven, misshapen, failing, tags, apart, after in results:
        assert uneven[0] == misshapen[0] == failing[0] == "DataError"
        assert "the end in process 1 and another batch in process 0" in uneven[1]
        assert "process 1: train_batch of Batch(inputs=int32[2, 2, 4]" in misshapen[1]
        assert "dtype" in failing[1]
        assert tags[0] == "CheckpointError"
        assert "process 0: 'mine0', process 1: 'mine1'" in tags[1]
        assert apart[0] == "CheckpointError"
        assert "save_dir must be a directory that all processes see" in apart[1]
        assert len(after) == 1
    assert "process 1 failed with DataError" in results[0][3][1]
    assert not (tmp_path / "tags").exists()


@pytest.mark.soak
def test_saving_beside_training(tmp_path: Path) -> None:
    path, layout = str(tmp_path / "kept"), {"stages": 2, "data": 1}
    results = run_job(tmp_path / "a", 2, 1, layout, [["save_often", path], ["train", 6, 8]])
    assert results[0] == results[1]
    assert list(jaxpipe.checkpoint.committed_tags(path)) == [
        f"global_step{step}" for step in range(1, 7)
    ]
    opened = run_job(tmp_path / "b", 2, 1, layout, [["load", path], ["train", 6, 8]])
    assert [opened[0][0][2], opened[0][1]] == [6, results[0][1]]


@pytest.mark.slow
def test_all_save_and_end_when_one_is_asked_to(tmp_path: Path) -> None:
    results = run_job(
        tmp_path, 2, 1, {"stages": 2, "data": 1}, [["preempted", str(tmp_path / "kept")]]
    )
    assert results == [[[143, 2]], [[143, 2]]]
    assert set(jaxpipe.checkpoint.committed_tags(tmp_path / "kept")) == {"global_step2"}


@pytest.mark.slow
def test_processes_of_one_replica_must_feed_the_same_samples(tmp_path: Path) -> None:
    results = run_job(tmp_path, 2, 1, {"stages": 2, "data": 1}, [["error", "train_other_samples"]])
    for ((kind, text),) in results:
        assert kind == "DataError"
        assert "different ones in process 0, 1, all of shard 0" in text


HANDSHAKE = """
import os, signal, sys
import jax, jaxpipe
from jaxpipe.distributed import handshake
from jaxpipe.topology import PipeDataParallelTopology, make_pipeline_mesh
jaxpipe.init_distributed()
mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 2))
handshake(mesh, 60)
print("all answered", flush=True)
if jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    handshake(mesh, 3)
except jaxpipe.errors.LaunchError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_link_that_does_not_answer_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 2).start([], {}, program=HANDSHAKE)
    try:
        assert job.processes[0].wait(120) == 0, job.logs()
    finally:
        job.kill()
    assert "all answered" in job.log(1)
    wanted = (
        "the links of process 0 along the mesh axis 'stage', to process 1, must answer, but got "
        "nothing for 3 s. Check"
    )
    assert wanted in job.log(0)


@pytest.mark.slow
def test_a_coordinator_that_does_not_answer() -> None:
    port = free_port()
    with pytest.raises(
        LaunchError,
        match=rf"must answer at 127.0.0.1:{port}, .*process 1 got .* for 1 s. Check that process "
        r"0 runs",
    ):
        jaxpipe.init_distributed(
            coordinator_address=f"127.0.0.1:{port}",
            num_processes=2,
            process_id=1,
            timeout=1.0,
            local_device_ids=[0],
        )


def test_a_port_that_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(
            LaunchError, match=rf"must be free on the node of process 0, but got {address}.*Choose"
        ):
            jaxpipe.init_distributed(coordinator_address=address, num_processes=2, process_id=0)


@pytest.mark.slow
def test_processes_that_do_not_make_up_the_mesh(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1).start([], {"stages": 4, "data": 1})
    codes = [process.wait(120) for process in job.processes]
    assert 0 not in codes
    for index in range(2):
        assert "jax.device_count()=2" in job.log(index) or "2 devices" in job.log(index), job.logs()


@pytest.mark.slow
def test_a_process_without_a_device_of_the_mesh(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 2).start([], {"stages": 2, "data": 1})
    codes = [process.wait(120) for process in job.processes]
    assert 0 not in codes
    said = (tmp_path / "log0").read_text()
    assert "must have a device of the mesh, but got 2 devices without one of process 1." in said, (
        job.logs()
    )
