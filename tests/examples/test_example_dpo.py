import json
import re
from typing import Any

import pytest
from _run_example import run_example


def read(printed: str) -> tuple[list[float], dict[str, Any]]:
    losses = [float(x) for x in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]
    held_out = re.findall(r"^held out, (\w+): (.*)$", printed, re.MULTILINE)
    return losses, {name: json.loads(text) for name, text in held_out}


@pytest.mark.soak
def test_four_stages_of_two_replicas_are_one_device() -> None:
    pipelined = run_example("dpo.py", "--steps", "12")
    losses, held_out = read(pipelined)
    alone, held_out_alone = read(
        run_example("dpo.py", "--steps", "12", "--stages", "1", "--replicas", "1")
    )
    assert losses[0] == pytest.approx(0.6931472, rel=1e-6)
    assert losses == pytest.approx(alone, rel=1e-6)
    assert losses[-1] < 0.65
    own, plain = map(float, re.findall(r"last batch: (\S+), on one device (\S+)", pipelined)[0])
    assert own == pytest.approx(plain, rel=1e-6)
    for name in ("trained", "ema"):
        found, wanted = held_out[name], held_out_alone[name]
        assert found["num_samples"] == 50
        assert found["metrics"]["right"] > 0.6
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.soak
def test_a_reference_of_its_own() -> None:
    printed = run_example("dpo.py", "--whole", "--steps", "6", "--stages", "2", "--rate", "3e-3")
    losses, held_out = read(printed)
    assert losses[0] == pytest.approx(0.6931472, rel=1e-6)
    assert losses[-1] < 0.3
    assert held_out["trained"]["metrics"]["right"] > 0.9
