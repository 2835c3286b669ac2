"""Files of users: what is no file is never opened, and nothing is written through a link."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpipe._util.files import (
    check_is_file,
    new_beside,
    open_to_append,
    open_to_change,
    read_file,
    write_file,
)
from jaxpipe.config import CSVMonitorSection, load_config
from jaxpipe.engine.monitor._csv import CSVMonitor
from jaxpipe.errors import JaxpipeError
from jaxpipe.monitor import Event
from jaxpipe.schedules import draw
from jaxpipe.transformer import DeepSpeedTransformerConfig
from jaxpipe.weights import load_safetensors, read_config_json

READERS: dict[str, Callable[[Path], Any]] = {
    "load_config": load_config,
    "read_config_json": read_config_json,
    "load_safetensors": load_safetensors,
    "from_json_file": DeepSpeedTransformerConfig.from_json_file,
}


@pytest.fixture(params=["pipe", "device", "socket"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.json"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mknod(path, 0o600 | stat.S_IFSOCK)
    return path


@pytest.mark.parametrize("reader", list(READERS))
def test_readers_refuse_what_is_no_file(reader: str, no_file: Path) -> None:
    with pytest.raises(JaxpipeError, match="something other than a file: a folder, pipe or device"):
        READERS[reader](no_file)


def test_safetensors_that_are_no_file_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(JaxpipeError, match="something other than a file: a folder, pipe or device"):
        load_safetensors(tmp_path)


def test_reading(tmp_path: Path, no_file: Path) -> None:
    with pytest.raises(OSError, match="something other than a file"):
        read_file(no_file)
    with pytest.raises(OSError, match="something other than a file"):
        check_is_file(tmp_path)
    (tmp_path / "a").write_bytes(b"abc")
    assert read_file(tmp_path / "a", 3) == b"abc"
    with pytest.raises(OSError, match="a file of 3 bytes"):
        read_file(tmp_path / "a", 2)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "write_file": lambda path: write_file(path, "new"),
    "picture": lambda path: draw("1f1b", 4, 2).save(path),
}


@pytest.mark.parametrize("writer", list(WRITERS))
def test_writers_replace_a_link(writer: str, tmp_path: Path) -> None:
    own, path = tmp_path / "own", tmp_path / "out.svg"
    own.write_text("mine")
    path.symlink_to(own)
    WRITERS[writer](path)
    assert own.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {"own", "out.svg"}


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_file(path, "old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    with pytest.raises(TypeError):
        write_file(path, 3)  # pyright: ignore[reportArgumentType]
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_names_of_files_that_are_not_whole_are_not_known_before(tmp_path: Path) -> None:
    with new_beside(tmp_path / "a") as one, new_beside(tmp_path / "a") as two:
        assert one != two
        assert one.parent == two.parent == tmp_path
        two.replace(tmp_path / "a")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("opened", [open_to_append, open_to_change])
def test_nothing_is_opened_through_a_link(
    opened: Callable[[Path], Any], tmp_path: Path, no_file: Path
) -> None:
    (tmp_path / "own").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(OSError, match="is a link, through which nothing is written"):
        opened(tmp_path / "link")
    if not no_file.is_char_device():  # what is written there is gone, as its owner wants
        with pytest.raises(OSError, match="is not a file|No such device"):
            opened(no_file)


def test_appending(tmp_path: Path) -> None:
    for text, anew in ((b"a", False), (b"b", False), (b"c", True)):
        with open_to_append(tmp_path / "log", anew=anew) as file:
            file.write(text)
    assert (tmp_path / "log").read_bytes() == b"c"
    with open_to_append(tmp_path / "log") as file:
        assert file.tell() == 1


def test_numbers_of_a_run_are_not_written_through_a_link(tmp_path: Path) -> None:
    section = CSVMonitorSection(enabled=True, output_path=str(tmp_path), job_name="job")
    monitor = CSVMonitor(section)
    monitor([Event("Train/lr", 0.5, 8)])
    monitor([Event("Train/lr", 0.25, 16)])
    assert (tmp_path / "job" / "Train_lr.csv").read_bytes() == b"step,lr\r\n8,0.5\r\n16,0.25\r\n"
    (tmp_path / "own").write_text("mine")
    (tmp_path / "job" / "Train_loss.csv").symlink_to(tmp_path / "own")
    with pytest.raises(OSError, match="is a link"):
        monitor([Event("Train/loss", 0.5, 8)])
    assert (tmp_path / "own").read_text() == "mine"


def test_a_folder_of_the_hub_gives_what_transformers_reads(tmp_path: Path) -> None:
    other = {"y": np.ones(2, np.float32)}
    for name in (
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "model-00001-of-00001.safetensors",
    ):
        save_file(other, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"y": "model-00001-of-00001.safetensors"}}')
    assert list(load_safetensors(tmp_path)) == ["y"]
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    assert list(load_safetensors(tmp_path)) == ["x"]
