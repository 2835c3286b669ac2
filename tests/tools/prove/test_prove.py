"""Sound jobs are proved, and faults are refused with the layer or leaf that has them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from _covering import sweep
from _faults import OF_EXECUTOR, USER, Fault, module_of
from _models import ALL_MODELS, MICROBATCH

import jaxpipe
from jaxpipe import __main__ as command
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.layers import LayerSpec
from jaxpipe.tools.prove import Proof, _processes, main, prove, prove_peer

CONFIG = {
    "train_micro_batch_size_per_gpu": MICROBATCH,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "pipeline": {"schedule": "1f1b"},
}
SAMPLES = 8  # of a microbatch
IN_CI = (
    "tied gradients not summed",
    "not reduced over replicas",
    "residuals of the wrong slot",
    "a checkpoint read in bfloat16",
)


def numbers() -> tuple[np.ndarray, np.ndarray]:
    x, t = np.random.default_rng(0).standard_normal((2, SAMPLES, 8)).astype(np.float32)
    return x, t


def proof_of(model: str | Callable[[], Any], config: dict[str, Any], **how: Any) -> Proof:
    if callable(model):
        sizes = {"train_micro_batch_size_per_gpu": SAMPLES}
        return prove(
            model().replace(partition_method="uniform"),
            {**CONFIG, **config, **sizes},
            numbers(),
            **how,
        )
    known = ALL_MODELS[model]
    example = jax.tree.map(lambda x: x[0], known.batch(np.random.default_rng(0), 1, MICROBATCH))
    return prove(known.module(2, partition_method="uniform"), {**CONFIG, **config}, example, **how)


def test_a_sound_job_is_proved() -> None:
    found = proof_of(module_of(LayerSpec(nn.Dense, 8)), {}, quick=True)
    assert found.holds, str(found)
    assert [claim.name for claim in found.claims][:2] == ["layers", "schedule"]
    assert json.loads(found.to_json())["holds"] is True
    assert "holds" in found.to_html()
    assert "proved" in found.badge()


@pytest.mark.parametrize("fault", sweep(2, USER, rest=pytest.mark.slow), ids=str)
def test_a_users_mistake_is_refused(fault: Fault) -> None:
    with fault.patch():
        found = proof_of(fault.model, fault.config, only=("layers",))
    assert not found.holds
    assert any(fault.where in finding.where for finding in found.findings), str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    sweep(len(IN_CI), sorted(OF_EXECUTOR, key=lambda fault: fault.name not in IN_CI)),
    ids=str,
)
def test_a_fault_of_the_executor_is_refused(fault: Fault) -> None:
    with fault.patch():
        found = proof_of(fault.model, fault.config, quick=True, only=fault.only)
    assert not found.holds
    assert any(fault.where in str(finding) for finding in found.findings), str(found)


JOB = """
import flax.linen as nn, jax.numpy as jnp, numpy as np
import jaxpipe

def job():
    layers = [jaxpipe.LayerSpec(nn.Dense, 8) for _ in range(4)]
    model = jaxpipe.PipelineModule(layers, 2, loss_fn=lambda y, t: jnp.{loss}((y - t) ** 2))
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    config = {{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
              "optimizer": {{"type": "SGD", "params": {{"lr": 0.1}}}}}}
    return model, config, (x, x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "status"), sweep(0, [("sum", 1), ("mean", 0)], unpack=True))
def test_the_command(
    loss: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"job_with_{loss}"
    (tmp_path / f"{name}.py").write_text(JOB.format(loss=loss))
    monkeypatch.syspath_prepend(tmp_path)
    # The devices of the test process are simulated already.
    monkeypatch.setattr("jaxpipe.tools.prove._cli.simulate_devices", lambda number: None)
    to = tmp_path / "proof.json"
    assert main([f"{name}:job", "--quick", "--json", str(to)]) == status
    assert json.loads(to.read_text())["holds"] is (status == 0)
    assert ("proved" if status == 0 else "loss_fn") in capsys.readouterr().out


def test_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jaxpipe.tools.prove._cli.simulate_devices", lambda number: None)
    assert main(["nowhere:job"]) == 2
    assert "JOB" in capsys.readouterr().err
    assert jaxpipe.prove is prove


STEPS = """
import jax, jax.numpy as jnp, numpy as np

def steps(factor=1.0):
    w = np.random.default_rng(0).standard_normal((4, 8, 8)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32)

    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)

    def whole(w, x):
        return {"loss": loss(w, x), "grads": jax.grad(loss)(w, x)}

    def parts(w, x):
        found = [whole(w, part) for part in jnp.split(x, 4)]
        mean = jax.tree.map(lambda *xs: sum(xs) / 4, *found)
        return {**mean, "grads": factor * mean["grads"]}

    return parts, whole, (w, x)

def wrong():
    return steps(1 + 1e-9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), sweep(1, [("wrong", 1), ("steps", 0)], unpack=True))
def test_a_pipeline_written_by_hand(
    name: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "peer_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("jaxpipe.tools.prove._cli.simulate_devices", lambda number: None)
    assert main(["--peer", f"peer_steps:{name}"]) == status
    out = capsys.readouterr().out
    assert ("['grads']: differs by" in out) is (status == 1)
    assert "REFUSED      dtypes" not in out  # 1e-9 is below float32


def test_peers_must_return_the_same_tree() -> None:
    def of(result: Any) -> Any:
        return lambda x: result

    found = prove_peer(of(np.ones(2)), of(np.ones(3)), (np.ones(1),))
    assert "the same tree of shapes" in str(found)
    with pytest.raises(ConfigError, match="arguments must be a tuple"):
        prove_peer(of(1), of(1), np.ones(1))  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_the_whole_command_in_an_empty_folder(tmp_path: Path) -> None:
    """Two processes take part in it."""
    (tmp_path / "train.py").write_text(JOB.format(loss="mean"))
    command = [sys.executable, "-m", "jaxpipe", "prove", "train:job", "--devices", "8"]
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    ended = subprocess.run(
        [*command, "--html", "proof.html", "--badge"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "holds        processes" in ended.stdout
    assert "proved" in (tmp_path / "proof.html").read_text().lower()
    assert "img.shields.io" in ended.stdout


def test_ctrl_c_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(command._COMMANDS, "prove", (interrupted, ""))
    assert command.main(["prove", "train:job"]) == 130
    assert capsys.readouterr().err == "jaxpipe: interrupted\n"


def test_processes_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "_TIME_LIMIT_S", 0.5)
    begun = time.monotonic()
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert "did not end" in _processes.failure_of(hanging)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(("samples", "is_told"), [(1, True), (2, False)])
def test_an_example_of_one_sample_is_told(samples: int, *, is_told: bool) -> None:
    module = module_of(LayerSpec(nn.Dense, 8))()
    example = jax.tree.map(lambda x: x[:samples], numbers())
    found = prove(module, CONFIG, example, only=("schedule",))
    assert ("example" in found.job) is is_told


def test_a_process_cannot_be_sent_a_function() -> None:
    (claim,) = proof_of(module_of(LayerSpec(nn.Dense, 8)), {}, only=("processes",)).claims
    assert claim.not_covered is not None
    assert "Run jaxpipe prove" in claim.not_covered


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="only must name claims"):
        proof_of(module_of(LayerSpec(nn.Dense, 8)), {}, only=("number",))
    with pytest.raises(ConfigError, match="hardware"):
        proof_of(module_of(LayerSpec(nn.Dense, 8)), {}, hardware="h20:8")


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ((np.ones((0, 8)), np.ones((0, 8))), "at least one sample, but got array"),
        ((1.0, 2.0), "at least one sample, but got 1.0"),
        (np.ones((4, 8)), "must be a tuple"),
    ],
)
def test_a_wrong_example_is_refused(example: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        prove(module_of(LayerSpec(nn.Dense, 8))(), CONFIG, example)


@pytest.mark.soak
def test_what_is_not_finite_cannot_be_compared() -> None:
    def loss_fn(y: jax.Array, t: jax.Array) -> jax.Array:
        return (y * t).mean() * np.nan

    found = proof_of(module_of(LayerSpec(nn.Dense, 8), loss_fn), {}, only=("numbers", "weights"))
    assert [claim.holds for claim in found.claims] == [False, False]
    assert "is not finite in the plain program" in str(found)
