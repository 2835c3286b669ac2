import random
import re
from pathlib import Path

import pytest
from _run_example import run_example

_SMALL = (
    "--microbatches",
    "2",
    "--microbatch-size",
    "2",
    "--dim",
    "16",
    "--context",
    "16",
    "--blocks",
    "2",
)


def _number(pattern: str, printed: str) -> float:
    return float(re.findall(pattern, printed)[0])


def _text(path: Path, num_paragraphs: int) -> str:
    rng = random.Random(0)
    words = ["stage", "batch", "layer", "value", "grade", "first", "the", "of"]
    path.write_text(
        "\n\n".join(" ".join(rng.choices(words, k=20)) for _ in range(num_paragraphs)),
        encoding="utf-8",
    )
    return str(path)


@pytest.mark.slow
def test_it_prints_the_plan_the_losses_and_a_sample(tmp_path: Path) -> None:
    text = _text(tmp_path / "text.txt", 200)
    printed = run_example("train_gpt.py", *_SMALL, "--stages", "2", "--steps", "25", "--text", text)
    assert "0_Embed, 1_Block" in printed
    assert "OneFOneBSchedule: 2 microbatches of 2 samples on 2 stages x 2 replicas" in printed
    assert "stage 1  .   F0B0  F1B1  .\n" in printed
    first, last = (
        _number(rf"{name} (?:step )?(\d\.\d+)", printed)
        for name in ("loss of the first", "of the last")
    )
    assert last < first
    assert _number(r"held-out loss: (\S+) nats", printed) < first
    assert 0.4 < _number(r"character trigram: (\d\.\d+)\)", printed) < 0.5
    assert _number(r"training text: (\S+)%", printed) == 100
    assert re.search(r"^sample:\n.+(\n-----\n.+){2}\n\nheld-out", printed, re.MULTILINE | re.DOTALL)
    assert re.search(
        r"^time: text .* CPU\), build .*, first step with compiling .*, total ",
        printed,
        re.MULTILINE,
    )
    assert "goals: missed: loss" in printed


@pytest.mark.soak
def test_tied_gpipe_with_recompute_on_the_manual_and_the_exit_status() -> None:
    settings = (
        "--stages",
        "2",
        "--replicas",
        "1",
        "--schedule",
        "gpipe",
        "--recompute",
        "1",
        "--tied",
        "--steps",
        "3",
    )
    printed = run_example("train_gpt.py", *_SMALL, *settings, "--check", status=1)
    assert "0_Embed, 1_Block" in printed
    assert "3_LayerNorm, 4_Embed" in printed
    assert "GPipeSchedule: 2 microbatches of 2 samples on 2 stages x 1 replica" in printed
    assert "goals: missed: loss, words" in printed


@pytest.mark.slow
def test_a_text_too_short_to_hold_anything_out(tmp_path: Path) -> None:
    text = _text(tmp_path / "text.txt", 1)
    printed = run_example("train_gpt.py", "--text", text, status=1)
    assert re.search(
        r"more than context=64 characters, but got \d+ to train on and 0 held out\. Give a longer",
        printed,
    )
