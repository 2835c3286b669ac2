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
    *,
    loose: float = 0.1,
) -> Iterator[Any]:
    """Yield what a claim says of the results that it compared."""
    if not differences:
        yield NotCovered("there are no results to compare")
        return
    yield {"results": len(differences)}
    yield {"nearest to its bound": str(max(differences, key=lambda each: each.share))}
    yield Measured({each.name: each[1:] for each in differences})
    if nothing := _nothing_compared(differences):
        yield nothing
        return
    wrong = [each for each in differences if not each.holds]
    if wrong:
        yield from findings(wrong)
        return
    checked = [each for each in differences if each.size > 0]
    # A bound of such a share of a result says little of it.
    wide = [each for each in checked if each.bound > loose * each.size]
    if wide:
        widest = max(wide, key=lambda each: each.bound / each.size)
        share = widest.bound / widest.size
        most = "any amount" if share >= 1 else f"{share:.0%}"
        text = f"{len(wide)} of {len(checked)} results may differ by {loose:.0%} of them and more"
        yield {"loose bounds": f"{text}, {widest.name} by {most}"}
    if 2 * len(wide) > len(checked):
        yield NotCovered(f"rounding explains {loose:.0%} and more of most results")


def _nothing_compared(differences: Sequence[Difference]) -> Finding | None:
    """Return why a comparison says nothing, if it does."""
    example = "Give an example for which the model is finite and its gradients are not 0."
    for each in differences:
        if math.isnan(each.size):
            return Finding(each.name, f"is not finite in the plain program. {example}")
        if math.isinf(each.bound):
            text = "is not finite if values between layers are rounded once more"
            return Finding(each.name, f"{text}, so that nothing bounds its difference. {example}")
    # Gradients decide where there are any: losses and outputs do not show a backward.
    of_gradients = [each for each in differences if each.name.startswith(("gradient/", "ragged/"))]
    compared = of_gradients or differences
    if all(each.size == 0 and each.difference == 0 for each in compared):
        what = "gradients" if of_gradients else "results"
        return Finding(compared[0].name, f"is 0, like all {what}. {example}")
    return None


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
    # What the library refuses is a finding, and the other claims are still checked.
    except JaxpipeError as error:
        findings.append(Finding(name, str(error)))
    seconds = time.monotonic() - begun
    shown = tuple(findings[:_MOST_FINDINGS])
    if len(findings) > len(shown):
        figures["findings that are not shown"] = len(findings) - len(shown)
    return Claim(name, statement, shown, figures, not_covered, seconds, results)
