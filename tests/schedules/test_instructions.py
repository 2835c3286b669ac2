import pickle

import pytest

from jaxpipe import schedules
from jaxpipe.schedules import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

WHOLE_STAGE = [OptimizerStep, ReduceGrads, ReduceTiedGrads]
ON_BUFFERS = [
    LoadMicroBatch,
    ForwardPass,
    BackwardPass,
    BackwardInput,
    BackwardWeight,
    SendActivation,
    RecvActivation,
    SendGrad,
    RecvGrad,
]


@pytest.mark.parametrize("kind", WHOLE_STAGE)
def test_whole_stage_instructions(kind: type[PipeInstruction]) -> None:
    assert repr(kind()) == f"{kind.__name__}()"
    assert kind() == kind()
    assert not isinstance(kind(), BufferOpInstruction)


def test_buffer_instructions() -> None:
    for kind in ON_BUFFERS:
        op = kind(3)
        assert (op.name, op.kwargs, op.buffer_id) == (kind.__name__, {"buffer_id": 3}, 3), kind
        assert repr(op) == f"{kind.__name__}(buffer_id=3)", kind
        assert (op.micro_batch_id, op.chunk_id) == (None, None), kind
        named = kind(buffer_id=3, micro_batch_id=7, chunk_id=1)
        assert (named.micro_batch_id, named.chunk_id) == (7, 1), kind
        assert repr(named) == f"{kind.__name__}(buffer_id=3, micro_batch_id=7, chunk_id=1)", kind
        assert op != named, kind
        assert pickle.loads(pickle.dumps(named)) == named, kind


def test_arguments_become_attributes() -> None:
    op = PipeInstruction(size=4, label="x")
    assert (vars(op)["size"], vars(op)["label"]) == (4, "x")
    assert op.kwargs == {"size": 4, "label": "x"}
    assert repr(op) == "PipeInstruction(size=4, label='x')"


def test_instructions_are_values() -> None:
    assert ForwardPass(1) == ForwardPass(buffer_id=1)
    assert ForwardPass(1) != ForwardPass(2)
    assert ForwardPass(1) != BackwardPass(1)
    assert ForwardPass(1) != "ForwardPass(buffer_id=1)"
    assert (
        len(
            {
                ForwardPass(1),
                ForwardPass(1),
                ForwardPass(2),
                BackwardPass(1),
                OptimizerStep(),
                OptimizerStep(),
            }
        )
        == 4
    )


def test_kwargs_are_a_copy() -> None:
    op = ForwardPass(1)
    op.kwargs["buffer_id"] = 2
    assert op.buffer_id == 1


def test_everything_is_exported() -> None:
    assert sorted(schedules.__all__, key=str.lower) == sorted(set(schedules.__all__), key=str.lower)
    assert all(hasattr(schedules, name) for name in schedules.__all__)
