import re
from pathlib import Path

import pytest
from _run_example import run_example

pytest.importorskip("tokenizers")


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", printed, re.MULTILINE)]


def completions(printed: str, when: str) -> list[str]:
    return re.findall(rf"^{when}: (.*)", printed, re.MULTILINE)


@pytest.mark.soak
def test_it_learns_whole_and_by_adapters_of_what_it_wrote(tmp_path: Path) -> None:
    small, tuned = tmp_path / "small", tmp_path / "tuned"
    printed = run_example("finetune.py", "--out", str(small), "--steps", "30")
    assert losses(printed)[-1] < losses(printed)[0] - 1
    arguments = [
        "--model",
        str(small),
        "--out",
        str(tuned),
        "--stages",
        "2",
        "--steps",
        "21",
        "--rate",
        "1e-2",
    ]
    again = run_example("finetune.py", *arguments)
    assert abs(losses(again)[0] - losses(printed)[-1]) < 0.5
    assert losses(again)[-1] < losses(again)[0] - 0.05
    (first,) = completions(printed, "after")
    assert completions(printed, "reopened") == completions(again, "before") == [first]
    assert completions(again, "reopened") == completions(again, "after") != []
    written = {"config.json", "tokenizer.json", "model.safetensors", "checkpoints"}
    assert {file.name for file in tuned.iterdir()} == written


@pytest.mark.slow
def test_help_trains_nothing() -> None:
    assert "--rank" in run_example("finetune.py", "--help")


@pytest.mark.slow
def test_a_folder_that_exists_is_not_written(tmp_path: Path) -> None:
    assert "exists" in run_example("finetune.py", "--out", str(tmp_path), status=1)
