import re

import pytest
from _run_example import run_example


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--sequence",)], ids=["whole", "sequence"])
def test_it_learns_and_one_device_agrees(flags: tuple[str, ...]) -> None:
    printed = run_example("tensor_parallel.py", *flags)
    assert "on 2 stages x 2 replicas x 2 model ranks" in printed
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", printed, re.MULTILINE)]
    assert losses[-1] < 0.7 * losses[0]
    whole, first = (
        int(n.replace(",", "")) for n in re.findall(r"parameters: (\S+) of the model, (\S+) on", printed)[0]
    )
    assert whole / 4 < first < 0.3 * whole
    pipelined, alone = map(float, re.findall(r"next batch: (\S+), on one device (\S+)", printed)[0])
    assert abs(pipelined - alone) < 1e-5
