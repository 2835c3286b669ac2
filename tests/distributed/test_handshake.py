"""The links along each axis of a mesh are tried before anything depends on them."""

import time
from typing import Any

import jax
import numpy as np
import pytest
from _refusals import assert_refused
from jax.sharding import Mesh

from jaxpipe.distributed import handshake
from jaxpipe.errors import LaunchError

LINKS = "the links of process 0 along the mesh axis 'data', inside this process,"


def mesh(stages: int = 1, data: int = 4) -> Mesh:
    devices = np.array(jax.devices()[: stages * data]).reshape(stages, data)
    return Mesh(devices, ("stage", "data"))


def test_links_that_pass_on_what_was_sent() -> None:
    for sizes in ((1, 1), (1, 4), (3, 2)):
        handshake(mesh(*sizes), 60.0)


def test_links_that_pass_on_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, *_: x)
    words = f"{LINKS} must pass on what was sent, but got [0] in place of [1]. Check that these"
    assert_refused(LaunchError, words, handshake, mesh(data=2), 60.0)
    handshake(mesh(data=1), 60.0)  # nothing to try


def test_links_that_fail_or_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: jax.Array, *_: Any) -> jax.Array:
        raise OSError("no route\nto host")

    monkeypatch.setattr(jax.lax, "ppermute", fails)
    assert_refused(
        LaunchError,
        f"{LINKS} must answer, but got OSError: no route. Check",
        handshake,
        mesh(),
        60.0,
    )
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, *_: [time.sleep(0.3), x][1])
    words = f"{LINKS} must answer, but got nothing for 0.05 s. Check that"
    assert_refused(LaunchError, words, handshake, mesh(), 0.05)
