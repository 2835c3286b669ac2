"""The result of a proof: claims, what they are based on, and what was not covered."""

import dataclasses
import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from jaxpipe._util.text import html_page, html_table


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        where: The layer, the leaf, `loss_fn`, or a stage and a tick.
        text: What is wrong, with figures, and what to do.
    """

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement about the job, and whether it holds.

    Attributes:
        name: A short name, such as `gradients`.
        statement: The statement, in one sentence.
        findings: What contradicts it; empty if it holds.
        figures: Numbers that it is based on, by name.
        not_covered: Why it was not checked. None if it was.
        seconds: Time that the check took.
        results: Difference, bound and size of each result that was compared, as L2 norms, by name.
    """

    name: str
    statement: str
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    not_covered: str | None = None
    seconds: float = 0.0
    results: Mapping[str, tuple[float, ...]] = dataclasses.field(
        default_factory=dict[str, tuple[float, ...]]
    )

    @property
    def holds(self) -> bool:
        """Whether it was checked and nothing contradicts it."""
        return not self.findings and self.not_covered is None

    @property
    def figures_text(self) -> str:
        """The figures in one line."""
        return "; ".join(f"{key}: {value}" for key, value in self.figures.items())

    def __str__(self) -> str:
        mark = "not covered" if self.not_covered else "holds" if self.holds else "REFUSED"
        lines = [f"{mark:13}{self.name:13}{self.statement} ({self.seconds:.1f} s)"]
        lines += [f"{'':13}{text}" for text in (self.not_covered, self.figures_text) if text]
        return "\n".join([*lines, *(f"{'':13}{finding}" for finding in self.findings)])


@dataclasses.dataclass(frozen=True)
class Proof:
    """The claims about one job.

    Attributes:
        claims: The claims, in the order in which they were checked.
        job: What was proved: layers, sizes, axes, schedule, versions.
    """

    claims: tuple[Claim, ...]
    job: Mapping[str, Any]

    @property
    def holds(self) -> bool:
        """Whether something was checked, and nothing contradicts any claim."""
        return not self.findings and any(claim.holds for claim in self.claims)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings."""
        return tuple(finding for claim in self.claims for finding in claim.findings)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({"holds": self.holds, **dataclasses.asdict(self)}, indent=2, default=str)

    def badge(self) -> str:
        """Return a line of Markdown for a README."""
        of_numbers = ("numbers", "dtypes")
        if any(claim.holds and claim.name in of_numbers for claim in self.claims):
            label = "proved-brightgreen"
        else:
            label = "not_checked-lightgrey"
        if self.findings:
            label = "refused-red"
        return f"![jaxpipe prove](https://img.shields.io/badge/pipeline-{label})"

    def to_html(self) -> str:
        """Return a self-contained page."""
        title = self.verdict.capitalize()
        rows = [
            (
                claim.name,
                "not covered" if claim.not_covered else "holds" if claim.holds else "refused",
                claim.statement,
                claim.figures_text,
                f"{claim.seconds:.1f}",
            )
            for claim in self.claims
        ]
        findings = [(finding.where, finding.text) for finding in self.findings]
        parts = [
            f"<h1>{title}</h1>",
            html_table((), [(key, str(value)) for key, value in self.job.items()]),
            "<h2>Claims</h2>",
            html_table(("claim", "", "statement", "figures", "seconds"), rows, "<<<<>"),
        ]
        if findings:
            parts += ["<h2>Findings</h2>", html_table(("where", "what"), findings)]
        return html_page("jaxpipe prove", "\n".join(parts))

    @property
    def verdict(self) -> str:
        """The last line of a report."""
        count = len(self.findings)
        left = sum(claim.not_covered is not None for claim in self.claims)
        if count:
            return f"refused: {count} finding{'s' if count > 1 else ''}"
        if not self.holds:
            return "nothing is proved: no claim is covered"
        return (
            f"proved, with {left} claim{'s' if left > 1 else ''} not covered" if left else "proved"
        )

    def __str__(self) -> str:
        about = [f"{key}: {value}" for key, value in self.job.items()]
        return "\n".join([*about, *map(str, self.claims), self.verdict])


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute."""
    names = "jax", "jaxlib", "flax", "optax"
    return {"versions": ", ".join(f"{name} {metadata.version(name)}" for name in names)}
