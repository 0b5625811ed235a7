"""The first minutes on a GPU: what runs, whether it is right, how fast, and where the time goes.

Each section runs in a process of its own, so that an illegal access or a hanging kernel in one
spares the others. Its results are in a JSON file, written before and after each case: what has
ended is not lost, and where the clock has ended a section one reads what it was doing.

Run: python -m measure.first_contact [--sections 2,3] [--out DIR] [--minutes 9]
With --cpu the same code runs without a GPU, in Triton's interpreter with tiny sizes.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from measure.first_contact.apart import interpreter_problem, run_apart
from measure.first_contact.job import MINUTES, SECTIONS, job_of
from tutorials.machine import installed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m measure.first_contact",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    everything = ",".join(str(i) for i in range(1, len(SECTIONS) + 1))
    parser.add_argument("--sections", default=everything, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("first_contact"), help="folder for the results"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument(
        "--cpu", action="store_true", help="without a GPU, in Triton's interpreter, tiny"
    )
    return parser.parse_args()


def report(results: dict) -> None:
    """What a section says of itself at its end."""
    print(f"--- {results.get('seconds', 0):.0f} s")
    if results.get("skipped"):
        print(f"--- its time was over before: {', '.join(results['skipped'])}")
    print(f"--- ERROR: {results['error']}" if "error" in results else "--- no errors")
    print(flush=True)


def main() -> None:
    args = arguments()
    problem = interpreter_problem(installed("triton"), installed("numpy"))
    if args.cpu and problem:
        sys.exit(f"--cpu needs Triton's interpreter: {problem}")
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.cpu:
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    end = time.time() + 60 * args.minutes
    errors = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the section ends, too
    for number in map(int, args.sections.split(",")):
        name = list(SECTIONS)[number - 1]
        share = SECTIONS[name] * args.minutes / MINUTES
        deadline = end if number == len(SECTIONS) else min(end, time.time() + share)
        print(f"=== {number}: ", end="", flush=True)
        results = run_apart(job_of(name, args.out, deadline, args.cpu))
        errors += "error" in results
        report(results)
    sys.exit(errors)


if __name__ == "__main__":
    main()
