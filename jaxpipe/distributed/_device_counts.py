"""Asking JAX for its devices for the first time."""

import jax

from jaxpipe.errors import LaunchError


def check_devices() -> None:
    """Let JAX look for its devices, and say what may be missing where it finds none.

    Raises:
        LaunchError: It finds none for a platform that it is told to use.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where no plugin for the platform is installed
        first = (str(error).strip().splitlines() or ["no plugin for it"])[0]
        raise LaunchError(
            "JAX must find devices of the platforms that it is told to use, but got JAX_PLATFORMS="
            f"{jax.config.values['jax_platforms']!r} and: {first}. For NVIDIA GPUs run pip install "
            "'jaxpipe[cuda13]' or 'jaxpipe[cuda12]' where the driver is there; or set JAX_PLATFORMS=cpu, or remove it."
        ) from error
