"""What is read of a compiled step's loops."""

import pytest

from jaxpipe.programs.compiled import Module, StepReading, read_step

AXES = {"stage": 2, "data": 2}
STAGES = "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}"


def program(body: str, branch: str = "%b.0") -> Module:
    """A loop over 8 ticks, with a conditional whose first branch sums over some devices."""
    return Module(
        f"""HloModule step

%some (p: f32[4,4]) -> f32[4,4] {{
  %p = f32[4,4]{{1,0}} parameter(0)
  ROOT %all-reduce.9 = f32[4,4]{{1,0}} all-reduce(%p), replica_groups={branch}
}}

%none (p: f32[4,4]) -> f32[4,4] {{
  ROOT %p = f32[4,4]{{1,0}} parameter(0)
}}

%condition (c: f32[4,4]) -> pred[] {{
  ROOT %c = pred[] parameter(0)
}}

%body (b.0: f32[4,4]) -> f32[4,4] {{
  %b.0 = f32[4,4]{{1,0}} parameter(0)
{body}
  ROOT %end = f32[4,4]{{1,0}} conditional(%i, %b.0, %b.0), branch_computations={{%some, %none}}
}}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0)
  ROOT %while = f32[4,4]{{1,0}} while(%x), condition=%condition, body=%body, \\
backend_config={{"known_trip_count":{{"n":"8"}}}}
}}
""".replace("\\\n", "")
    )


START = f"  %s = f32[4,4]{{1,0}} collective-permute-start(%b.0), {STAGES}"
DOT = "  %d = f32[4,4]{1,0} dot(%b.0, %b.0), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
DONE = "  %e = f32[4,4]{1,0} collective-permute-done(%s)"
SUM = "  %r = f32[4,4]{1,0} all-reduce-start(%b.0), replica_groups={{0,1},{2,3}}"
SUMMED = "  %t = f32[4,4]{1,0} all-reduce-done(%r)"
INSIDE = "{{0,1},{2,3}}"


def read(*lines: str, branch: str = INSIDE) -> StepReading:
    return read_step(program("\n".join(lines), branch), AXES)


def test_an_exchange_under_a_product() -> None:
    found = read(START, DOT, DONE)
    assert (found.num_collectives, found.alone, found.overlapping) == (1, (), ())
    assert found.host_waits is None


def test_an_exchange_alone_is_listed() -> None:
    assert read(START, DONE, DOT).alone == ("collective-permute of 4 devices",)


def test_two_communicators_on_their_way_at_once() -> None:
    found = read(START, SUM, DOT, SUMMED, DONE)
    assert found.overlapping == ("collective-permute of 4 devices with all-reduce of 2 devices",)


@pytest.mark.parametrize("branch", ["{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "{}"])
def test_a_collective_of_several_stages_in_one_branch(branch: str) -> None:
    (text,) = read(START, DOT, DONE, branch=branch).divergent
    assert "all-reduce all-reduce.9 in the conditional end" in text


@pytest.mark.parametrize("branch", [INSIDE, "[2,2]<=[4]"])
def test_a_collective_inside_a_stage_may_be_in_a_branch(branch: str) -> None:
    assert read(START, DOT, DONE, branch=branch).divergent == ()
