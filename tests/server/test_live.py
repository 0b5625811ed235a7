"""The live view's frames say what is in the engine, it leaves nothing behind, and the recorded runs are those that the
script makes.

Run: pytest tests/server/test_live.py [-k frames]
"""

import asyncio
import importlib
import json
from collections import Counter
from itertools import pairwise

import pytest
from fake_model import FakeRunner
from frames import Reader, states_of
from server_tools import Running

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.topics.server.live import MOST_WAITING, Camera, LiveView
from nanovllm.topics.server.metrics import Metrics
from nanovllm.topics.server.page import MOST_FRAMES

STORY = "Once upon a time there was a shy fox named Luna who lived on a green hill."
TIMES = ("time", "seconds", "output_tokens_per_second")


def endless(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0} | options, max_tokens=max_tokens, ignore_eos=True)


def requests() -> list[tuple]:
    """Of every kind: they share, fork, wait, and are preempted."""
    return [
        (f"{STORY} One windy day she", endless(24, n=3, temperature=1.0, seed=4)),
        (f"{STORY} One morning", endless(50)),
        ("tell me a story about a duck", BeamSearchParams(beam_width=3, max_tokens=14)),
        ("introduce yourself", endless(70)),
        (f"{STORY} Every day", endless(20, n=2, temperature=1.0, seed=5)),
    ]


def owners_of(llm: LLM) -> dict[int, list[str]]:
    """By reading all tables: the requests that have a block, once for each sequence."""
    owners: dict[int, list[str]] = {}
    for request in llm.scheduler.unfinished():
        for seq in [] if request.is_new else request.sequences:
            for block_id in seq.block_table:
                owners.setdefault(block_id, []).append(request.request_id)
    return owners


def check_blocks_of(reader: Reader, llm: LLM) -> None:
    owners = owners_of(llm)
    for block, said in zip(llm.block_manager.blocks, reader.blocks(), strict=True):
        if block.ref_count == 0:
            assert said == (("empty",) if block.key is None else ("cached",))
        else:
            assert said[0] in owners[block.id]
            assert said[1] == len(owners[block.id]) == block.ref_count


def check_host_blocks_of(reader: Reader, llm: LLM) -> None:
    said = {i: one[1] for i, one in enumerate(reader.host_blocks()) if len(one) == 2}
    host = llm.block_manager.host
    counts = {block.id: block.ref_count for block in host.blocks if block.ref_count} if host else {}
    assert said == counts
    for (name, index), table in reader.host_tables.items():
        assert llm.requests[name].sequences[index].host_table == table


def expected_state(request, llm: LLM) -> str:
    if request in llm.scheduler.running:
        return "running"
    if request.is_new:
        return "waiting"
    if any(seq.num_host_tokens for seq in request.sequences):
        return "swapped"
    return "preempted"


def check_requests_of(frame: dict, llm: LLM) -> None:
    states = states_of(frame)
    unfinished = {r.request_id: r for r in llm.scheduler.unfinished()}
    assert states.keys() - unfinished.keys() == {*frame["ended"]}
    assert frame["running"] + frame["queue"] == [*unfinished]
    assert frame["not_listed"] == 0
    said = {request["id"]: request for request in frame["requests"]}
    assert said.keys() == unfinished.keys() and len(said) == len(frame["requests"])
    for name, request in unfinished.items():
        assert states[name] == expected_state(request, llm)
        assert said[name]["prompt"] == len(request.prompt_token_ids)
        seqs = [] if request.is_new else request.sequences
        num_own = sum(len(seq) - said[name]["prompt"] for seq in seqs)
        assert said[name]["output"] == num_own
        if len(seqs) == 1:
            assert said[name]["computed"] == seqs[0].num_computed_tokens
        assert said[name]["computed"] <= said[name]["prompt"] + num_own


def test_guesses_are_told():
    llm = LLM(num_blocks=200, speculative_config={"prompt_lookup_min": 1})
    llm.generate([[5, 6, 7] * 9], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    frame, stats = Camera(llm).frame([], 0.0, 0.0), llm.stats()
    assert 0 < stats["accepted_draft_tokens"] < stats["draft_tokens"]
    for name in ("draft_tokens", "accepted_draft_tokens", "output_tokens"):
        assert frame[name] == stats[name]
    text = Metrics("m").text(stats).decode()
    for name, kind in (("draft_tokens", "draft"), ("accepted_draft_tokens", "accepted")):
        line = f'spec_decode_num_{kind}_tokens_total{{model_name="m"}} {stats[name]:.1f}'
        assert line in text
    assert stats["drafts"] <= stats["draft_tokens"] <= 4 * stats["drafts"]


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_frames_say_what_is_in_the_engine(mode, is_whole):
    """Whether each stands for itself, or tells only what is new since the one before."""
    llm = LLM(num_blocks=34, block_size=4, preemption_mode=mode, swap_gib=0.01, max_num_seqs=8)
    camera, reader = Camera(llm), Reader()
    states, kinds = Counter(), Counter()

    def observe(schedule, seconds):
        if is_whole:
            camera.start_over()
        frame = json.loads(json.dumps(camera.frame([schedule], seconds, 1.0)))
        assert frame["is_whole"] == (is_whole or llm.counts.steps == 1)
        reader.read(frame)
        check_blocks_of(reader, llm)
        check_host_blocks_of(reader, llm)
        check_requests_of(frame, llm)
        moves = schedule.moves
        assert frame["moves"]["copies"] == [[*copy] for copy in moves.copies]
        assert frame["moves"]["out"] == [[*swap] for swap in moves.swaps_out.items()]
        assert frame["moves"]["in"] == [[*swap] for swap in moves.swaps_in.items()]
        stats = llm.stats()
        assert frame["step"] == stats["steps"]
        same = ("kv_blocks", "kv_blocks_used", "preemptions", "prompt_tokens", "output_tokens")
        for name in (*same, "prefix_cache_hit_tokens", "computed_tokens"):
            assert frame[name] == stats[name], name
        states.update(states_of(frame).values())
        blocks = reader.blocks()
        kinds.update(said[0] if len(said) == 1 else "own" for said in blocks)
        kinds["shared"] += any(len(said) == 2 and said[1] > 1 for said in blocks)
        kinds["copied"] += bool(moves.copies)
        kinds["swapped"] += bool(moves.swaps_in)
        kinds["host"] += bool(reader.host_tables)

    llm.observers.append(observe)
    for prompt, params in requests():
        llm.add_request(prompt, params)
        llm.step()
        llm.step()
    while llm.has_unfinished():
        llm.step()
    away = "swapped" if mode == "swap" else "preempted"
    assert {"running", "waiting", "ended", away} <= states.keys()
    assert all(kinds[kind] for kind in ("empty", "cached", "own", "shared", "copied"))
    assert bool(kinds["swapped"]) == bool(kinds["host"]) == (mode == "swap")


def test_a_frame_changes_nothing():
    """A request that waits has no sequences yet, and gets none by being looked at."""
    llm = LLM(num_blocks=40, block_size=4)
    llm.add_request(STORY, endless(4, n=2))
    frame = Camera(llm).frame([], 0.0, 0.0)
    (submitted,) = frame["requests"]
    assert frame["queue"] == [submitted["id"]] and submitted["sequences"] == 2
    assert all(request.is_new for request in llm.requests.values())


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def new_view(seconds_between=0.1):
    llm, frames, clock = LLM(num_blocks=40, block_size=4), [], Clock()
    return llm, frames, clock, LiveView(llm, frames.append, seconds_between, clock)


def test_starting_and_stopping_leaves_nothing():
    llm, frames, _, view = new_view()
    before = [*llm.observers]
    llm.generate("introduce yourself", endless(4), use_tqdm=False)
    view.flush()
    assert frames == []
    view.start()
    view.start()
    assert len(llm.observers) == len(before) + 1
    assert frames[0]["running"] == frames[0]["queue"] == []
    view.stop()
    view.stop()
    assert llm.observers == before
    num_frames = len(frames)
    llm.generate("introduce yourself", endless(4), use_tqdm=False)
    view.flush()
    assert len(frames) == num_frames
    view.start()
    assert frames[-1]["steps"] == 0


def test_at_most_one_frame_in_an_interval_and_nothing_is_lost():
    llm, frames, clock, view = new_view()
    view.start()
    llm.add_request(f"{STORY} One windy day she", endless(9, n=3, temperature=1.0, seed=4))
    moves = []
    llm.observers.append(lambda schedule, seconds: moves.extend(schedule.moves.copies))
    times = []
    while llm.has_unfinished():
        clock.now += 0.03
        num_frames = len(frames)
        llm.step()
        times += [clock.now] * (len(frames) - num_frames)
    assert 1 < len(times) < llm.counts.steps
    assert all(b - a >= 0.1 for a, b in pairwise(times))
    view.flush()
    assert sum(frame["steps"] for frame in frames) == llm.counts.steps
    assert [copy for frame in frames for copy in frame["moves"]["copies"]] == moves
    assert moves
    last = frames[-1]  # it is idle
    assert last["running"] == last["queue"] == []
    assert last["kv_blocks_used"] == last["steps"] == 0
    assert last["output_tokens"] == llm.counts.output_tokens


def test_however_many_wait_a_frame_tells_of_a_few():
    llm = LLM(runner=FakeRunner(block_size=16, num_blocks=8), max_num_seqs=2)
    for _ in range(MOST_WAITING + 30):
        llm.add_request("hello", endless(20))
    llm.step()
    frame = Camera(llm).frame([], 0.0, 0.0)
    assert len(frame["queue"]) == MOST_WAITING
    assert len(frame["running"]) + len(frame["queue"]) + frame["not_listed"] == len(llm.requests)
    assert len(frame["requests"]) < 50
    first = frame["queue"][0]
    assert first == llm.scheduler.waiting[0].request_id


def test_one_more_reader_is_told_everything():
    llm, frames, _, view = new_view()
    view.start()
    llm.add_request(STORY, endless(30))
    for _ in range(3):
        llm.step()
    view.flush()
    assert [frame["is_whole"] for frame in frames] == [True, False, False]
    view.start()
    assert frames[3]["is_whole"]
    check_blocks_of(Reader().read(frames[3]), llm)


# --- through the server ---


def test_a_reader_that_is_too_slow_is_sent_away():
    """Each frame tells what is new since the one before: with one missing, the rest means nothing."""
    with Running(LLM(num_blocks=40)) as server:
        live = server.routes.live

        async def read_slowly() -> tuple:
            frames = live.frames()
            await anext(frames)
            (reader,) = live.readers
            for i in range(MOST_FRAMES):
                live._pass_on({"step": i})
            is_complete = json.loads(reader._queue[0]) == {"step": 0}
            live._pass_on({"step": MOST_FRAMES})
            await frames.aclose()
            return is_complete, reader.get_nowait()

        reading = asyncio.run_coroutine_threadsafe(read_slowly(), server.engine.loop)
        assert reading.result(60) == (True, None)


def test_files_have_their_headers_and_no_other_path_becomes_one():
    with Running(LLM(num_blocks=40)) as server:
        for path in ("/", "/page.js", "/page.css", "/player.js", "/player.css", "/runs/index.json"):
            for method in ("GET", "HEAD"):
                response = server.http.request(method, path)
                assert response.status_code == 200
                assert "default-src 'self'" in response.headers["content-security-policy"]
                assert response.headers["cache-control"] == "no-cache"
                assert bool(response.content) == (method == "GET")
            tag = {"If-None-Match": response.headers["etag"]}
            assert server.http.get(path, headers=tag).status_code == 304
        expected = {"/nothing": 404, "/runs": 404, "/page.py": 404, "/v1/completions": 405}
        for path, status in expected.items():
            assert server.http.get(path).status_code == status
        assert server.http.post("/nothing").status_code == 404


# --- recorded runs ---


def without_times(run: dict) -> dict:
    frames = [{k: v for k, v in frame.items() if k not in TIMES} for frame in run["frames"]]
    return run | {"frames": frames}


@pytest.mark.slow
def test_recorded_runs_are_those_that_the_script_makes(tmp_path, monkeypatch):
    script = importlib.import_module("tutorials.measure.record_runs")
    committed = script.HERE
    monkeypatch.setattr(script, "HERE", tmp_path)
    script.main()
    names = sorted(path.name for path in committed.glob("*.json"))
    assert names == sorted(path.name for path in tmp_path.glob("*.json"))
    for name in names:
        assert (committed / name).stat().st_size < 150_000
        old, new = (json.loads((folder / name).read_bytes()) for folder in (committed, tmp_path))
        if name != "index.json":
            old, new = without_times(old), without_times(new)
        assert old == new, f"{name}: python -m tutorials.measure.record_runs writes it again"
