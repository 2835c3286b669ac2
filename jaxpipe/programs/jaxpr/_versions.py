"""The releases of JAX that this library is tested with, and warnings for others."""

from collections.abc import Collection

import jax

from jaxpipe._util.warn import warn
from jaxpipe.errors import ConfigError

NEWEST_TESTED = (0, 12)
"""Newest minor version of JAX with which the tests have passed."""

_UPGRADES = ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3", "jax_scan3")
"""Flags under which JAX hides the programs of recompute, custom derivatives and loops."""


def check_jax() -> None:
    """Refuse flags under which programs cannot be read, and warn if JAX is newer than tested."""
    on = [name for name in _UPGRADES if getattr(jax.config, name, False)]
    if on:
        raise ConfigError(
            "JAX's upgrade flags must be off, because they hide programs that jaxpipe reads, but "
            f"got {', '.join(f'{name}=True' for name in on)}. Unset "
            f"{', '.join(name.upper() for name in on)}, or call jax.config.update({on[0]!r}, "
            "False)."
        )
    if jax.__version_info__[:2] > NEWEST_TESTED:
        tested = ".".join(map(str, NEWEST_TESTED))
        warn(
            f"JAX {jax.__version__} is newer than {tested}, the last that this jaxpipe is tested "
            "with. Numbers stay right, but programs may hold more for the backward. Update "
            "jaxpipe, or install an older JAX.",
            UserWarning,
        )


def warn_of_unknown(names: Collection[str]) -> None:
    """Warn about primitives that this library does not know; Python shows each warning once."""
    if names:
        noun = "primitive" if len(names) == 1 else "primitives"
        warn(
            f"jaxpipe does not know the {noun} "
            f"{', '.join(sorted(names))} of JAX {jax.__version__}. Numbers stay right: the results "
            "are held for the backward instead of being recomputed, and plans count no operations "
            "for them. Update jaxpipe if there is a newer release.",
            UserWarning,
        )
