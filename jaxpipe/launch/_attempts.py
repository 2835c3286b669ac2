"""Restarting a group after a failure."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ._commands import Command
from ._group import Group, Limits
from ._output import Output
from ._stop import StopRequests
from ._variables import restarts_before

# An attempt that fails sooner than this is followed by a pause, which doubles from one to the next.
# Otherwise a program that cannot start would burn all restarts while a file system or a neighbour
# is away for a minute.
_SOON_S = 60.0
_LONGEST_PAUSE_S = 60.0
_POLL_S = 0.05

MakeCommands = Callable[[int], Sequence[Command]]


def run_attempts(
    commands: MakeCommands,
    limits: Limits,
    *,
    log_dir: Path | None = None,
    control: str | None = None,
    label: str = "launch",
) -> int:
    """Run a group, restart it as often as the limits allow, and return the last exit code.

    `commands` takes the number of restarts so far. `control` is as for `StopRequests`. To continue
    from where the last attempt stopped, the program itself must load its last checkpoint. A second
    failure in a row that comes soon is followed by a pause of 1 s, 2 s, 4 s, ... up to 60 s. A
    request to end does not count as a failure.
    """
    before = restarts_before()
    with (
        StopRequests(control) as requests,
        Output(log_dir, append=before > 0, own_label=label) as output,
    ):
        exit_code = _run_all(commands, limits, before, requests, output)
        asked = len(requests.received())

        def must_end(is_stuck: bool) -> bool:
            # After a success the launcher waits for the reader of its output, such as a pager, as
            # any program does. After a failure it ends, so that its exit code is visible.
            return len(requests.received()) > asked or (is_stuck and (exit_code != 0 or asked > 0))

        output.drain(must_end)
        return exit_code


def _run_all(
    commands: MakeCommands, limits: Limits, before: int, requests: StopRequests, output: Output
) -> int:
    done = 0
    pause_s = 0.0
    while True:
        began = time.monotonic()
        exit_code = Group(commands(before + done), limits, requests, output).run()
        done += 1
        if not limits.max_restarts or requests.received() or (exit_code == 0 and done == 1):
            return exit_code
        ended = f"Attempt {done} of {limits.max_restarts + 1} ended with exit code {exit_code}."
        if exit_code == 0 or done > limits.max_restarts:
            output.say(ended)
            return exit_code
        is_soon = time.monotonic() - began < _SOON_S
        pause_s = min(max(2 * pause_s, 1.0), _LONGEST_PAUSE_S) if is_soon and done > 1 else 0.0
        output.say(f"{ended} Starting again{f' in {pause_s:g} s' if pause_s else ''}.")
        until = time.monotonic() + pause_s
        while not requests.received() and time.monotonic() < until:
            time.sleep(_POLL_S)
        if requests.received():
            return exit_code
