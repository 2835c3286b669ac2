"""JAX's own checker of what is equal on all devices, on the forward programs.

The library compiles with `check_vma=False`, because with True a gradient through a branch is
silently wrong (jax-ml/jax#40823). A forward program has no gradient, and JAX can check that what
its specs declare equal on all stages has been summed over them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from _covering import sweep
from _oracle import Case, evaluation
from _tolerances import assert_loss

AXES = {"stage", "data"}


def varying(tree: Any) -> Any:
    """Declare values different on all devices, which constants are not by themselves."""

    def vary(x: Any) -> Any:
        missing = AXES - set(jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(vary, tree)


@pytest.fixture
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let JAX check replication where branches and loops return the same types.

    A branch that makes zeros and one that computes differ in them, and so do a carry before its
    loop and after it. So all of them are declared to differ, and only sums make values equal.
    """
    shard_map, switch, scan = jax.shard_map, jax.lax.switch, jax.lax.scan

    def mapped(function: Callable[..., Any], **how: Any) -> Any:
        if how.get("axis_names") == AXES:
            how["check_vma"] = True
        return shard_map(function, **how)

    def switched(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        varied = [lambda *x, run=run: varying(run(*x)) for run in branches]
        return switch(index, varied, *operands)

    def scanned(body: Callable[..., Any], init: Any, xs: Any = None, **how: Any) -> Any:
        return scan(lambda carry, x: varying(body(carry, x)), varying(init), xs, **how)

    monkeypatch.setattr(jax, "shard_map", mapped)
    monkeypatch.setattr(jax.lax, "switch", switched)
    monkeypatch.setattr(jax.lax, "scan", scanned)


CASES = [
    Case(stages=2, data=2),
    Case("tuple", stages=2, data=2, schedule="interleaved"),
    Case("split_tied", stages=2, data=2),
    Case("weighted", stages=4, data=2, microbatches=5),
    Case("side", stages=2, data=2, schedule="zero-bubble"),
    Case("reports", stages=2, data=1),
    Case("shapes", stages=2, data=2, cut="front"),
]


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("case", sweep(1, CASES), ids=str)
def test_what_is_declared_equal_is(case: Case) -> None:
    pipeline = case.pipeline()
    with pytest.MonkeyPatch.context() as without_sums:
        without_sums.setattr(jax.lax, "psum", lambda x, axes: x)
        with pytest.raises(ValueError, match="out_specs"):
            pipeline.programs.measured(lambda y, t: 0.0).lower(pipeline.states.struct, case.batch())
    metrics = pipeline.evaluate(pipeline.init(), case.batch())
    assert_loss(metrics["loss"], evaluation(case.model, case.batch(), case.microbatches, case.data))
