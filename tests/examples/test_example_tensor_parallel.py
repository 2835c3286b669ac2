import re

import pytest
from _run_example import run_example


@pytest.mark.slow
def test_it_learns_and_one_device_agrees() -> None:
    printed = run_example("tensor_parallel.py")
    assert "on 2 stages x 2 replicas x 2 model ranks" in printed
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", printed, re.MULTILINE)]
    assert losses[-1] < 0.7 * losses[0]
    assert "widen/kernel: [64, 256], 128 columns on a device" in printed
    pipelined, alone = map(float, re.findall(r"next batch: (\S+), on one device (\S+)", printed)[0])
    assert abs(pipelined - alone) < 1e-5
