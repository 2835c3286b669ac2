"""What one process fails with is raised in all, and what processes tell each other arrives."""

import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from jaxpipe.distributed import failure_of, gather_texts, log, raise_on_all, run_on_all
from jaxpipe.errors import ConfigError, JaxpipeError


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def fails() -> None:
    raise ConfigError("a must be b, but got c.\nSet it.")


def test_the_first_failure_is_raised_with_its_class_and_whole_message() -> None:
    told = failure_of(ConfigError("a must be b, but got c.\nSet it."))
    later = failure_of(OSError("disk"))
    with pytest.raises(
        ConfigError,
        match=r"^process 1 failed with ConfigError: a must be b, but got c\.\nSet it\.$",
    ):
        raise_on_all(None, ["", told, later])
    with pytest.raises(JaxpipeError, match=r"^process 2 failed with OSError: disk$") as caught:
        raise_on_all(None, ["", "", later])
    assert type(caught.value) is JaxpipeError
    own = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as kept:
        raise_on_all(own, [told, failure_of(own)])
    assert kept.value is own
    raise_on_all(None, ["", ""])


def test_an_error_without_a_text_has_its_class() -> None:
    assert failure_of(UnprintableError()) == (
        "UnprintableError\n(an error whose text cannot be made)"
    )


def test_one_process_runs_what_is_its_own() -> None:
    assert [run_on_all(lambda: 3, who) for who in (None, [0], [1], [])] == [3, 3, None, None]
    with pytest.raises(ConfigError, match=r"^a must be b"):
        run_on_all(fails)


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """This process is the first of two; gives what sets the text of the other."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    return lambda theirs: monkeypatch.setattr(
        "jaxpipe.distributed._errors.gather_texts", lambda own: [own, theirs]
    )


def test_two_processes_raise_alike(two_processes: Callable[[str], None]) -> None:
    two_processes("")
    assert run_on_all(lambda: 3) == 3
    with pytest.raises(ConfigError, match=r"^a must be b"):
        run_on_all(fails)
    two_processes("DataError\nno row")
    with pytest.raises(JaxpipeError, match=r"^process 1 failed with DataError: no row$"):
        run_on_all(lambda: 3)


@pytest.mark.parametrize(
    "texts",
    [["", "", ""], ["", "four", ""], ["a", "Größe", "nine bytes"], ["caf\udce9", "b"]],
    ids=ascii,
)
def test_texts_arrive_as_they_are(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process sends its own, filled up to the longest."""
    each = [text.encode(errors="surrogatepass") for text in texts]

    def gathered(values: Sequence[int]) -> np.ndarray:
        if next(rounds) == "sizes":
            assert len(values) == 1
            return np.array([[len(text)] for text in each], np.uint32)
        size = 4 * len(values)
        return np.array([np.frombuffer(text.ljust(size, b"\0"), np.uint32) for text in each])

    monkeypatch.setattr("jaxpipe.distributed._gather.gather_numbers", gathered)
    for text in texts:
        rounds = iter(("sizes", "texts"))
        assert gather_texts(text) == texts


def test_one_process_logs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "jaxpipe"):
        log(logging.INFO, "100 % of it")
        log(logging.INFO, "%d of %s", 2, "caf\x1b")
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        log(logging.INFO, "unheard")
    assert [record.getMessage() for record in caplog.records] == ["100 % of it", r"2 of caf\x1b"]
