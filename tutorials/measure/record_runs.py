"""Records the runs that the server's page and the chapters play, each on the embedded model with a small cache.

    python -m tutorials.measure.record_runs

Writes nanovllm/topics/server/page/runs/*.json, and an index of them. Tokens are the same each time; the
times in the files are the machine's.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.processing.inputs import Params
from nanovllm.processing.messages import Prompt
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.server.live import Camera
from tutorials.baselines.static_batching import StaticBatching

HERE = Path(__file__).resolve().parents[2] / "nanovllm" / "topics" / "server" / "page" / "runs"
BLOCK_SIZE = 4
STORIES = [
    "Once upon a time there was a shy fox",
    "tell me a story about a duck",
    "introduce yourself",
    "list all prime numbers within 100",
    "One windy day she lost her little bell",
    "count from 3 to 30",
    "reverse the words: river stone apple cloud",
    "Why do you cry?",
]


class ShortestFirst(Scheduler):
    """That of chapter 03."""

    def priority(self, request: Request) -> tuple[int, int]:
        return request.params.max_tokens, request.arrival


def fixed_length(max_tokens: int, **options) -> SamplingParams:
    """Exactly this number of tokens, the likeliest ones unless a seed is given."""
    options = {"temperature": 0} | options
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def together(lengths: list[int], file: Path, title: str, explanation: str, **options) -> None:
    """As many stories as there are lengths, all from the first step on."""
    llm = LLM(block_size=BLOCK_SIZE, **options)
    requests = [(text, fixed_length(n), 0) for text, n in zip(STORIES, lengths)]
    record(llm, requests, file, title, explanation)


def batching(file: Path, title: str, explanation: str, **options) -> None:
    lengths = [30, 8, 14, 11, 9, 24, 6, 16]
    together(lengths, file, title, explanation, num_blocks=40, max_num_seqs=4, **options)


def static_batching(file: Path) -> None:
    title = "Static batching"
    explanation = (
        "Four requests start together, and the next four start when the last of them has ended: "
        "watch how few blocks are in use while one long answer is awaited."
    )
    batching(file, title, explanation, scheduler_cls=StaticBatching)


def continuous_batching(file: Path) -> None:
    title = "Continuous batching"
    explanation = (
        "The same eight requests: a request that waits takes a seat in the step after it becomes free, "
        "so all have their answers in far fewer steps."
    )
    batching(file, title, explanation)


def one_seat(file: Path, title: str, explanation: str, **options) -> None:
    together(
        [24, 4, 6, 3, 8, 5], file, title, explanation, num_blocks=24, max_num_seqs=1, **options
    )


def first_come(file: Path) -> None:
    title = "One seat: first come, first served"
    explanation = (
        "Six requests come together, and one runs at a time. The first wants 24 tokens, the others "
        "3 to 8: all of them wait until the long answer has ended."
    )
    one_seat(file, title, explanation)


def shortest_first(file: Path) -> None:
    title = "One seat: shortest first"
    explanation = (
        "The same six requests, and the shortest answer is the next: five have theirs "
        "before the long one begins. The last step is the same."
    )
    one_seat(file, title, explanation, scheduler_cls=ShortestFirst)


def scarce(file: Path, title: str, explanation: str, **options) -> None:
    """Four requests, of which the cache holds two and a half."""
    llm = LLM(block_size=BLOCK_SIZE, num_blocks=28, enable_prefix_caching=False, **options)
    requests = [(text, fixed_length(36), 2 * i) for i, text in enumerate(STORIES[:4])]
    record(llm, requests, file, title, explanation)


def preemption_recompute(file: Path) -> None:
    title = "Preemption: compute again"
    explanation = (
        "When the running requests need more blocks than there are, the one that came last loses "
        "all of its blocks and waits; later its tokens are computed again in a single step."
    )
    scarce(file, title, explanation)


def preemption_swap(file: Path) -> None:
    title = "Preemption: swap"
    explanation = (
        "The same requests, but the blocks of the one that gives way are copied to the host's "
        "memory, and come back, into other blocks, when there is room."
    )
    scarce(file, title, explanation, preemption_mode="swap", swap_gib=0.0003)


def prefix_hit(file: Path) -> None:
    title = "A prefix hit"
    explanation = (
        "The second prompt begins with the same eight tokens: their two blocks get a second owner. "
        "When both have ended, the third request still finds them, until others overwrite them."
    )
    start = "Once upon a time there was a shy"  # eight tokens
    requests = [
        (f"{start} fox who", fixed_length(8), 0),
        (f"{start} cat who", fixed_length(8), 4),
        (f"{start} duck who", fixed_length(6), 14),
    ]
    record(LLM(block_size=BLOCK_SIZE, num_blocks=8), requests, file, title, explanation)


def copy_on_write(file: Path) -> None:
    title = "Copy-on-write"
    explanation = (
        "Three answers share the two blocks of a prompt of six tokens. Each writes its first token "
        "into the second block: two of them copy it before, and the third keeps it."
    )
    samples = fixed_length(10, n=3, temperature=1.0, top_k=20, seed=5)
    llm = LLM(block_size=BLOCK_SIZE, num_blocks=16, enable_prefix_caching=False)
    record(llm, [("Once upon a time there was", samples, 0)], file, title, explanation)


def shared_prefix(file: Path) -> None:
    title = "A shared prefix, and copy-on-write"
    explanation = (
        "Three answers share the blocks of their prompt, and a write into a shared block copies it "
        "first; the second request begins like the first, and finds the full blocks of its prompt."
    )
    start = "Once upon a time there was a shy fox named Luna who lived on a green hill."
    sampled = fixed_length(14, n=3, temperature=1.0, seed=4)
    requests = [
        (f"{start} One windy day she", sampled, 0),
        (f"{start} One morning she saw", fixed_length(12, n=2, temperature=1.0, seed=5), 8),
        (f"{start} Every day", fixed_length(10), 24),
    ]
    record(LLM(block_size=BLOCK_SIZE, num_blocks=40), requests, file, title, explanation)


def beam_search(file: Path) -> None:
    title = "Beam search"
    explanation = (
        "Four beams are one request. After each token some beams fork and others are dropped: "
        "what they have in common stays shared, and a dropped beam's own blocks are free at once."
    )
    beams = BeamSearchParams(beam_width=4, max_tokens=36, ignore_eos=True)
    llm = LLM(block_size=BLOCK_SIZE, num_blocks=44, enable_prefix_caching=False)
    record(llm, [("Once upon a time there was", beams, 0)], file, title, explanation)


RUNS: list[Callable[[Path], None]] = [
    continuous_batching,
    static_batching,
    first_come,
    shortest_first,
    prefix_hit,
    copy_on_write,
    shared_prefix,
    preemption_recompute,
    preemption_swap,
    beam_search,
]


def main() -> None:
    HERE.mkdir(parents=True, exist_ok=True)
    index = []
    for run in RUNS:
        file = HERE / f"{run.__name__}.json"
        run(file)
        index.append({"file": file.name, "title": json.loads(file.read_bytes())["title"]})
        print(file)
    (HERE / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def record(
    llm: LLM,
    requests: Iterable[tuple[Prompt, Params | None, int]],
    file: str | Path,
    title: str = "",
    explanation: str = "",
) -> None:
    """Runs requests and writes a frame for every step. Each request arrives before the step that it
    names; if the engine is idle, the next request arrives at once."""
    frames: list[dict] = []
    prompts: dict[str, str] = {}
    camera = Camera(llm)
    begin = time.perf_counter()

    def observe(schedule: Schedule, seconds: float) -> None:
        camera.start_over()  # each frame is whole: one can go to any of them
        frames.append(camera.frame([schedule], seconds, time.perf_counter() - begin))

    llm.observers.append(observe)
    try:
        for prompt, params, step in sorted(requests, key=lambda request: request[2]):
            while len(frames) < step and llm.has_unfinished():
                llm.step()
            name = llm.add_request(prompt, params)
            prompts[name] = (llm.requests[name].prompt or "")[:80]
        while llm.has_unfinished():
            llm.step()
    finally:
        llm.observers.remove(observe)
    head = {"title": title, "explanation": explanation, "prompts": prompts}
    Path(file).write_text(text_of(head, frames), encoding="utf-8")


def text_of(head: dict[str, Any], frames: list[dict]) -> str:
    """JSON with one line for each frame, so that a diff shows which frame has changed."""
    lines = [json.dumps(frame, separators=(",", ":")) for frame in frames]
    joined = ",\n".join(lines)
    return f'{json.dumps(head, indent=1)[:-2]},\n "frames": [\n{joined}\n]}}\n'


if __name__ == "__main__":
    main()
