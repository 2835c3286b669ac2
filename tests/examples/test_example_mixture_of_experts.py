import re

import pytest
from _run_example import run_example


@pytest.mark.slow
def test_experts_learn_on_their_ranks_and_one_device_agrees() -> None:
    printed = run_example("mixture_of_experts.py")
    assert "on 2 stages x 2 replicas x 2 expert ranks" in printed
    assert int(re.findall(r"exchanges among experts in the compiled step: (\d+)", printed)[0]) > 0
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", printed, re.MULTILINE)]
    assert losses[-1] < 0.7 * losses[0]
    whole, first = (
        int(n.replace(",", "")) for n in re.findall(r"parameters: (\S+) of the model, (\S+) on", printed)[0]
    )
    assert whole / 4 < first < 0.35 * whole
    pipelined, alone = map(float, re.findall(r"first batch: (\S+), on one device (\S+)", printed)[0])
    assert abs(pipelined - alone) < 1e-5
