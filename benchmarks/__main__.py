"""Run all benchmarks, one after another, and draw their pictures.

Each runs in a process of its own and prints its tables. Output, tables, machine and versions of
each go to `<out>/results.json`, beside those of earlier runs of others, and the pictures of all of
them into the same folder. --draw only draws. --quick takes small sizes and few repeats, to see that
everything runs, and keeps its results, which mean nothing, apart in `<out>/quick`.

Run: python -m benchmarks [--quick] [--only bubble,work] [--draw] [--peer-python PATH] [--out
benchmarks/plots]
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._plots import draw
from benchmarks._table import read_tables

QUICK = {
    "bubble": ["--action-ms", "20", "--sizes", "4x8", "--steps", "1"],
    "work": ["--repeats", "2"],
    "update": ["--repeats", "2"],
    "memory": ["--stages", "2", "--only", "1f1b,gpipe"],
    "compile": ["--repeats", "1"],
    "peers": ["--repeats", "1", "--sizes", "64x4x32x4", "--microbatches", "8"],
    "jax_peers": ["--smoke"],
    "processes": ["--repeats", "1"],
    "checkpoint": ["--repeats", "1"],
    "vocab": ["--repeats", "1"],
    "gpu": ["--smoke"],
    "gpu_program": ["--smoke"],
    "peers_compiled": ["--smoke"],
}
"""The benchmarks in the order in which they run, and what makes each quick."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "matplotlib")


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run one benchmark, its output shown as it comes.

    Returns:
        Command, exit status, seconds, output and tables.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    print(f"\n## {name}: python {' '.join(command[1:])}\n", flush=True)
    began, lines = time.monotonic(), []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    status, output = process.wait(), "".join(lines)
    took = round(time.monotonic() - began, 1)
    print(f"\n{name}: exit status {status}, {took} s", flush=True)
    shown = [
        "python",
        *(Path(part).name if Path(part).is_absolute() else part for part in command[1:]),
    ]
    told = {"command": shown, "status": status, "seconds": took, "machine": machine()}
    return {**told, "output": output, "tables": read_tables(output)}


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processors": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> None:
    """Run what is asked for, write the results, draw the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--only", default=",".join(QUICK), help="names of benchmarks")
    parser.add_argument(
        "--draw", action="store_true", help="only draw the pictures of earlier results"
    )
    parser.add_argument("--peer-python", help="interpreter with torch and DeepSpeed, for peers")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/plots"), help="where results and pictures go"
    )
    options = parser.parse_args()
    names = [] if options.draw else options.only.split(",")
    if unknown := set(names) - set(QUICK):
        parser.error(
            f"--only must name benchmarks of {', '.join(QUICK)}, but got "
            f"{', '.join(sorted(unknown))}."
        )
    directory = options.out / "quick" if options.quick else options.out
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        more = (
            ["--peer-python", options.peer_python]
            if name == "peers" and options.peer_python
            else []
        )
        results[name] = run(name, [*(QUICK[name] if options.quick else []), *more])
        path.write_text(json.dumps(results, indent=1) + "\n")
    for said in draw({name: found["tables"] for name, found in results.items()}, directory):
        print(said)
    if failed := [name for name in names if results[name]["status"]]:
        raise SystemExit(f"some benchmarks failed or were left out, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
