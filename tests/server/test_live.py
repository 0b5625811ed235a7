"""The live view's frames say what is in the engine, it leaves nothing behind, and the recorded runs are those that the
script makes.

Run: pytest tests/server/test_live.py [-k frames]
"""

import importlib
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.server.live import LiveView, frame_of
from nanovllm.server.recording import record

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


def blocks_of(frame: dict) -> list[tuple]:
    """One for each block."""
    return [tuple(run[1:]) for run in frame["blocks"] for _ in range(run[0])]


def owners_of(llm: LLM) -> dict[int, list[str]]:
    """By reading all tables: the requests that have a block, once for each sequence."""
    owners: dict[int, list[str]] = {}
    for request in llm.scheduler.unfinished():
        for seq in [] if request.is_new else request.sequences:
            for block_id in seq.block_table:
                owners.setdefault(block_id, []).append(request.request_id)
    return owners


def check_blocks_of(frame: dict, llm: LLM) -> None:
    owners = owners_of(llm)
    for block, said in zip(llm.block_manager.blocks, blocks_of(frame), strict=True):
        if block.ref_count == 0:
            assert said == (("empty",) if block.key is None else ("cached",))
        else:
            assert frame["requests"][said[0]]["id"] == owners[block.id][0]
            assert said[1] == len(owners[block.id]) == block.ref_count


def expected_state(request, llm: LLM) -> str:
    if request in llm.scheduler.running:
        return "running"
    if request.is_new:
        return "waiting"
    if any(seq.num_host_tokens for seq in request.sequences):
        return "swapped"
    return "preempted"


def check_requests_of(frame: dict, schedule, llm: LLM) -> None:
    said = {request["id"]: request for request in frame["requests"]}
    assert len(said) == len(frame["requests"])
    unfinished = {r.request_id: r for r in llm.scheduler.unfinished()}
    ended = said.keys() - unfinished.keys()
    assert unfinished.keys() <= said.keys()
    assert all(said[name]["state"] == "ended" for name in ended)
    served = Counter()
    for seq, _, num_tokens in schedule.items:
        served[seq.request.request_id] += num_tokens
    assert {name: one["tokens"] for name, one in said.items() if one["tokens"]} == served
    for name, request in unfinished.items():
        assert said[name]["state"] == expected_state(request, llm)
        assert said[name]["prompt"] == len(request.prompt_token_ids)
        seqs = [] if request.is_new else request.sequences
        num_own = sum(len(seq) - said[name]["prompt"] for seq in seqs)
        assert said[name]["output"] == num_own
        if len(seqs) == 1:
            assert said[name]["computed"] == seqs[0].num_computed_tokens
        assert said[name]["computed"] <= said[name]["prompt"] + num_own


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_frames_say_what_is_in_the_engine(mode):
    llm = LLM(num_blocks=34, block_size=4, preemption_mode=mode, swap_gib=0.01, max_num_seqs=8)
    states, kinds = Counter(), Counter()

    def observe(schedule, seconds):
        frame = json.loads(json.dumps(frame_of(llm, [schedule], seconds, 1.0)))
        check_blocks_of(frame, llm)
        check_requests_of(frame, schedule, llm)
        moves = schedule.moves
        assert frame["moves"]["copies"] == [[*copy] for copy in moves.copies]
        assert frame["moves"]["out"] == [[*swap] for swap in moves.swaps_out.items()]
        assert frame["moves"]["in"] == [[*swap] for swap in moves.swaps_in.items()]
        stats = llm.stats()
        assert frame["step"] == stats["steps"]
        same = ("kv_blocks", "kv_blocks_used", "preemptions", "prompt_tokens", "output_tokens")
        for name in (*same, "prefix_cache_hit_tokens", "computed_tokens"):
            assert frame[name] == stats[name], name
        states.update(request["state"] for request in frame["requests"])
        kinds.update(
            said[0] if said[0] in ("empty", "cached") else "own" for said in blocks_of(frame)
        )
        kinds["shared"] += any(len(said) == 2 and said[1] > 1 for said in blocks_of(frame))
        kinds["copied"] += bool(moves.copies)
        kinds["swapped"] += bool(moves.swaps_in)

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
    assert bool(kinds["swapped"]) == (mode == "swap")


def test_a_frame_changes_nothing():
    """A request that waits has no sequences yet, and gets none by being looked at."""
    llm = LLM(num_blocks=40, block_size=4)
    llm.add_request(STORY, endless(4, n=2))
    (submitted,) = frame_of(llm, [], 0.0, 0.0)["requests"]
    assert (submitted["state"], submitted["sequences"]) == ("waiting", 2)
    assert all(request.is_new for request in llm.requests.values())


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def new_view(seconds_between=0.1):
    llm, texts, clock = LLM(num_blocks=40, block_size=4), [], Clock()
    return llm, texts, clock, LiveView(llm, texts.append, seconds_between, clock)


def test_starting_and_stopping_leaves_nothing():
    llm, texts, _, view = new_view()
    before = [*llm.observers]
    llm.generate("introduce yourself", endless(4), use_tqdm=False)
    view.flush()
    assert texts == []
    view.start()
    view.start()
    assert len(llm.observers) == len(before) + 1
    assert json.loads(texts[0])["requests"] == []
    view.stop()
    view.stop()
    assert llm.observers == before
    num_texts = len(texts)
    llm.generate("introduce yourself", endless(4), use_tqdm=False)
    view.flush()
    assert len(texts) == num_texts
    view.start()
    assert json.loads(texts[-1])["steps"] == 0


def test_at_most_one_frame_in_an_interval_and_nothing_is_lost():
    llm, texts, clock, view = new_view()
    view.start()
    llm.add_request(f"{STORY} One windy day she", endless(9, n=3, temperature=1.0, seed=4))
    moves = []
    llm.observers.append(lambda schedule, seconds: moves.extend(schedule.moves.copies))
    times = []
    while llm.has_unfinished():
        clock.now += 0.03
        num_texts = len(texts)
        llm.step()
        times += [clock.now] * (len(texts) - num_texts)
    assert 1 < len(times) < llm.counts.steps
    assert all(b - a >= 0.1 for a, b in pairwise(times))
    view.flush()
    frames = [json.loads(text) for text in texts]
    assert sum(frame["steps"] for frame in frames) == llm.counts.steps
    assert [copy for frame in frames for copy in frame["moves"]["copies"]] == [[*m] for m in moves]
    assert moves
    last = frames[-1]  # it is idle
    assert last["requests"] == [] and last["kv_blocks_used"] == 0 and last["steps"] == 0
    assert last["output_tokens"] == llm.counts.output_tokens


def test_an_abort_is_seen_when_the_engine_is_idle():
    llm, texts, _, view = new_view()
    view.start()
    name = llm.add_request("introduce yourself", endless(30))
    llm.step()
    llm.abort(name)
    llm.step()
    view.flush()
    last = json.loads(texts[-1])
    assert last["requests"] == [] and last["kv_blocks_used"] == 0


def test_a_large_cache_makes_a_short_frame():
    llm = LLM(num_blocks=10_000)
    llm.add_request("introduce yourself", endless(4))
    llm.step()
    frame = frame_of(llm, [], 0.0, 0.0)
    assert len(blocks_of(frame)) == 10_000
    assert len(json.dumps(frame)) < 1500


def test_record_lets_requests_come_when_they_should(tmp_path):
    file = tmp_path / "run.json"
    llm = LLM(num_blocks=40, block_size=4)
    late = [("introduce yourself", endless(4), 0), (STORY, endless(6), 2), (STORY, endless(2), 99)]
    record(llm, late, file, "A title", "A sentence.")
    assert not llm.observers
    run = json.loads(file.read_text())
    assert (run["title"], run["explanation"]) == ("A title", "A sentence.")
    assert run["prompts"] == {"0": "introduce yourself", "1": STORY, "2": STORY}
    steps = {}
    for i, frame in enumerate(run["frames"]):
        for request in frame["requests"]:
            steps.setdefault(request["id"], []).append(i)
    assert [steps[name][0] for name in "01"] == [0, 2]
    assert steps["2"][0] == steps["1"][-1] + 1  # nothing was left to wait for
    assert [frame["step"] for frame in run["frames"]] == [*range(1, len(run["frames"]) + 1)]


def without_times(run: dict) -> dict:
    frames = [{k: v for k, v in frame.items() if k not in TIMES} for frame in run["frames"]]
    return run | {"frames": frames}


@pytest.mark.slow
def test_recorded_runs_are_those_that_the_script_makes(tmp_path, monkeypatch):
    script = importlib.import_module("tutorials.figures.record_runs")
    committed = script.HERE
    monkeypatch.setattr(script, "HERE", tmp_path)
    script.main()
    names = sorted(path.name for path in committed.glob("*.json"))
    assert names == sorted(path.name for path in tmp_path.glob("*.json"))
    for name in names:
        assert (committed / name).stat().st_size < 150_000
        old, new = (json.loads((folder / name).read_text()) for folder in (committed, tmp_path))
        if name != "index.json":
            old, new = without_times(old), without_times(new)
        assert old == new, f"{name}: python -m tutorials.figures.record_runs writes it again"


def test_recorded_runs_show_what_they_say():
    script = importlib.import_module("tutorials.figures.record_runs")
    runs = {path.stem: json.loads(path.read_text()) for path in script.HERE.glob("*_*.json")}
    frames = {name: run["frames"] for name, run in runs.items()}
    assert len(frames["continuous_batching"]) < 0.7 * len(frames["static_batching"])
    assert frames["preemption_recompute"][-1]["preemptions"] > 0
    assert any(frame["moves"]["in"] for frame in frames["preemption_swap"])
    assert any(frame["moves"]["copies"] for frame in frames["shared_prefix"])
    assert frames["shared_prefix"][-1]["prefix_cache_hit_tokens"] > 0
    assert any(said[1] == 4 for said in blocks_of(frames["beam_search"][9]) if len(said) == 2)


@pytest.mark.slow
def test_the_package_alone_imports_nothing_of_it():
    code = "import nanovllm, sys; nanovllm.LLM; assert not [m for m in sys.modules if m.startswith('nanovllm.server')]"
    subprocess.run([sys.executable, "-c", code], check=True)
