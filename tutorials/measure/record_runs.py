"""Records the runs that the server's page and the chapters play, each on the embedded model with a small cache.

    python -m tutorials.measure.record_runs

Writes nanovllm/topics/server/page/runs/*.json, and an index of them. Tokens are the same each time; the
times in the files are the machine's.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

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


class Recorded(NamedTuple):
    """A run, and what the player says of it."""

    title: str
    explanation: str
    requests: list[tuple[Prompt, Params, int]]  # the last one: the step before which it arrives
    options: dict[str, Any]  # of the engine


def together(*lengths: int) -> list[tuple[Prompt, Params, int]]:
    """As many stories as there are lengths, all from the first step on."""
    return [(text, fixed_length(n), 0) for text, n in zip(STORIES, lengths)]


EIGHT = together(30, 8, 14, 11, 9, 24, 6, 16)
FOUR_SEATS = {"num_blocks": 40, "max_num_seqs": 4}
SIX = together(24, 4, 6, 3, 8, 5)
ONE_SEAT = {"num_blocks": 24, "max_num_seqs": 1}
# four requests, of which the cache holds two and a half
FOUR = [(text, fixed_length(36), 2 * i) for i, text in enumerate(STORIES[:4])]
SCARCE = {"num_blocks": 28, "enable_prefix_caching": False}
BEGINNING = "Once upon a time there was"  # six tokens
SHY = f"{BEGINNING} a shy"  # eight
LUNA = f"{SHY} fox named Luna who lived on a green hill."
RUNS = {
    "continuous_batching": Recorded(
        "Continuous batching",
        "The same eight requests: a request that waits takes a seat in the step after it becomes free, "
        "so all have their answers in far fewer steps.",
        EIGHT,
        FOUR_SEATS,
    ),
    "static_batching": Recorded(
        "Static batching",
        "Four requests start together, and the next four start when the last of them has ended: "
        "watch how few blocks are in use while one long answer is awaited.",
        EIGHT,
        FOUR_SEATS | {"scheduler_cls": StaticBatching},
    ),
    "first_come": Recorded(
        "One seat: first come, first served",
        "Six requests come together, and one runs at a time. The first wants 24 tokens, the others "
        "3 to 8: all of them wait until the long answer has ended.",
        SIX,
        ONE_SEAT,
    ),
    "shortest_first": Recorded(
        "One seat: shortest first",
        "The same six requests, and the shortest answer is the next: five have theirs "
        "before the long one begins. The last step is the same.",
        SIX,
        ONE_SEAT | {"scheduler_cls": ShortestFirst},
    ),
    "prefix_hit": Recorded(
        "A prefix hit",
        "The second prompt begins with the same eight tokens: their two blocks get a second owner. "
        "When both have ended, the third request still finds them, until others overwrite them.",
        [
            (f"{SHY} fox who", fixed_length(8), 0),
            (f"{SHY} cat who", fixed_length(8), 4),
            (f"{SHY} duck who", fixed_length(6), 14),
        ],
        {"num_blocks": 8},
    ),
    "copy_on_write": Recorded(
        "Copy-on-write",
        "Three answers share the two blocks of a prompt of six tokens. Each writes its first token "
        "into the second block: two of them copy it before, and the third keeps it.",
        [(BEGINNING, fixed_length(10, n=3, temperature=1.0, top_k=20, seed=5), 0)],
        {"num_blocks": 16, "enable_prefix_caching": False},
    ),
    "shared_prefix": Recorded(
        "A shared prefix, and copy-on-write",
        "Three answers share the blocks of their prompt, and a write into a shared block copies it "
        "first; the second request begins like the first, and finds the full blocks of its prompt.",
        [
            (f"{LUNA} One windy day she", fixed_length(14, n=3, temperature=1.0, seed=4), 0),
            (f"{LUNA} One morning she saw", fixed_length(12, n=2, temperature=1.0, seed=5), 8),
            (f"{LUNA} Every day", fixed_length(10), 24),
        ],
        {"num_blocks": 40},
    ),
    "preemption_recompute": Recorded(
        "Preemption: compute again",
        "When the running requests need more blocks than there are, the one that came last loses "
        "all of its blocks and waits; later its tokens are computed again in a single step.",
        FOUR,
        SCARCE,
    ),
    "preemption_swap": Recorded(
        "Preemption: swap",
        "The same requests, but the blocks of the one that gives way are copied to the host's "
        "memory, and come back, into other blocks, when there is room.",
        FOUR,
        SCARCE | {"preemption_mode": "swap", "swap_gib": 0.0003},
    ),
    "beam_search": Recorded(
        "Beam search",
        "Four beams are one request. After each token some beams fork and others are dropped: "
        "what they have in common stays shared, and a dropped beam's own blocks are free at once.",
        [(BEGINNING, BeamSearchParams(beam_width=4, max_tokens=36, ignore_eos=True), 0)],
        {"num_blocks": 44, "enable_prefix_caching": False},
    ),
}


def main() -> None:
    HERE.mkdir(parents=True, exist_ok=True)
    index = []
    for name, run in RUNS.items():
        file = HERE / f"{name}.json"
        record(run, file)
        index.append({"file": file.name, "title": run.title})
        print(file)
    (HERE / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def record(run: Recorded, file: Path) -> None:
    """Runs the requests and writes a frame for every step. If the engine is idle, the next request
    arrives at once."""
    llm = LLM(block_size=BLOCK_SIZE, **run.options)
    frames: list[dict] = []
    prompts: dict[str, str] = {}
    camera = Camera(llm)
    begin = time.perf_counter()

    def observe(schedule: Schedule, seconds: float) -> None:
        camera.start_over()  # each frame is whole: one can go to any of them
        frames.append(camera.frame([schedule], seconds, time.perf_counter() - begin))

    llm.observers.append(observe)
    try:
        for prompt, params, step in run.requests:
            while len(frames) < step and llm.has_unfinished():
                llm.step()
            name = llm.add_request(prompt, params)
            prompts[name] = (llm.requests[name].prompt or "")[:80]
        while llm.has_unfinished():
            llm.step()
    finally:
        llm.observers.remove(observe)
    head = {"title": run.title, "explanation": run.explanation, "prompts": prompts}
    file.write_text(text_of(head, frames), encoding="utf-8")


def text_of(head: dict[str, Any], frames: list[dict]) -> str:
    """JSON with one line for each frame, so that a diff shows which frame has changed."""
    lines = [json.dumps(frame, separators=(",", ":")) for frame in frames]
    joined = ",\n".join(lines)
    return f'{json.dumps(head, indent=1)[:-2]},\n "frames": [\n{joined}\n]}}\n'


if __name__ == "__main__":
    main()
