"""Checks become claims."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxpipe.errors import JaxpipeError

from ._proof import Claim, Finding

_MOST_FINDINGS = 5

Checks = Mapping[str, tuple[str, Callable[[], Iterator[Any]]]]
"""The claims by name: the statement, and a function that yields findings, figures by name, or why
the claim is not covered."""


class NotCovered(NamedTuple):
    """Why something was not checked."""

    text: str


class Measured(NamedTuple):
    """The difference, the bound and the size of each result, by name."""

    results: dict[str, tuple[float, ...]]


def run_claims(
    checks: Checks, when_checked: Callable[[Claim], None] = lambda claim: None
) -> tuple[Claim, ...]:
    """Run all checks. `when_checked` is called with each claim."""
    claims: list[Claim] = []
    for name, check in checks.items():
        claims.append(_claim(name, *check))
        when_checked(claims[-1])
    return tuple(claims)


def _claim(name: str, statement: str, check: Callable[[], Iterator[Any]]) -> Claim:
    begun, not_covered = time.monotonic(), None
    findings: list[Finding] = []
    figures: dict[str, Any] = {}
    results: dict[str, Any] = {}
    try:
        for found in check():
            if isinstance(found, Finding):
                findings.append(found)
            elif isinstance(found, NotCovered):
                not_covered = found.text
            elif isinstance(found, Measured):
                results |= found.results
            else:
                figures |= found
    except JaxpipeError as error:
        findings.append(Finding(name, str(error)))
    seconds = time.monotonic() - begun
    shown = tuple(findings[:_MOST_FINDINGS])
    return Claim(name, statement, shown, figures, not_covered, seconds, results)
