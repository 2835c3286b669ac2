"""`python -m jaxpipe.checkpoint`."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _saved import copied, files_with, flip, saved, trained

import jaxpipe
from jaxpipe.checkpoint import (
    _cli,
    inspect_checkpoint,
    load_params,
    load_safetensors,
)
from jaxpipe.checkpoint.__main__ import main
from jaxpipe.core.state import state_arrays
from jaxpipe.layers import flatten_dict

PACKED = "params/packed/float16"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


def packed_row() -> np.ndarray:
    return np.asarray(state_arrays(trained().state)[PACKED])[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where no accelerator that is asked for can be had."""
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cuda",
    }
    command = [sys.executable, "-m", "jaxpipe.checkpoint", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.soak
def test_a_process_verifies_what_lies_where_it_runs(root: Path) -> None:
    done = run(saved(root) / "global_step1", "verify", ".")
    assert re.fullmatch(
        r"/.*/saved/global_step1 is as it was written: \d+ rows of 14 arrays, .* KiB\n", done.stdout
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_process_says_what_is_damaged_and_nothing_else(root: Path, tmp_path: Path) -> None:
    path = copied(root, tmp_path)
    for file in files_with(path, packed_row()):
        file.unlink()
    done = run(tmp_path, "export", str(path), "--out", "model.safetensors")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(
        "The files are damaged or missing: load another tag, or restore them.\n"
    )
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_inspect_writes_the_report(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved(root).parent)
    capsys.readouterr()  # training writes there too, if this is the first test that needs it
    assert main(["inspect", "saved", "--tag", "global_step1"]) == 0
    assert capsys.readouterr() == (inspect_checkpoint(saved(root)) + "\n", "")
    assert main(["inspect", str(saved(root))]) == 0
    assert capsys.readouterr() == (inspect_checkpoint(saved(root)) + "\n", "")


@pytest.mark.slow
def test_verify_names_the_damage(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(root, tmp_path)
    assert main(["verify", str(path)]) == 0
    assert "global_step1 is as it was written" in capsys.readouterr().out
    flip(path, packed_row())
    assert main(["verify", str(path), "--tag", "global_step1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(
        rf"1 damaged: {PACKED} \(row 2\)\. Load another tag, or restore the files\.\n$", err
    )


@pytest.mark.slow
def test_export_lists_what_it_wrote(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    assert main(["export", str(saved(root)), "--out", str(out)]) == 0
    assert re.fullmatch(rf"{re.escape(str(out))}  1\d\.\d KiB\n", capsys.readouterr().out)
    held, wanted = flatten_dict(load_safetensors(out)), flatten_dict(load_params(saved(root)))
    assert {path: leaf.tobytes() for path, leaf in held.items()} == {
        p: leaf.tobytes() for p, leaf in wanted.items()
    }
    shards = tmp_path / "shards"
    assert (
        main(
            [
                "export",
                str(saved(root)),
                "--out",
                str(shards / "m.safetensors"),
                "--max-shard-bytes",
                "6KiB",
            ]
        )
        == 0
    )
    listed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == sorted(str(path) for path in shards.iterdir())


def test_sizes_have_units(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}

    def export(path: Path, *_: Any, max_shard_bytes: int) -> list[Path]:
        limits[path.name] = max_shard_bytes
        return []

    monkeypatch.setattr(_cli, "export_safetensors", export)
    sizes = {
        "4096": 4096,
        "4096B": 4096,
        "4KiB": 4096,
        "4.096 kB": 4096,
        "2mib": 2097152,
        "5GB": 5_000_000_000,
        "1.5T": 1_500_000_000_000,
    }
    for text in sizes:
        assert main(["export", text, "--out", "m.safetensors", "--max-shard-bytes", text]) == 0
    assert limits == sizes


def test_a_limit_divides_an_export(root: Path, tmp_path: Path) -> None:
    for name, size in [("parts", "4KiB"), ("whole", "5GB")]:
        target = tmp_path / f"{name}.safetensors"
        command = ["export", str(saved(root)), "--out", str(target), "--max-shard-bytes", size]
        assert main(command) == 0
        assert target.exists() == (name == "whole")
    assert len(list(tmp_path.glob("parts-*"))) > 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["verify", "{root}", "--tag", "best"], "got tag='best' in "),
        (["inspect", "{root}/none"], "/none' and no checkpoint. Pass the directory"),
        (["export", "{root}/saved", "--out", "{root}/model"], "/model'. Write for instance "),
    ],
    ids=["tag", "path", "out"],
)
def test_what_is_not_there_exits_with_1(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    saved(root)
    assert main([each.format(root=root) for each in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "required: COMMAND"),
        (["show", "run"], "invalid choice: 'show'"),
        (["inspect"], "required: PATH"),
        (["export", "run"], "required: --out"),
        (["verify", "run", "--out", "x"], "unrecognized arguments: --out x"),
        (
            ["export", "run", "--out", "x", "--max-shard-bytes", "5XB"],
            "but got '5XB'. Write for instance 5GB.",
        ),
        (
            ["export", "run", "--out", "x", "--max-shard-bytes", "0"],
            "but got '0'. Write for instance 5GB.",
        ),
        (
            ["export", "run", "--out", "x", "--max-shard-bytes=-5GB"],
            "but got '-5GB'. Write for instance 5GB.",
        ),
    ],
    ids=["none", "unknown", "no path", "no out", "other", "unit", "zero", "negative"],
)
def test_wrong_usage_exits_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert named in capsys.readouterr().err
