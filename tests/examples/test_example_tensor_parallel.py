import pytest
from _covering import sweep
from _run_example import check_sharded_run, run_example


@pytest.mark.soak
@pytest.mark.parametrize("flags", sweep(1, [("--sequence",), ()]), ids=["sequence", "whole"])
def test_it_learns_and_one_device_agrees(flags: tuple[str, ...]) -> None:
    printed = run_example("tensor_parallel.py", *flags)
    assert "on 2 stages x 2 replicas x 2 model ranks" in printed
    check_sharded_run(printed, 0.3)
