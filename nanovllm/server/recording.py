"""Recorded runs: what the live view would have shown, in a file that the page plays."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanovllm.engine import LLM
from nanovllm.frontend.inputs import Params
from nanovllm.frontend.messages import Prompt
from nanovllm.schedule import Schedule
from nanovllm.server.live import Camera


def record(
    llm: LLM,
    requests: Iterable[tuple[Prompt, Params | None, int]],
    file: str | Path,
    title: str = "",
    explanation: str = "",
) -> None:
    """Runs requests, each of which comes before the step that it names, and writes a frame for
    every step. If nothing is left to do, the next one comes early."""
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
    Path(file).write_text(text_of(head, frames))


def text_of(head: dict[str, Any], frames: list[dict]) -> str:
    """JSON with a line for each frame, so that a change of one shows as one."""
    lines = [json.dumps(frame, separators=(",", ":")) for frame in frames]
    joined = ",\n".join(lines)
    return f'{json.dumps(head, indent=1)[:-2]},\n "frames": [\n{joined}\n]}}\n'
