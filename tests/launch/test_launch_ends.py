"""How a job ends: failures, stalls, requests, restarts. Nothing of it is left."""

import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _covering import sweep
from _launching import is_running, launch, script, start, wait_until

from jaxpipe.launch._members import Member, allow_files

# Every program notes its processes in its folder, then does what the test is about.
COMMON = """
me = int(os.environ["JAX_PROCESS_ID"])
here = Path(sys.argv[1])
def note():
    (here / f"pid-{os.getpid()}").touch()
    (here / f"ready-{me}").touch()
def wait_for_all():
    while len(list(here.glob("ready-*"))) < int(os.environ["JAX_NUM_PROCESSES"]):
        time.sleep(0.01)
def step():
    os.utime(os.environ["JAXPIPE_HEARTBEAT_FILE"])
"""
WAIT = "note(); wait_for_all()\n"


def _run(here: Path, num_processes: int, source: str, *options: object) -> int:
    return launch("--nproc", num_processes, *options, script(here.parent, COMMON + source), here)


@pytest.mark.parametrize(
    ("ending", "code", "how"),
    sweep(
        2,
        [
            ("sys.exit(3)", 3, "ended with exit code 3"),
            ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
            ("os.abort()", 134, "was killed by SIGABRT"),
            (
                "os.kill(os.getpid(), signal.SIGRTMIN + 1)",
                128 + signal.SIGRTMIN + 1,
                "was killed by SIGRTMIN+1",
            ),
        ],
        unpack=True,
    ),
    ids=["exit", "kill", "abort", "real-time"],
)
def test_the_first_failure_ends_all(
    here: Path, capfd: pytest.CaptureFixture[str], ending: str, code: int, how: str
) -> None:
    source = WAIT + f"if me == 1: {ending}\nprint('waiting'); time.sleep(300)\n"
    assert _run(here, 3, source) == code
    out, err = capfd.readouterr()
    assert "[launch] process 1 (pid " in err
    assert "Ending the other 2, in 5 s at most." in err
    assert "[1]" not in out
    if "RTMIN" not in how:
        assert how in err


# What follows from another's failure can be seen first, or together with it.
RAISES = "raise ValueError('mine')"
LOSES_IT = "raise RuntimeError('connection closed by peer')"
IS_ENDED = (
    "print('... because the JAX distributed service detected fatal errors', file=sys.stderr); "
    "os.abort()"
)


@pytest.mark.slow
@pytest.mark.parametrize("me", sweep(1, [1, 0]))
@pytest.mark.parametrize(
    ("cause", "consequence", "code", "error"),
    [
        (RAISES, LOSES_IT, 1, "ValueError: mine"),
        (RAISES, IS_ENDED, 1, "ValueError: mine"),
        ("os._exit(5)", LOSES_IT, 5, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", IS_ENDED, 137, ""),
        ("print('a bug', file=sys.stderr); os.abort()", LOSES_IT, 134, "a bug"),
    ],
    ids=["raise-raise", "raise-abort", "exit-raise", "kill-abort", "abort-raise"],
)
def test_the_cause_is_named(
    here: Path,
    capfd: pytest.CaptureFixture[str],
    me: int,
    cause: str,
    consequence: str,
    code: int,
    error: str,
) -> None:
    source = f"""
note()
if me == {me}:
    wait_for_all()
    (here / "failing").touch()
    {cause}
while not (here / "failing").exists():
    time.sleep(0.01)
time.sleep(0.4)
{consequence}
"""
    assert _run(here, 2, source) == code
    err = capfd.readouterr().err
    assert set(re.findall(r"\[launch\] process (\d) \(pid", err)) == {str(me)}
    assert ("The end of its standard error:" in err) == bool(error)
    assert err.endswith(f"[launch]     {error}\n" if error else "\n")
    if cause == RAISES:
        assert re.search(r"\[launch\]       File .*program.py., line \d+, in <module>\n", err)


def test_an_error_that_a_process_went_on_from_is_not_its_last(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (
        "note()\n"
        "sys.stderr.write('Traceback (most recent call last):\\n  old\\nOldError\\n' "
        "+ 'later\\n' * 100)\n"
    )
    assert _run(here, 1, source + "sys.exit(4)\n") == 4
    assert capfd.readouterr().err.endswith(
        "The end of its standard error:\n" + "[launch]     later\n" * 5
    )


def test_the_others_get_time_to_end(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
def end(*_):
    print("cleaned up")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
note(); wait_for_all()
if me == 0: sys.exit(7)
time.sleep(300)
"""
    assert _run(here, 2, source) == 7
    assert capfd.readouterr().out == "[1] cleaned up\n"


def test_those_that_do_not_end_are_killed(here: Path) -> None:
    source = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + WAIT
        + "if me == 0: sys.exit(7)\ntime.sleep(300)\n"
    )
    began = time.monotonic()
    assert _run(here, 2, source, "--kill-grace", 0.3) == 7
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("code", [0, 5])
def test_grandchildren_end_too(here: Path, code: int) -> None:
    child = (
        "import os, sys, time; open(sys.argv[1] + '/pid-' + str(os.getpid()), 'w').close(); "
        "time.sleep(300)"
    )
    source = f"""
subprocess.Popen([sys.executable, "-S", "-c", {child!r}, str(here)])
while not list(here.glob("pid-*")):
    time.sleep(0.01)
sys.exit({code})
"""
    assert _run(here, 1, source) == code


def test_a_stopped_process_ends_too(here: Path) -> None:
    source = (
        WAIT + "if me == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.3)\nsys.exit(me)\n"
    )
    assert _run(here, 2, source) == 1


@pytest.mark.slow
def test_a_stall_is_noticed(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = (
        WAIT
        + """
for n in range(10000):
    step()
    time.sleep(0.02)
    if n == 20 and me == 0: time.sleep(300)  # waits for process 1, and is late before it
    if n == 70 and me == 1: os.kill(os.getpid(), signal.SIGSTOP)
"""
    )
    assert _run(here, 2, source, "--stall-timeout", 3, "--kill-grace", 1) == 124
    err = capfd.readouterr().err
    line = (
        r"\[launch\] process 1 \(pid \d+\) finished no step for \d+\.\d s "
        r"\(--stall-timeout 3\); its last ended"
    )
    assert re.search(line + r" at \d\d:\d\d:\d\d\. It is stopped by a signal\.", err)


@pytest.mark.slow
def test_before_the_first_step_the_start_timeout_counts(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = WAIT + "time.sleep(2.5)\nstep()\n"
    assert _run(here, 2, source, "--stall-timeout", 2) == 0
    assert capfd.readouterr().err == ""
    assert _run(here, 2, WAIT + "time.sleep(300)\n", "--start-timeout", 0.5) == 124
    err = capfd.readouterr().err
    assert re.search(r"finished no first step in \d+\.\d s \(--start-timeout 0\.5\)\.", err)


@pytest.mark.slow
def test_a_process_that_is_done_is_not_late(here: Path) -> None:
    source = WAIT + "step()\nfor n in range(80 * me):\n    time.sleep(0.05)\n    step()\n"
    assert _run(here, 2, source, "--stall-timeout", 3) == 0


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as it is without nohup, under which it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(
    ("number", "passed_on", "code"),
    [
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGHUP, signal.SIGTERM, 143),
        (signal.SIGUSR1, signal.SIGTERM, 143),
    ],
    ids=["term", "int", "hup", "usr1"],
)
def test_signals_are_passed_on(
    here: Path,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    passed_on: signal.Signals,
    code: int,
) -> None:
    source = f"""
def save(got, frame):
    time.sleep(0.2)
    print("saved at", signal.Signals(got).name)
    sys.exit(0)
signal.signal({int(passed_on)}, save)
note(); wait_for_all()
if me == 0: os.kill(os.getppid(), {int(number)})
time.sleep(300)
"""
    assert _run(here, 2, source, "--max-restarts", 2) == code
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[{i}] saved at {passed_on.name}" for i in range(2)]
    assert f"Got {number.name}. Ending all, in {5 if code == 130 else 30} s at most." in err
    assert "Starting again" not in err


def test_a_signal_that_all_processes_get_is_no_failure(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (
        WAIT + "if me == 0:\n    os.kill(os.getppid(), signal.SIGTERM)\n    sys.exit(143)\n"
        "time.sleep(300)\n"
    )
    assert _run(here, 2, source, "--max-restarts", 3) == 143
    err = capfd.readouterr().err
    assert "[launch] Got SIGTERM. Ending " in err
    assert "Attempt" not in err


def test_the_grace_after_a_signal_is_limited(here: Path) -> None:
    source = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    source += "if me == 0: os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(300)\n"
    assert _run(here, 2, source, "--grace", 0.3) == 143


def test_one_that_fails_shortens_the_grace(here: Path) -> None:
    source = "if me: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    source += "if me: os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(300)\n"
    began = time.monotonic()
    assert _run(here, 2, source, "--grace", 200, "--kill-grace", 0.3) == 143
    assert time.monotonic() - began < 60


def test_a_second_interrupt_means_at_once(here: Path) -> None:
    source = """
def again(*_):
    os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getppid(), signal.SIGINT)
signal.signal(signal.SIGTERM, again)
note()
os.kill(os.getppid(), signal.SIGTERM)
while True: time.sleep(1)
"""
    began = time.monotonic()
    assert _run(here, 1, source, "--grace", 200) == 143
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "numbers",
    sweep(1, [(signal.SIGINT, signal.SIGINT), (signal.SIGHUP, signal.SIGINT)]),
    ids=["int", "hup"],
)
@pytest.mark.usefixtures("hangup")
def test_an_interrupt_after_another_signal_kills(
    here: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    source = f"""
for number in {tuple(map(int, numbers))} + (signal.SIGTERM,):
    signal.signal(number, signal.SIG_IGN)
note(); wait_for_all()
if me == 0:
    os.kill(os.getppid(), {int(numbers[0])})
    time.sleep(1)
    os.kill(os.getppid(), {int(numbers[1])})
time.sleep(300)
"""
    began = time.monotonic()
    assert _run(here, 2, source, "--grace", 200, "--kill-grace", 200) == (
        130 if numbers[0] == signal.SIGINT else 143
    )
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_processes_are_started(
    here: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started: list[int] = []

    def start(self: Member, *arguments: Any) -> None:
        real(self, *arguments)
        started.append(self.pid)
        if len(started) == 2:
            os.kill(os.getpid(), number)

    real = Member.__init__
    monkeypatch.setattr(Member, "__init__", start)
    assert _run(here, 3, "note(); time.sleep(300)\n") == 128 + number
    assert len(started) == 3
    assert not any(map(is_running, started))
    (here / f"pid-{started[0]}").touch()  # it may have had no time to


@pytest.mark.parametrize(
    ("culprit", "words"),
    sweep(
        1,
        [
            ("sys.exit(0)", r"process 1 \(pid \d+\) ended with exit code 0 before the others\."),
            (
                "os.kill(os.getpid(), signal.SIGSTOP)",
                r"process 1 \(pid \d+\) is stopped by a signal\.",
            ),
        ],
        unpack=True,
    ),
)
def test_what_a_failed_process_may_have_waited_for_is_named(
    here: Path, capfd: pytest.CaptureFixture[str], culprit: str, words: str
) -> None:
    source = WAIT + f"if me == 1: {culprit}\ntime.sleep(1); sys.exit(5)\n"
    assert _run(here, 2, source) == 5
    assert re.search(
        r"process 0 \(pid \d+\) ended with exit code 5\. " + words, capfd.readouterr().err
    )


def test_more_processes_than_the_soft_limit_of_files_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        allow_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (656, hard)
        allow_files(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (656, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_restarts(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
attempt = os.environ["JAXPIPE_RESTART"]
print("attempt", attempt, os.environ["JAX_COORDINATOR_ADDRESS"])
note(); wait_for_all()
if attempt != "2" and me == 1: sys.exit(9)
if attempt != "2": time.sleep(300)
"""
    options = ("--max-restarts", 2, "--log-dir", here.parent / "logs")
    assert _run(here, 2, source, *options) == 0
    out, err = capfd.readouterr()
    assert "Attempt 1 of 3 ended with exit code 9. Starting again." in err
    assert "Attempt 2 of 3 ended with exit code 9. Starting again in 1 s." in err
    assert "Attempt 3 of 3 ended with exit code 0." in err
    mine = [line.split() for line in out.splitlines() if line.startswith("[0]")]
    assert [line[2] for line in mine] == ["0", "1", "2"]
    assert len({line[3] for line in mine}) > 1, "each attempt has a port of its own"
    log = (here.parent / "logs" / "process-1.log").read_text().splitlines()
    assert [line.split()[1] for line in log] == ["0", "1", "2"]


@pytest.mark.slow
def test_restarts_are_counted(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(here, 1, "note(); sys.exit(9)\n", "--max-restarts", 1) == 9
    assert "Attempt 2 of 2 ended with exit code 9.\n" in capfd.readouterr().err


def test_the_launcher_is_killed(here: Path) -> None:
    program = script(here.parent, COMMON + WAIT + "time.sleep(300)\n")
    with start("--nproc", 2, program, here) as launcher:
        wait_until(lambda: len(list(here.glob("ready-*"))) == 2)
        launcher.kill()


def test_handlers_are_given_back(here: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert _run(here, 1, "note()\n") == 0
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before


@pytest.mark.slow
def test_nothing_is_left_open(here: Path) -> None:
    assert _run(here, 1, "note()\n") == 0
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert (
        _run(
            here, 2, "note(); sys.exit(1)\n", "--max-restarts", 1, "--log-dir", here.parent / "logs"
        )
        == 1
    )
    assert len(list(Path("/proc/self/fd").iterdir())) == before
