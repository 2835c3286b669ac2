import re

import pytest
from _run_example import run_example


@pytest.mark.slow
def test_the_schedule_is_proved_and_trains_as_1f1b_does() -> None:
    printed = run_example("custom_schedule.py")
    assert "stage 0  F0  F1  F2  F3  .   .   .   .   B3  B2  B1  B0\n" in printed
    assert printed.index("finds it sound") < printed.index(
        "refuses it: SendGrad of micro_batch_id=3 on stage=1 must"
    )
    assert re.search(r"^stage 1 .*\[B2\]", printed, re.MULTILINE)
    losses = [
        (float(own), float(default))
        for own, default in re.findall(r"loss (\S+) with \w+, (\S+) with", printed)
    ]
    assert len(losses) == 5
    assert losses[-1][0] < losses[0][0]
    assert float(re.findall(r"largest difference: (\S+)", printed)[0]) < 1e-6
