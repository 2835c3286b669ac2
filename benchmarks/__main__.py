"""Run all benchmarks, one after another, and draw their pictures.

Each runs in a process of its own and prints its tables. Output, tables, machine and versions go to
`<out>/results.json`, pictures beside it. --quick takes small sizes and few repeats, to see that everything runs; its
figures mean nothing.

Run: python -m benchmarks [--quick] [--only bubble,work] [--peer-python PATH] [--out benchmarks/plots]
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

from benchmarks._plots import draw
from benchmarks._table import read_tables

QUICK = {
    "bubble": ["--cell-ms", "20", "--sizes", "4x8", "--steps", "1"],
    "work": ["--repeats", "2"],
    "update": ["--repeats", "2"],
    "memory": [],
    "compile": [],
    "peers": ["--repeats", "1", "--sizes", "64x4x32x4", "--microbatches", "8"],
    "processes": ["--repeats", "1"],
    "checkpoint": ["--repeats", "1"],
    "gpu": ["--smoke"],
}
"""The benchmarks in the order in which they run, and what makes each quick."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "matplotlib")


def run(name: str, arguments: list[str]) -> dict[str, object]:
    """Run one benchmark, its output shown as it comes.

    Returns:
        Command, exit status, seconds, output and tables.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    print(f"\n## {name}: python {' '.join(command[1:])}\n", flush=True)
    began, lines = time.monotonic(), []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    status, output = process.wait(), "".join(lines)
    took = round(time.monotonic() - began, 1)
    print(f"\n{name}: exit status {status}, {took} s", flush=True)
    command = ["python", *command[1:]]
    return {"command": command, "status": status, "seconds": took, "output": output, "tables": read_tables(output)}


def machine() -> dict[str, object]:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--only", default=",".join(QUICK), help="names of benchmarks")
    parser.add_argument("--peer-python", help="interpreter with torch and DeepSpeed, for peers")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/plots"), help="where results and pictures go")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(QUICK):
        parser.error(f"--only must name benchmarks of {', '.join(QUICK)}, but got {', '.join(sorted(unknown))}.")
    results: dict[str, dict[str, object]] = {}
    path = options.out / "results.json"
    options.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        more = ["--peer-python", options.peer_python] if name == "peers" and options.peer_python else []
        results[name] = run(name, [*(QUICK[name] if options.quick else []), *more])
        path.write_text(json.dumps({**machine(), "quick": options.quick, "benchmarks": results}, indent=1) + "\n")
    for said in draw({name: found["tables"] for name, found in results.items()}, options.out):
        print(said)
    if failed := [name for name, found in results.items() if found["status"]]:
        raise SystemExit(f"some benchmarks failed or were left out, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
