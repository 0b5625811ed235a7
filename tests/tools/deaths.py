"""Deaths at random moments: a rank is killed, or the process of rank 0 ends in one way or another.
Within ten seconds there is a sentence or an exit code, and no process is left.

    python tests/tools/deaths.py --count 10
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 10  # within which a death is noticed
SCRIPT = """
import os
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from nanovllm import LLM, SamplingParams

print(os.getpid(), flush=True)
llm = LLM(tensor_parallel_size=2, model=os.environ["MODEL"], num_blocks=64)
print("ready", flush=True)
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
while True:
    llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
"""
KINDS = ("kill a rank", "stop rank 0", "interrupt rank 0", "kill rank 0", "while it starts")
SIGNALS = {
    "kill a rank": "SIGKILL",
    "stop rank 0": "SIGTERM",
    "interrupt rank 0": "SIGINT",
    "kill rank 0": "SIGKILL",
    "while it starts": "SIGKILL",
}


def children_of(pid: int) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == pid:
            found.append(int(file.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    except FileNotFoundError:
        return False


def one_death(kind: str, model: Path, random_: random.Random) -> str:
    """What was said."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "MODEL": str(model), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    if kind != "while it starts":
        assert process.stdout.readline() == "ready\n"
        ranks = children_of(process.pid)
        assert len(ranks) == 1
        time.sleep(random_.uniform(0, 1))
    else:
        time.sleep(random_.uniform(0, 5))
        ranks = children_of(process.pid)
    victim = random_.choice(ranks) if kind == "kill a rank" else process.pid
    os.kill(victim, signal.Signals[SIGNALS[kind]])
    begin = time.monotonic()
    _, err = process.communicate(timeout=SECONDS)
    while any(map(is_alive, ranks)):
        assert time.monotonic() - begin < SECONDS, "a process is left"
        time.sleep(0.02)
    last = err.strip().splitlines()[-1] if err.strip() else f"exit code {process.returncode}"
    if kind == "kill a rank":
        assert "has died: exit code -9" in last, err
    assert process.returncode != 0
    seconds = time.monotonic() - begin
    assert seconds < SECONDS
    return f"{seconds:.1f} s: {last[:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="deaths of each kind")
    parser.add_argument("--model", type=Path, default=ROOT / "nanovllm" / "tiny_qwen3")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random_ = random.Random(args.seed)
    seen: Counter[str] = Counter()
    for i in range(args.count):
        for kind in KINDS:
            said = one_death(kind, args.model, random_)
            seen[kind] += 1
            print(f"{i + 1:3} {kind}: {said}", flush=True)
    print(
        ", ".join(f"{kind} {count} times" for kind, count in seen.items()), "and nothing was left"
    )


if __name__ == "__main__":
    main()
