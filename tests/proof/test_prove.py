"""Sound jobs are proved, and faults are refused with the layer or leaf that has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from _faults import OF_EXECUTOR, USER, Fault, module_of
from _models import ALL_MODELS, MICROBATCH

import jaxpipe
from jaxpipe.layers import LayerSpec
from jaxpipe.proof import Proof, main, prove

CONFIG = {
    "train_micro_batch_size_per_gpu": MICROBATCH,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "pipeline": {"schedule": "1f1b"},
}
SAMPLES = 8
SAMPLE = ("a mean twice too large", "keys by stage", "tied gradients not summed")


def numbers() -> tuple[np.ndarray, np.ndarray]:
    x, t = np.random.default_rng(0).standard_normal((2, SAMPLES, 8)).astype(np.float32)
    return x, t


def proof_of(model: str | Callable[[], Any], config: dict[str, Any], **how: Any) -> Proof:
    if callable(model):
        sizes = {"train_micro_batch_size_per_gpu": SAMPLES}
        return prove(model(), {**CONFIG, **config, **sizes}, numbers(), **how)
    known = ALL_MODELS[model]
    example = jax.tree.map(lambda x: x[0], known.batch(np.random.default_rng(0), 1, MICROBATCH))
    return prove(known.module(2), {**CONFIG, **config}, example, **how)


def test_a_sound_job_is_proved() -> None:
    found = proof_of(module_of(LayerSpec(nn.Dense, 8)), {}, quick=True)
    assert found.holds, str(found)
    assert [claim.name for claim in found.claims][:2] == ["layers", "schedule"]
    assert json.loads(found.to_json())["holds"] is True
    assert "holds" in found.to_html()
    assert "proved" in found.badge()


@pytest.mark.parametrize("fault", USER, ids=str)
def test_a_users_mistake_is_refused(fault: Fault) -> None:
    with fault.patch():
        found = proof_of(fault.model, fault.config, only=("layers",))
    assert not found.holds
    assert any(fault.where in finding.where for finding in found.findings), str(found)


def is_in_sample(fault: Fault) -> bool:
    return fault.name in SAMPLE


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault,
            marks=pytest.mark.slow if is_in_sample(fault) else pytest.mark.soak,
            id=str(fault),
        )
        for fault in OF_EXECUTOR
    ],
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


@pytest.mark.parametrize(("loss", "status"), [("mean", 0), ("sum", 1)])
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
    monkeypatch.setattr("jaxpipe.proof._cli.simulate_devices", lambda number: None)
    to = tmp_path / "proof.json"
    assert main([f"{name}:job", "--quick", "--json", str(to)]) == status
    assert json.loads(to.read_text())["holds"] is (status == 0)
    assert ("proved" if status == 0 else "loss_fn") in capsys.readouterr().out


def test_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jaxpipe.proof._cli.simulate_devices", lambda number: None)
    assert main(["nowhere:job"]) == 2
    assert "JOB" in capsys.readouterr().err
    assert jaxpipe.prove is prove
