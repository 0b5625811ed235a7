"""Section 6: the simulator's constants, fitted to steps of this machine."""

import json
import sys
from functools import partial

from measure.first_contact.section import Section, run


def calibration(section: Section) -> None:
    """`calibrate`, as a program of its own: with how much overlap do steps take what they take?"""
    section.case("machines", partial(calibrate, section))
    report = section.cases.get("machines", {}).get("report", {"fits": {}})
    for name, fit in report["fits"].items():
        errors = {overlap: f"{error['mean']:.1%}" for overlap, error in fit["errors"].items()}
        print(f"{name}: {fit['steps']} steps, off by {errors} with these overlaps", flush=True)


def calibrate(section: Section) -> dict:
    file = section.folder / "machines.json"
    options = ["--most-tokens", "100"] if section.cpu else ["--model", section.model()]
    command = [sys.executable, "-m", "tutorials.simulation.calibrate", str(file), "--rounds", "1"]
    result = run([*command, *options], section.seconds_left())
    return result | {"report": json.loads(file.read_text())} if result["status"] == 0 else result
