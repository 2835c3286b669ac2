"""Instruction lists against listings written by hand."""

import re

import pytest

from jaxpipe.schedules import (
    DataParallelSchedule,
    GPipeSchedule,
    InferenceSchedule,
    OneFOneBSchedule,
    PipeSchedule,
    TrainSchedule,
)

SHORT = {
    "LoadMicroBatch": "L",
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "SA",
    "RecvActivation": "RA",
    "SendGrad": "SG",
    "RecvGrad": "RG",
    "ReduceTiedGrads": "RTG",
    "ReduceGrads": "RDG",
    "OptimizerStep": "OPT",
}


def listing(schedule: PipeSchedule) -> str:
    steps = [
        " ".join(f"{SHORT[op.name]}{op.kwargs.get('buffer_id', '')}" for op in step)
        for step in schedule
    ]
    return " | ".join(step or "-" for step in steps)


LISTINGS = [
    (
        TrainSchedule,
        4,
        2,
        [
            "L0 F0 | SA0 | L1 F1 | RG0 SA1 B0 | L0 F0 | RG1 SA0 B1 | L1 F1 | RG0 SA1 B0 | - | RG1 "
            "B1 RTG RDG OPT",
            "- | RA0 L0 F0 | B0 | SG0 RA1 L1 F1 | B1 | SG1 RA0 L0 F0 | B0 | SG0 RA1 L1 F1 | B1 | "
            "SG1 RTG RDG OPT",
        ],
    ),
    (TrainSchedule, 2, 1, ["L0 F0 | B0 | L1 F1 | B1 RTG RDG OPT"]),
    (
        TrainSchedule,
        1,
        3,
        [
            "L0 F0 | SA0 | - | - | - | RG0 B0 RTG RDG OPT",
            "- | RA0 F0 | SA0 | - | RG0 B0 | SG0 RTG RDG OPT",
            "- | - | RA0 L0 F0 | B0 | SG0 | RTG RDG OPT",
        ],
    ),
    (
        InferenceSchedule,
        3,
        3,
        [
            "L0 F0 | L1 SA0 F1 | L0 SA1 F0 | SA0 | -",
            "- | RA0 F0 | RA1 SA0 F1 | RA0 SA1 F0 | SA0",
            "- | - | L0 RA0 F0 | L1 RA1 F1 | L0 RA0 F0",
        ],
    ),
    (DataParallelSchedule, 2, 1, ["L0 F0 B0 | L0 F0 B0 RDG OPT"]),
    (
        OneFOneBSchedule,
        4,
        3,
        [
            "L0 F0 | SA0 L1 F1 | SA1 L2 F2 | SA2 L3 F3 | RG0 SA3 B0 | RG1 B1 | RG2 B2 | RG3 B3 RTG "
            "RDG OPT",
            "- | RA0 F0 | RA1 SA0 F1 | RA2 RG0 SA1 F2 B0 | SG0 RA0 RG1 SA2 F0 B1 | SG1 RG2 SA0 B2 "
            "| SG2 RG0 B0 | SG0 RTG RDG OPT",
            "- | - | RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 | SG0 | "
            "RTG RDG OPT",
        ],
    ),
    (
        GPipeSchedule,
        2,
        2,
        [
            "L0 F0 | SA0 L1 F1 | SA1 | - | RG0 B0 | RG1 B1 RTG RDG OPT",
            "- | RA0 L0 F0 | RA1 L1 F1 | B0 | SG0 B1 | SG1 RTG RDG OPT",
        ],
    ),
]


@pytest.mark.parametrize(
    ("kind", "num_microbatches", "num_stages", "expected"),
    LISTINGS,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_listing(
    kind: type[PipeSchedule], num_microbatches: int, num_stages: int, expected: list[str]
) -> None:
    assert [
        listing(kind(num_microbatches, num_stages, stage)) for stage in range(num_stages)
    ] == expected


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_train_schedule_times(num_stages: int) -> None:
    for num_microbatches in range(1, 11):
        for stage in range(num_stages):
            steps = listing(TrainSchedule(num_microbatches, num_stages, stage)).split(" | ")
            assert len(steps) == 2 * (num_microbatches + num_stages - 1)
            forwards = [step for step, text in enumerate(steps) if re.search(r"\bF\d", text)]
            backwards = [step for step, text in enumerate(steps) if re.search(r"\bB\d", text)]
            assert forwards == [stage + 2 * m for m in range(num_microbatches)]
            assert backwards == [2 * (num_stages + m) - stage - 1 for m in range(num_microbatches)]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_combined_and_gpipe_times(num_stages: int) -> None:
    for num_microbatches in range(1, 11):
        for stage in range(num_stages):
            for kind, length, turn in (
                (
                    OneFOneBSchedule,
                    num_microbatches + 2 * num_stages - 2,
                    2 * (num_stages - 1) - stage,
                ),
                (
                    GPipeSchedule,
                    2 * (num_microbatches + num_stages - 1),
                    num_microbatches + num_stages - 1 + num_stages - 1 - stage,
                ),
            ):
                steps = listing(kind(num_microbatches, num_stages, stage)).split(" | ")
                assert len(steps) == length
                forwards = [step for step, text in enumerate(steps) if re.search(r"\bF\d", text)]
                backwards = [step for step, text in enumerate(steps) if re.search(r"\bB\d", text)]
                assert forwards == [stage + m for m in range(num_microbatches)]
                assert backwards == [turn + m for m in range(num_microbatches)]
