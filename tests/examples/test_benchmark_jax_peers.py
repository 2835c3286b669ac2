import pytest
from _run_example import run_benchmark


@pytest.mark.soak
def test_all_pipelines_train_alike() -> None:
    table = [line for line in run_benchmark("jax_peers", "--smoke").splitlines() if "|" in line]
    # Title and rule, then jaxpipe and four forms, with and without recompute; the benchmark
    # compares the losses.
    assert len(table) == 2 + 10
