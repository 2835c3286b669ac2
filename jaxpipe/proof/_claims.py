"""Checks become claims."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpipe.errors import JaxpipeError

from ._bound import Difference
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


def judged(
    differences: Sequence[Difference],
    findings: Callable[[list[Difference]], Iterable[Finding]] = lambda wrong: [
        Finding(each.name, f"{each.text}.") for each in wrong
    ],
) -> Iterator[Any]:
    """Yield what a claim says of the results that it compared.

    `findings` makes findings of those that rounding does not explain.
    """
    yield {"results": len(differences)}
    if not differences:
        return
    yield {"nearest to its bound": str(max(differences, key=lambda each: each.share))}
    yield Measured({each.name: each[1:] for each in differences})
    infinite = [each.name for each in differences if not math.isfinite(each.size)]
    if infinite:
        yield Finding(
            infinite[0],
            f"is not finite in the plain program, and {len(infinite) - 1} other results are not "
            "either. Nothing can be compared. Give an example for which the model is finite.",
        )
        return
    wrong = [each for each in differences if not each.holds]
    yield from findings(wrong) if wrong else ()


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
    begun = time.monotonic()
    not_covered = None
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
