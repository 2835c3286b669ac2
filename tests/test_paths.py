"""What a user gives as a path.

Homes, `file://`, and refused before anything is made what is on no file system.
"""

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import jaxpipe
from jaxpipe import checkpoint
from jaxpipe._util.paths import any_path, local_path
from jaxpipe._util.stores import StorePath
from jaxpipe.checkpoint import CheckpointWriter, RunState
from jaxpipe.checkpoint.__main__ import main as checkpoint_command
from jaxpipe.config import CSVMonitorSection, FlopsProfilerSection, TensorBoardSection, load_config
from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.launch import launch
from jaxpipe.models import LlamaConfig
from jaxpipe.schedules import draw
from jaxpipe.tools.plan import plan_command
from jaxpipe.transformer import DeepSpeedTransformerConfig

REMOTE = [
    *(
        "s3://bucket/run",
        "gs://b",
        "memory://x",
        "hf://owner/name",
        "HDFS:///x",
        "az+blob://x",
        " s3://b",
    ),
    *("simplecache::s3://b/x", "x://", "dbfs:/x", Path("s3://bucket/run")),
]
LOCAL = [
    ("file:///data/my%20run/%C3%A9", "/data/my run/é"),
    ("file://localhost/data#1?2", "/data#1?2"),
    ("FILE://LOCALHOST/data", "/data"),
    (Path("file:///data"), "/data"),
    ("~", "/home/me"),
    ("~/run", "/home/me/run"),
    (Path("~/run"), "/home/me/run"),
    ("run", "run"),
    ("a:b/c", "a:b/c"),
    ("/data/s3://b", "/data/s3:/b"),
    ("runs/~", "runs/~"),
]


@pytest.mark.parametrize("given", REMOTE, ids=str)
def test_what_is_on_no_file_system_is_refused_by_name(given: Any) -> None:
    scheme = str(given).strip().partition(":/")[0]
    with pytest.raises(
        ConfigError, match=r"save_dir must lie on a file system .*\. Give a directory, such as"
    ) as caught:
        local_path(given, "save_dir")
    assert f"got save_dir={str(given)!r}, and {scheme}:// is none" in str(caught.value)


@pytest.mark.parametrize(("given", "meant"), LOCAL, ids=str)
def test_local_paths(given: Any, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = local_path(given, "save_dir")
    assert found == Path(meant)
    assert local_path(found, "save_dir") == found


@pytest.mark.parametrize("given", ["./~", "./s3://b"])
def test_a_name_that_is_meant_as_it_is(given: str) -> None:
    found = local_path(given, "save_dir")
    assert found == Path(given).absolute() == local_path(found, "save_dir")


@pytest.mark.parametrize("given", ["file://host/x", "file://x", "file://", "file:///a%00b"])
def test_urls_of_files_elsewhere(given: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"must be file:// and a path .* got save_dir='{given}'. Write for instance",
    ):
        local_path(given, "save_dir")


def test_a_home_of_nobody() -> None:
    with pytest.raises(
        ConfigError,
        match="got save_dir='~no-such-user/x'. Write the whole path, or './~no-such-user/",
    ):
        local_path("~no-such-user/x", "save_dir")


@pytest.mark.parametrize("given", ["", None, 3, b"run", "a\0b"], ids=repr)
def test_what_is_no_path(given: Any) -> None:
    with pytest.raises(
        ConfigError,
        match="save_dir must be the path of a directory or a file, a string or a pathlib",
    ):
        local_path(given, "save_dir")


def mean_square(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).mean()


@pytest.fixture(scope="module")
def engine() -> Any:
    module = jaxpipe.PipelineModule(
        [nn.Dense(2)], topology=jaxpipe.PipeDataParallelTopology(1, 1), loss_fn=mean_square
    )
    x = np.ones((2, 2), np.float32)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    mesh = jaxpipe.mesh_for(module, jax.devices()[:1])
    return jaxpipe.initialize(model=module, config=config, mesh=mesh, example_batch=(x, x))[0]


def write(engine: Any, url: str) -> None:
    CheckpointWriter().save(url, engine.pipeline, engine.state, RunState(global_steps=1))


TAKERS: dict[str, Callable[[Any, str], Any]] = {
    "schedule_trace": lambda engine, url: engine.schedule_trace(url),
    "draw": lambda engine, url: draw(engine.pipeline.plan.program).save(f"{url}/x.svg"),
    "config": lambda engine, url: load_config(f"{url}/config.json"),
    "flops_profiler": lambda engine, url: FlopsProfilerSection(output_file=url),
    "transformer": lambda engine, url: DeepSpeedTransformerConfig.from_json_file(url),
}
TAKERS_OF_STORES: dict[str, Callable[[Any, str], Any]] = {
    "csv_monitor": lambda engine, url: CSVMonitorSection(enabled=True, output_path=url),
    "tensorboard": lambda engine, url: TensorBoardSection(enabled=True, output_path=url),
    "config_json": lambda engine, url: LlamaConfig.from_huggingface(url),
    "load_safetensors": lambda engine, url: checkpoint.load_safetensors(f"{url}/x.safetensors"),
    "load_huggingface": lambda engine, url: engine.load_huggingface(url, []),
    "save_checkpoint": lambda engine, url: engine.save_checkpoint(url),
    "load_checkpoint": lambda engine, url: engine.load_checkpoint(url),
    "save_on_preemption": lambda engine, url: engine.save_on_preemption(url, ()),
    "CheckpointWriter": write,
    "load_params": lambda engine, url: checkpoint.load_params(url),
    "load_collections": lambda engine, url: checkpoint.load_collections(url),
    "find_checkpoint": lambda engine, url: checkpoint.find_checkpoint(url),
    "open_checkpoint": lambda engine, url: checkpoint.open_checkpoint(url),
    "committed_tags": lambda engine, url: checkpoint.committed_tags(url),
    "inspect_checkpoint": lambda engine, url: checkpoint.inspect_checkpoint(url),
    "verify_checkpoint": lambda engine, url: checkpoint.verify_checkpoint(url),
    "export_safetensors": lambda engine, url: checkpoint.export_safetensors(
        ".", f"{url}/x.safetensors"
    ),
    "export_safetensors_of": lambda engine, url: checkpoint.export_safetensors(
        url, "x.safetensors"
    ),
    "save_huggingface": lambda engine, url: checkpoint.save_huggingface(".", url, []),
    "save_huggingface_of": lambda engine, url: checkpoint.save_huggingface(url, "out", []),
}
NO_STORES = {
    "nothing://bucket/run": r"that obstore opens, .* GenericError: Generic URL error: Unable to "
    r"recognise URL .nothing://bucket.\. .* Give a directory or a URL",
    "memory://": "must name a folder on the store, .* 'memory://bucket/run'",
    "simplecache::memory://run": "must lie on a file system of this machine, .* memory:// is none",
}


@pytest.mark.parametrize("taker", TAKERS)
def test_nothing_that_takes_a_path_makes_a_folder_named_by_a_url(
    engine: Any, taker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        JaxpipeError, match="must lie on a file system of this machine, .* and s3:// is none"
    ):
        TAKERS[taker](engine, "s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("taker", "url"),
    # of those the file in it is an object
    sorted(
        {*itertools.product(TAKERS_OF_STORES, NO_STORES)}
        - {(taker, "memory://") for taker in ("export_safetensors", "load_safetensors")}
    ),
)
def test_a_store_that_cannot_be_opened(
    engine: Any, taker: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    match = NO_STORES[url].replace("memory:// is", r".* is")
    with pytest.raises(JaxpipeError, match=match):
        TAKERS_OF_STORES[taker](engine, url)
    assert list(tmp_path.iterdir()) == []


def test_paths_on_stores() -> None:
    path = any_path("MEMORY://a/b/ c#?%20/", "save_dir")
    assert isinstance(path, StorePath)
    assert str(path) == "memory://a/b/ c#?%20"
    assert (path / "x").parent == path == path.absolute()
    assert any_path(path, "save_dir") is path
    assert any_path(Path("memory://a/b"), "save_dir") == any_path("memory://a/b", "save_dir")
    assert path.parent.parent.parent == path.parent.parent
    assert any_path("a:b/c", "save_dir") == Path("a:b/c")


@pytest.mark.slow
def test_the_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    url = "oci://bucket/x"
    for words in (["--hostfile", url, "x.py"], ["--nproc", "1", "--log-dir", url, "x.py"]):
        assert launch(words, "jaxpipe launch") == 2
        assert "must lie on a file system of this machine" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "jaxpipe.checkpoint", "inspect", url],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(jaxpipe.__file__).parents[1]), "PATH": "/usr/bin:/bin"},
    )
    told = [(done.returncode, done.stderr)]
    for words in (["verify", url], ["export", ".", "--out", f"{url}.safetensors"]):
        told.append((checkpoint_command(words), capsys.readouterr().err))
    for code, text in told:
        assert code == 1
        assert "Give a directory or a URL" in text
        assert len(text.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--json", "--html", "--target-config"])
def test_pages_of_plans(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text("job = {}")
    assert plan_command(["jobs:job", option, "s3://bucket/x"], "jaxpipe plan") == 2
    told = capsys.readouterr().err
    assert option == "--target-config" or "and s3:// is none" in told


def test_checkpoints_at_a_url_of_a_file_and_in_a_home(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    engine.save_checkpoint(f"file://{tmp_path}/my%20run")
    engine.save_checkpoint("~/other")
    assert engine.load_checkpoint("~/my run")[0] == str(tmp_path / "my run" / "global_step0")
    assert engine.load_checkpoint(f"file://localhost{tmp_path}/other")[0] == str(
        tmp_path / "other" / "global_step0"
    )
