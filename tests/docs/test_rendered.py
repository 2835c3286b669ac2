"""What a reader of the built pages would see and should not."""

import re
import sys
from pathlib import Path

import pytest

import jaxpipe

sys.path.append(str(Path(__file__).parents[2] / "docs"))
from _pictures import step_alone, write_pictures  # noqa: E402
from _rendered import faults, faults_of_site  # noqa: E402

PICTURE = '<svg viewBox="0 0 100 20" font-size="11"><text x="{}" y="12"{}>stage 0</text></svg>'


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("<p>not `code`</p>", "back-tick in 'not `code`'"),
        ("<p><code>a `b`</code> and <br>text</p><p>`</p>", "back-tick in '`'"),
        (PICTURE.format(90, ""), "'stage 0' ends at .* of 100"),
        (PICTURE.format(10, ' text-anchor="end"'), "'stage 0' ends at 10 of 100"),
    ],
)
def test_faults_are_found(page: str, fault: str) -> None:
    (found,) = faults(page)
    assert re.search(fault, found)


def test_sound_pages_have_none() -> None:
    assert not [*faults("<p><code>a `b`</code><br></p>" + PICTURE.format(4, ""))]


def test_pictures_hold_their_texts(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    picture = jaxpipe.schedules.draw("zero-bubble", 8, 4)
    picture.save(tmp_path / "zero-bubble.svg")
    assert faults_of_site(tmp_path) == []


def test_the_readmes_picture_is_that_of_the_package() -> None:
    picture = Path(__file__).parents[2] / "docs" / "_static" / "step.svg"
    assert picture.read_text(encoding="utf-8") == step_alone()
