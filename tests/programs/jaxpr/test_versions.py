"""What is said of a JAX that is newer than the tests.

Also of flags under which programs cannot be read.
"""

import flax.linen as nn
import jax
import numpy as np
import pytest

from jaxpipe import PipelineModule
from jaxpipe.errors import ConfigError
from jaxpipe.programs.jaxpr import check_jax


def trace() -> None:
    PipelineModule([nn.Dense(2)], num_stages=1).trace(np.ones((2, 2), np.float32))


def test_the_installed_jax_is_one_that_is_tested() -> None:
    check_jax()


def test_a_newer_jax_is_named_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpipe.programs.jaxpr._versions.NEWEST_TESTED", (0, 9))
    with pytest.warns(
        UserWarning,
        match=r"JAX 0\.\d+\..* is newer than 0\.9, the last.*tested with\. Numbers stay right",
    ):
        trace()


@pytest.mark.parametrize("name", ["jax_remat3", "jax_custom_vjp3"])
def test_upgrade_flags_are_refused(name: str) -> None:
    if not hasattr(jax.config, name):
        pytest.skip(f"this JAX has no {name}")
    jax.config.update(name, True)
    try:
        with pytest.raises(
            ConfigError, match=rf"must be off.*but got {name}=True\. Unset {name.upper()}"
        ):
            trace()
    finally:
        jax.config.update(name, False)
