import re

import pytest
from _run_example import check_sharded_run, run_example


@pytest.mark.soak
def test_experts_learn_on_their_ranks_and_one_device_agrees() -> None:
    printed = run_example("mixture_of_experts.py")
    assert "on 2 stages x 2 replicas x 2 expert ranks" in printed
    assert int(re.findall(r"exchanges among experts in the compiled step: (\d+)", printed)[0]) > 0
    check_sharded_run(printed, 0.35)
