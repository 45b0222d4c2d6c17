"""Say what there is on this machine, what works, and the command that mends what does not.

Everything that needs torch is looked at in another process (`probes.py`), which may raise, hang or
be killed: this one only needs Python, and always prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_ops import __version__, probes, variables

Found = dict[str, Any]

TIMEOUT = 300
REPORT = "https://github.com/ROCm/aiter/issues"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="all that was found, as JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"after so long a process that looks is given up (default {TIMEOUT})",
    )
    parser.add_argument("--probe", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """Print the report; return 0 where nothing is wrong, 1 where something is."""
    if arguments.probe:
        return probe(arguments.probe, arguments.into)
    report = examine(arguments.timeout)
    print(json.dumps(report, indent=1) if arguments.json else text(report))
    return 1 if report["problems"] else 0


def probe(names: Sequence[str], into: Path) -> int:
    """Run probes in this process, and write a line of JSON before and after each. The first that
    fails is the last: what it left behind is not to be trusted."""
    with into.open("a", buffering=1) as file:
        for name in names:
            print(json.dumps({"begin": name}), file=file)
            kind, *options = name.split()
            try:
                result: Found = {"found": probes.PROBES[kind](*options)}
            except probes.Ill as ill:
                result = {"found": ill.found, "what": str(ill), "fix": ill.fix}
            except Exception as error:  # whatever is broken: telling so is what this is for
                result = {"what": f"{name}: {type(error).__name__}: {error}", "fix": ""}
            print(json.dumps({"end": name} | result, default=str), file=file)
            if "what" in result:
                return 1
    return 0


def examine(timeout: float = TIMEOUT) -> Found:
    """Run every probe and return the report."""
    report: Found = {
        "mla_ops": {"version": __version__, "path": str(Path(__file__).parent)},
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
        },
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("MLA_OPS_")
        },
        "problems": [{"what": what, "fix": fix} for what, fix in variables.mistakes(os.environ)],
    }
    names = [name for name in probes.PROBES if name != "smoke"]
    for name in names:
        report[name] = {}
    _run(["torch"], report, timeout)
    if not report["torch"]:
        return report
    _run(names[1:], report, timeout)
    served = dict.fromkeys(
        (row["device"], row["backend"])
        for row in report["backends"].get("backends", ())
        if row["verdict"] != "no"
    )
    report["smoke"] = {}
    _run([f"smoke {device} {backend}" for device, backend in served], report["smoke"], timeout)
    report["problems"] += report["smoke"].pop("problems", [])
    return report


def _run(names: list[str], report: Found, timeout: float) -> None:
    """Run probes, in as many processes as it takes, into `report`."""
    problems = report.setdefault("problems", [])
    while names:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "found"
            into.touch()
            ended = _process(names, into, timeout)
            lines = [json.loads(line) for line in into.read_text().splitlines()]
        for line in lines:
            if "end" in line:
                report[line["end"]] = line.get("found", {})
                if "what" in line:
                    problems.append({"what": line["what"], "fix": line["fix"]})
        done = [line["end"] for line in lines if "end" in line]
        begun = [line["begin"] for line in lines if "begin" in line]
        if len(begun) == len(done) and not done:
            problems.append({"what": f"cannot look at anything: {ended}", "fix": ""})
            return
        if len(begun) > len(done):
            problems.append(
                {"what": f"{begun[-1]}: the process {ended}", "fix": FIXES[begun[-1].split()[0]]}
            )
        names = names[len(begun) :]


# Where a probe took its process with it.
FIXES = {
    "torch": "pip install --force-reinstall torch",
    "devices": "rocm-smi or nvidia-smi: does the driver work?",
    "compiled": "pip install --no-build-isolation --force-reinstall --no-deps .",
    "aiter": f"pip uninstall amd-aiter, or report it: {REPORT}",
    "backends": "pip install --no-build-isolation --force-reinstall --no-deps .",
    "smoke": "MLA_OPS_BACKEND=torch until it is mended; please report it with `doctor --json`",
}


def _process(names: Sequence[str], into: Path, timeout: float) -> str:
    """Run this module's other half; return how it ended."""
    started = sys.orig_argv[1:]  # python's own options: the other process is to see what this does
    options = started[: started.index("-m")] if "-m" in started else []
    command = [sys.executable, *options, "-m", "mla_ops", "doctor"]
    # The package that is running, wherever this one came from.
    path = os.pathsep.join(
        [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    # Values that are refused have been told already, and would hide the rest.
    environment = {
        name: value for name, value in os.environ.items() if not variables.mistakes({name: value})
    }
    try:
        done = subprocess.run(
            [*command, "--into", str(into), "--probe", *names],
            env=environment | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"had not ended after {timeout:g} s"
    if done.returncode < 0:
        return f"was killed by {signal.Signals(-done.returncode).name}"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"ended with exit code {done.returncode}: {last}"


def text(report: Found) -> str:
    """Return the report as people read it."""
    torch, compiled, aiter = report["torch"], report["compiled"], report["aiter"]
    lines = [
        f"mla_ops   {report['mla_ops']['version']} in {report['mla_ops']['path']}",
        f"python    {report['python']['version']}, {report['python']['executable']}, "
        f"{report['python']['platform']}",
        f"torch     {torch['version']} for {torch['built_for']} in {torch['path']}"
        if torch
        else "torch     none that works",
    ]
    for device in report["devices"].get("devices", ()):
        lines.append(
            f"{'device' if device['device'] != 'cpu' else 'cpu':9} {device['device']}: "
            f"{device['name']} ({device['arch']}), {device['multiprocessors']} "
            f"{'processors' if device['device'] == 'cpu' else 'multiprocessors'}, "
            f"{device['memory_bytes'] / 1e9:.0f} GB, its float8 is {device['float8']}"
        )
    if compiled:
        gpus = ", ".join(compiled["gpu_architectures"]) or "no GPU"
        lines.append(
            f"compiled  revision {compiled['git_revision']}, by {compiled['compiler']}, with torch "
            f"{compiled['torch']}, for {', '.join(compiled['cpu_isas'])} (in use: "
            f"{compiled['cpu_isa']}) and {gpus}"
        )
    elif torch:
        lines.append("compiled  nothing that works")
    if aiter.get("installed"):
        verdict = aiter["unusable"] or "its signatures are known"
        lines.append(f"aiter     {aiter['version'] or 'no release'} in {aiter['path']}: {verdict}")
        lines += [f"          {note}" for note in aiter["notes"]]
    elif aiter:
        lines.append("aiter     not installed")
    for name, value in report["environment"].items():
        lines.append(f"variable  {name}={value}")
    rows = report["backends"].get("backends", ())
    for device in dict.fromkeys(row["device"] for row in rows):
        lines.append(f"\nbackends for DeepSeek's sizes, float8 cache, on {device}")
        lines += [
            f"  {row['backend']:7} {row['kernel']}: {row['verdict']}: {row['reason']}"
            for row in rows
            if row["device"] == device
        ]
    checks = report.get("smoke", {})
    if checks:
        lines.append("\ncheck against the float64 oracle (relative error of the worst row)")
    for name, found in checks.items():
        errors = found.get("errors", {})
        told = ", ".join(f"{error:.1e} {dtype} cache" for dtype, error in errors.items())
        right = errors and all(error <= found["bar"] for error in errors.values())
        lines.append(f"  {name.removeprefix('smoke '):16} {'right' if right else 'FAILED'}  {told}")
    lines.append("")
    for problem in report["problems"]:
        lines += textwrap.wrap(f"WRONG: {problem['what']}", 100, subsequent_indent="       ")
        if problem["fix"]:
            lines.append(f"       mend it: {problem['fix']}")
    if not report["problems"]:
        lines.append("nothing is wrong")
    return "\n".join(lines)
