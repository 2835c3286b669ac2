"""What errors show of the texts in them."""

import re
import traceback
from typing import Any

import obstore.store
import pytest

from jaxpipe._util.paths import any_path, local_path
from jaxpipe.checkpoint import find_checkpoint, load_safetensors, verify_checkpoint
from jaxpipe.errors import CheckpointError, ConfigError, JaxpipeError, shown

SECRETS = {
    "sftp://user:s3cret@host/run": "sftp://user:***@host/run",
    "ftp://user:s3/c+r@et@host:21/run": "ftp://user:***@host:21/run",
    "https://s3cret@host/run": "https://***@host/run",
    "simplecache::http://:s3cret@host": "simplecache::http://:***@host",
    "az://box/run?sv=s3cret&sig=s3c%2Fret": "az://box/run?sv=***&sig=***",
    "https://host/run#access_token=s3cret": "https://host/run#access_token=***",
    "failed for 'https://h/x?X-Amz-Signature=s3cret', twice": (
        "failed for 'https://h/x?X-Amz-Signature=***', twice"
    ),
}
OPEN = [
    "abfs://container@account.dfs.core.windows.net/run",
    "http://localhost:9000/a@b",
    "s3://bucket/run: nothing@all",
    "Did you mean a? Write b=1 & c=2.",
]


@pytest.mark.parametrize(("text", "wanted"), SECRETS.items())
def test_secrets_are_masked(text: str, wanted: str) -> None:
    assert str(JaxpipeError(text)) == wanted
    assert "s3" not in shown("x" * 15 + text + "y" * 80).replace("s3:", "")


@pytest.mark.parametrize("text", OPEN)
def test_what_is_no_secret_is_not(text: str) -> None:
    assert str(ConfigError(text)) == text


def test_a_terminal_has_nothing_to_obey() -> None:
    error = CheckpointError("layer \x1b[2J\x07\x9b1m\u202e\udce9 of\n\tü·│")
    assert str(error) == r"layer \x1b[2J\x07\x9b1m\u202e\udce9 of" + "\n\tü·│"


class Refusing:
    """A store whose errors show the URL, as those of HTTP clients do."""

    def list_with_delimiter(self, *args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("403, url='refusing://user:s3cret@host/run?sig=s3cret'")

    get = head = list = list_with_delimiter


@pytest.mark.parametrize(
    "read", [find_checkpoint, verify_checkpoint, load_safetensors], ids=lambda each: each.__name__
)
def test_no_line_of_a_traceback_shows_a_secret(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **options: Refusing())
    with pytest.raises(CheckpointError, match=re.escape("://user:***@host/run")) as caught:
        read("refusing://user:s3cret@host/run")
    assert "s3cret" not in "".join(
        traceback.format_exception(type(caught.value), caught.value, None)
    )
    path = any_path("refusing://user:s3cret@host/run", "path")
    assert str(path / "x") == "refusing://user:***@host/run/x"
    with pytest.raises(ConfigError, match=r"://user:\*\*\*@host") as refused:
        local_path("refusing://user:s3cret@host/run", "path")
    assert "s3cret" not in str(refused.value)
