"""`jaxpipe config`: every key, a section, one key, and the page that is written from it."""

from pathlib import Path

import pytest
from _keys import KEYS

from jaxpipe.__main__ import main
from jaxpipe.config._other_keys import REFUSED, UNUSED

PAGE = Path(__file__).parents[2] / "docs" / "configuration_keys.md"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


def test_without_a_key_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    heads = {line.split(" = ")[0] for line in text.splitlines() if " = " in line}
    assert heads >= KEYS.keys()
    for other in [*UNUSED, *REFUSED]:
        assert other in text
    assert max(map(len, text.splitlines())) <= 100


def test_every_key_has_values_and_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    for path in (path for path, key in KEYS.items() if not key.is_section):
        head, default, *rest = printed(capsys, path).splitlines()
        assert head == path
        assert default.startswith("    default  ")
        values, meaning = "\n".join(rest).split("\n\n")
        assert values.startswith("    values   ")
        assert "anything" not in values
        assert meaning.strip()


def test_one_key_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    for path, facts in [
        ("pipeline.schedule", ['default "1f1b"', "'zero-bubble-v'", "'auto'", "PipeSchedule"]),
        ("pipeline.partition", ["'type:REGEX'", "'trunk'", "a list of boundaries"]),
        ("pipeline.stages", ["an integer of at least 1, or 'auto'"]),
        ("pipeline.gather_weights", ["values one of 'auto', 'step', 'tick' When"]),
        ("pipeline.seed_layers", ["true or false, or null"]),
        ("optimizer.type", ["required", "'AdamW'", "'adafactor'"]),
        ("optimizer.params", ["SGD: lr=0.001, momentum=0.0", "Lion: lr=0.001"]),
        ("scheduler.params", ["WarmupDecayLR: total_num_steps (required)"]),
        ("bfloat16.enabled", ["bf16.enabled"]),
        ("fp16", ["a scaled loss", "fp16.initial_scale_power = 16"]),
        ("steps_per_print", ["DeepSpeed's 10"]),
        ("aio", ["aio (without effect)"]),
        ("amp", ["amp (refused)", '"bf16"']),
    ]:
        text = " ".join(printed(capsys, path).split())
        assert [fact for fact in facts if fact not in text] == [], path


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("pipeline.shedule", "Did you mean pipeline.schedule"),
        ("shedule", "Did you mean pipeline.schedule or scheduler?"),
        ("GRADIENT_CLIPPIN", "Did you mean gradient_clipping?"),
        ("zero_optimization.stag", "Did you mean zero_optimization.stage?"),
        ("initial_scale_power", "Did you mean fp16.initial_scale_power"),
        ("xyzzy", "Without KEY all keys are listed."),
    ],
)
def test_an_unknown_key_gives_the_nearest(
    path: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", path]) == 2
    assert f"jaxpipe config: {path} is not a known key. {near}" in capsys.readouterr().err


def test_the_page_of_the_checkout_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Else run: jaxpipe config --markdown > docs/configuration_keys.md."""
    assert PAGE.read_text(encoding="utf-8") == printed(capsys, "--markdown")


def test_the_tables_are_of_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["config", "--markdown", "pipeline"])
    assert "--markdown must be given without KEY, but got pipeline" in capsys.readouterr().err
