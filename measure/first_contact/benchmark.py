"""Section 5: bench.py, as a program of its own."""

import json
import sys
from functools import partial

from measure.first_contact.section import MODEL, Section, run


def benchmark(section: Section) -> None:
    """bench.py, on half of nano-vllm's workload, with a short and a long `max_model_len`."""
    for longest in (256,) if section.cpu else (4096, 40960):
        name = f"max_model_len {longest}"
        section.case(name, partial(bench, section, longest))
        print(*section.cases.get(name, {}).get("tail", []), sep="\n")
        print(flush=True)


def bench(section: Section, longest: int) -> dict:
    work = ["--random-weights", MODEL, "--workload", "nano-vllm", "--requests", "128"]
    if section.cpu:
        work = ["--model", section.model(), "--requests", "4", "--tokens", "4", "8"]
    file = section.folder / "bench.json"
    options = ["--rounds", "1", "--max-model-len", str(longest), "--json", str(file)]
    result = run([sys.executable, "bench.py", *work, *options], section.seconds_left())
    return result | {"report": json.loads(file.read_text())} if result["status"] == 0 else result
