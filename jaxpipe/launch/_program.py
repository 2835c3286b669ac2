"""The program that every process of a job runs."""

from dataclasses import dataclass
from pathlib import Path

from jaxpipe.errors import LaunchError


@dataclass(frozen=True)
class Program:
    """A script, a module or a command, with its arguments."""

    name: str
    args: tuple[str, ...] = ()
    # `"script"`, `"module"` or `"command"`.
    kind: str = "script"

    def words(self, python: str) -> tuple[str, ...]:
        """The command of one process; `python` runs scripts and modules, with unbuffered output."""
        before = {"script": (python, "-u"), "module": (python, "-u", "-m"), "command": ()}[
            self.kind
        ]
        return (*before, self.name, *self.args)

    def options(self) -> tuple[str, ...]:
        """The arguments with which the launcher runs the program; they must come last."""
        before = {"script": (), "module": ("--module",), "command": ("--no-python",)}[self.kind]
        return (*before, self.name, *self.args)

    def check(self) -> None:
        """Raise LaunchError if a script is not a file."""
        if self.kind == "script" and not Path(self.name).is_file():
            raise LaunchError(
                f"the script must be a file, but got {self.name!r} in {Path.cwd()}. Give its path, "
                f"or write --module {self.name} or --no-python {self.name} if it is a module or a "
                "command."
            )
