"""A section in a process of its own, which the clock ends if it does not end in time itself."""

import gc
import json
import os
import pkgutil
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from measure.first_contact.job import AT_FIRST, Job
from tutorials.report import write_json

# Neither torch nor the engine up here: only the process of a section needs them.
GRACE = 30  # seconds after its deadline in which a section may end its last case


def run_section(job: Job) -> None:
    """In a process of its own."""
    os.setpgid(0, 0)  # what it starts can be ended with it
    from measure.first_contact.section import DeviceLostError, Section

    start = time.perf_counter()
    function = pkgutil.resolve_name(job.function)
    print(f"{function.__doc__}\n", flush=True)
    gc.freeze()  # recording a graph collects garbage, and need not look at what was imported
    with tempfile.TemporaryDirectory() as folder:
        section = Section(job, Path(folder))
        try:
            function(section)
        except DeviceLostError as error:
            section.results["error"] = str(error)
        except Exception as error:
            traceback.print_exc()
            section.results["error"] = f"{type(error).__name__}: {error}"
        del section.results["doing"]
        section.results["seconds"] = time.perf_counter() - start
        section.write()
    gc.unfreeze()  # or Triton's bindings complain at the end


def run_apart(job: Job, grace: float = GRACE) -> dict:
    """Starts the section, and ends it `grace` seconds after its deadline. Returns its results."""
    job.path.unlink(missing_ok=True)
    start = time.time()
    process = get_context("spawn").Process(target=run_section, args=(job,))
    process.start()
    is_late = False
    try:
        is_late = not wait([process.sentinel], max(0.0, job.deadline + grace - start))
    finally:
        end_group(process)
    results = json.loads(job.path.read_text()) if job.path.exists() else {}
    if process.exitcode != 0:
        results["seconds"] = time.time() - start
        how = f"by the clock after {results['seconds']:.0f} seconds"
        if not is_late:
            how = status(process.exitcode)
        name = job.function.partition(":")[2]
        doing = results.get("doing", AT_FIRST)
        reasons = [f"section {name!r} was ended {how}, while it was at {doing!r}"]
        reasons += [results["error"]] if "error" in results else []
        results["error"] = "; ".join(reasons)
        write_json(results, job.path)
    return results


def end_group(process: BaseProcess) -> None:
    """Ends a section and what it has started, also what it has left behind: that holds memory."""
    with suppress(ProcessLookupError):  # there is no group before the section's first line
        os.killpg(process.ident, signal.SIGKILL)
    process.kill()
    process.join()


def interpreter_problem(triton: str | None, numpy: str | None) -> str | None:
    """Why Triton's interpreter cannot run with these versions, or None."""
    if triton is None or numpy is None:
        return None  # that there is none is told by who needs it
    if numbers(triton) < (3, 7) and numbers(numpy) >= (2, 4):
        return f"the interpreter of Triton {triton} needs numpy < 2.4, and this is {numpy}"
    return None


def numbers(version: str) -> tuple[int, ...]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def status(exit_code: int | None) -> str:
    """How a process has ended, in words: exit codes below zero are signals."""
    if exit_code is not None and exit_code < 0:
        return f"by {signal.Signals(-exit_code).name}"
    return f"with exit status {exit_code}"
