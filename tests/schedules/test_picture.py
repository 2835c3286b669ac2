"""Pictures and traces of schedules hold every action once, at the times of the simulation."""

import importlib
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    ForwardPass,
    InferenceSchedule,
    OneFOneBSchedule,
    bubble_fraction,
    draw,
    lower_schedule,
    makespan,
    resolve_schedule,
    schedule_names,
    timeline,
    trace_of,
)

S, M = 4, 6
KINDS = {
    ForwardPass: "forward",
    BackwardPass: "backward",
    BackwardInput: "input gradient",
    BackwardWeight: "weight gradient",
}


def counts(name: str) -> Counter[tuple[int, str]]:
    """Actions by stage and kind, from the schedule's own instructions."""
    kind = resolve_schedule(name)
    stages = [kind(M, S, stage) for stage in range(S)]
    ops = [(one.stage_id, op) for one in stages for commands in one for op in commands]
    return Counter((stage, KINDS[type(op)]) for stage, op in ops if type(op) in KINDS)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("lockstep", [True, False])
def test_a_timeline_is_the_schedule_to_scale(name: str, lockstep: bool) -> None:
    program = lower_schedule(name, M, S)
    slices = timeline(program, 1.0, 3.0, weight_s=1.0, lockstep=lockstep)
    assert Counter((one.stage, one.kind) for one in slices) == counts(name)
    span = makespan(program, 1.0, 3.0, weight_s=1.0, lockstep=lockstep)
    assert max(one.end_s for one in slices) == pytest.approx(span)
    assert sum(one.end_s - one.start_s for one in slices) == pytest.approx(S * M * 4.0)
    for stage in range(S):
        own = sorted((one.start_s, one.end_s) for one in slices if one.stage == stage)
        assert all(
            before[1] <= after[0] + 1e-9 for before, after in zip(own, own[1:], strict=False)
        )
    ends = {
        (one.kind == "forward", one.part, one.microbatch): one.end_s
        for one in slices
        if "weight" not in one.kind
    }
    for one in slices:
        if one.kind == "forward" and one.part:
            assert ends[True, one.part - 1, one.microbatch] <= one.start_s + 1e-9


@pytest.mark.parametrize("name", schedule_names())
def test_a_trace_has_as_many_slices_a_stage_and_kind_as_the_schedule(name: str) -> None:
    slices = timeline(lower_schedule(name, M, S), 1e-3, 2e-3)
    trace = json.loads(json.dumps(trace_of({"planned": slices, "measured": slices[:1]})))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    found = Counter(
        (names[event["pid"], event["tid"]], event["cat"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == 1
    )
    assert found == {(f"stage {stage}", kind): n for (stage, kind), n in counts(name).items()}
    last = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert last == pytest.approx(1e6 * max(one.end_s for one in slices))


@pytest.mark.parametrize("name", schedule_names())
def test_a_picture_has_every_action(name: str) -> None:
    picture = draw(name, M, S)
    root = ET.fromstring(picture.svg())
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(set(titles)) == sum(counts(name).values())
    idle = bubble_fraction(lower_schedule(name, M, S), 1.0, 2.0)
    assert (
        picture.title
        == f"{resolve_schedule(name).__name__}: {M} microbatches on {S} stages, {idle:.1%} idle"
    )
    assert picture._repr_svg_() == picture.svg()


def test_actions_fill_the_width_and_have_their_number_where_it_fits() -> None:
    """A forward is 1000 / 66 = 15.2 pixels wide: enough for one digit, not for two."""
    num_microbatches = 22
    root = ET.fromstring(draw("1f1b", num_microbatches, 1).svg())
    rects = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if len(one)]
    starts = [float(one.attrib["x"]) for one in rects]
    stops = [x + float(one.attrib["width"]) for x, one in zip(starts, rects, strict=True)]
    assert (min(starts), max(stops)) == (64, pytest.approx(1064, abs=0.02))
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    numbers = Counter(text for text in texts if text and text.isdecimal())
    assert numbers == {str(m): 2 if m < 10 else 1 for m in range(num_microbatches)}


def test_actions_lie_on_the_lane_of_their_stage() -> None:
    root = ET.fromstring(draw("1f1b", M, S).svg())
    rects = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    lanes = [float(one.attrib["y"]) for one in rects if one.get("class") == "jaxpipe-lane"]
    found = {
        (int(re.findall(r"on stage (\d+)", one[0].text or "")[0]), float(one.attrib["y"]))
        for one in rects
        if len(one)
    }
    assert sorted(found) == list(enumerate(lanes))
    assert all(y + float(rects[-1].attrib["height"]) < after for y, after in pairwise(lanes))


def test_what_may_be_drawn() -> None:
    program = lower_schedule("1f1b", M, S)
    stages = [OneFOneBSchedule(M, S, stage) for stage in range(S)]
    assert draw(program).svg() == draw(stages).svg() == draw(OneFOneBSchedule, M, S).svg()
    assert draw("1f1b", 1, 1).span_s == 3.0
    forwards = draw(InferenceSchedule, M, S, training=False)
    assert forwards.span_s == M + S - 1
    assert "backward" not in forwards.svg()
    assert (
        draw(
            "zero-bubble", M, S, forward_s=2.0, backward_s=4.0, weight_s=2.0, lockstep=False
        ).span_s
        < 6 * M + 18
    )
    with pytest.raises(
        ScheduleError, match=r"got num_microbatches=None, num_stages=None\. Pass both"
    ):
        draw("1f1b")
    with pytest.raises(ScheduleError, match=r"must not be negative.*forward_s=-1"):
        draw("1f1b", M, S, forward_s=-1)


def test_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = draw("zero-bubble-v", M, S)
    picture.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == picture.svg()
    with pytest.raises(
        ScheduleError, match=r"ending with \.svg or \.png, but got path='a\.gif'\. Add one"
    ):
        picture.save("a.gif")
    monkeypatch.setattr(importlib, "import_module", _no_module)
    with pytest.raises(
        ScheduleError,
        match=r"matplotlib must be installed.*path=.*b\.png.*pip install 'jaxpipe\[plots",
    ):
        picture.save(tmp_path / "b.png")


def _no_module(name: str) -> None:
    raise ImportError(name)


def test_a_png_has_the_bars_and_numbers_of_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = MagicMock()
    monkeypatch.setattr(importlib, "import_module", lambda name: matplotlib)
    picture = draw("zero-bubble-v", M, S)
    picture.save(tmp_path / "a.png")
    axes = matplotlib.Figure.return_value.subplots.return_value
    bars = [(*call.args, call.kwargs["left"]) for call in axes.barh.call_args_list]
    numbers = [call.args for call in axes.text.call_args_list]
    slices = picture.slices
    assert sorted(bars) == sorted((x.stage, x.end_s - x.start_s, x.start_s) for x in slices)
    middles = [((x.start_s + x.end_s) / 2, x.stage, str(x.microbatch)) for x in slices]
    assert sorted(numbers) == sorted(middles)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw("zero-bubble-v", M, S).save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
