"""The pictures: a page shows each, README says at which commit its program is, and the numbers in it are still those of
the engine, of a result, or of the chapter's own output.

Run: pytest tests/tutorials/test_figures.py [-k NAME]
"""

import json
import re
import subprocess
from shutil import which
from statistics import mean

import pytest
from book import CHAPTERS, FIGURES, ROOT, TUTORIALS, check_picture, picture_texts

from nanovllm import LLM, Job, SamplingParams, simulate
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.layers.linear import Linear
from nanovllm.scheduler import Scheduler
from nanovllm.topics.decoding.drafts import Draft
from nanovllm.topics.simulator.cost_model import SHAPES, Hardware, shape_of
from nanovllm.topics.simulator.machines import MACHINES, Machine
from tutorials.baselines.replay import PAPER_SAVED, PAPER_TOKEN_STATES
from tutorials.measure.pairs import KEYS, errors, judged
from tutorials.play import play
from tutorials.simulation import policies
from tutorials.simulation.clock import FOUR
from tutorials.simulation.ten_jobs import first_token, longest_pause, run_ten

README = (FIGURES / "README.md").read_text(encoding="utf-8")


def result(name: str) -> dict:
    return json.loads((TUTORIALS / "results" / f"{name}.json").read_bytes())


def page(name: str) -> str:
    return (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")


def outputs(name: str) -> str:
    """All that a chapter's code prints; test_chapters.py runs it."""
    return "".join(re.findall(r"^```text.*?\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL))


# --- the files ---


def test_pictures_and_chapters_belong_together():
    shown = {
        (chapter.parent / link).resolve()
        for chapter in [*CHAPTERS, ROOT / "README.md"]
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", chapter.read_text(encoding="utf-8"))
    }
    drawn = set(FIGURES.resolve().glob("*.png"))
    assert shown - drawn == set(), "a picture is missing"
    results = {path.stem for path in (TUTORIALS / "results").glob("*.json")}
    assert {path.stem for path in drawn - shown} <= results, "a picture that no page shows"
    assert all(path.stat().st_size < 150_000 for path in drawn)


def test_each_picture_has_a_program_at_a_commit():
    rows = re.findall(r"^\| (.*) \| `(\w+\.py)` \| (\w+) \|$", README, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    photographs = ["page_live", "site_first", "site_lab"]
    assert sorted(names + photographs) == sorted(path.stem for path in FIGURES.glob("*.png"))
    git = ["git", "-C", str(ROOT), "cat-file", "-e"]
    for _, script, commit in rows:
        has_history = [*git, f"{commit}^{{commit}}"]
        if which("git") is None or subprocess.run(has_history, capture_output=True).returncode:
            pytest.skip("the history is not here")
        subprocess.run([*git, f"{commit}:tutorials/figures/{script}"], check=True)


# --- what the chapter prints, too ---


@pytest.mark.parametrize(
    ("name", "chapter", "numbers"),
    [
        ("graphs_memory", "11_graphs", r"\d+,\d{3}(?= blocks)|\d\.\d\d"),
        ("kernels_split", "10_kernels", r"^(?:maximum|total|=) (\d\.\d\d)$"),
        ("overlap_steps", "11_graphs", r"the device waits (\d+) ms$"),
        ("replicas_turns", "19_replicas", r"\d,\d{3}(?= tokens computed)"),
        ("sampler_filters", "08_sampler", r"^0\.\d{3}"),
        ("simulator_tail", "14_simulator", r"capacity: (\d+)"),
        ("small_numbers_row", "21_quantization", r"scale (0\.\d{3})"),
        ("believe_signs", "15_believe", r"(\d+) clear differences"),
    ],
)
def test_numbers_are_those_that_the_chapter_prints(name, chapter, numbers):
    found = {*re.findall(numbers, picture_texts(name), re.MULTILINE)}
    assert found and found <= {*re.findall(r"-?[\d.,]*\d", outputs(chapter))}


def test_overview_seats():
    pattern = r"^ +(\d)((?: +[\d.]+){4}) +(\d+)  +\d+  "
    rows = re.findall(pattern, outputs("00_overview"), re.MULTILINE)
    assert len(rows) == 9
    cells = " ".join(cells.replace(".", "") for _, cells, _ in rows).split()
    steps = [f"step {step}\n{tokens} tokens" for step, _, tokens in rows]
    check_picture("overview_seats", "\n".join(cells), *steps)


def test_blocks_tables():
    (free,) = re.findall(r"^a ended +free: (.*)$", outputs("02_blocks"), re.MULTILINE)
    check_picture("blocks_tables", free.replace(" ", "\n"))


def test_blocks_beams():
    """The first three steps of the search; a picture has the last word of a beam."""
    printed = outputs("13_samples")
    beams = re.findall(r"-> '(?:.* )?(\w+)' (-\d\.\d\d), blocks \[(.*)\]", printed)
    copies = re.findall(r"copies block (\d) to (\d)$", printed, re.MULTILINE)
    assert len(beams) >= 9 and len(copies) == 4
    check_picture("blocks_beams", *(f"{word}  {p}\nblocks {blocks}" for word, p, blocks in beams))
    assert all(f": copies {a} to {b}\n" in picture_texts("blocks_beams") for a, b in copies)


def test_blocks_samples():
    (owners,) = re.findall(r"^0 ended .* owners \[(.*)\]$", outputs("13_samples"), re.MULTILINE)
    names = re.findall("^(?:free|samples? .*)$", picture_texts("blocks_samples"), re.MULTILINE)
    names = [name for name in names if name != "sample 0 ends"][-7:]
    assert [int(number) for number in owners.split(",")] == [
        len(re.findall(r"\d", name)) for name in names
    ]


def test_step_arrays():
    block, *_ = re.findall(r"^input_ids(?:.+\n){8}", outputs("07_step"), re.MULTILINE)
    rows = re.findall(r"(\w+) +\[(.*)\]", block)
    arrays = {name: numbers.replace(", ", "\n") for name, numbers in rows}
    lengths = arrays.pop("context_lens").split("\n")
    said = [f"{name}\n{numbers}" for name, numbers in arrays.items()]
    check_picture("step_arrays", *said, *map("\n".join, zip("BAC", lengths)))
    assert "[8, 192] -> [3, 1536]" in outputs("07_step")
    check_picture(
        "step_head", "192 numbers", *(f"{name}: 1,536 scores" for name in "ABC"), "5\nlayers"
    )


def test_sampler_draw():
    rows = re.findall(r"^position +(\d+): (0\.\d{3})$", outputs("08_sampler"), re.MULTILINE)
    assert len(rows) == 6
    said = [f"position {position}\n{number}" for position, number in rows]
    check_picture(
        "sampler_draw", *said, *(f"{both} x 0.855" for both in said), "0.000\n0.615\n0.855"
    )


def test_kernels_tiles():
    """A program reads all its tiles of keys."""
    rows = re.findall(r"program (\d): .* keys \[(.*)\]", outputs("10_kernels"))
    assert len(rows) == 6
    totals = [f"program {i}: {sum(map(int, keys.split(',')))} keys" for i, keys in rows]
    check_picture("kernels_tiles", *totals)


# --- what the results say ---


def test_believe():
    """The pairs of policies, measured and simulated; the chapter quotes two numbers of a picture."""
    rows = result("simulator_pairs")["pairs"].values()
    verdicts = [judged(row, key) for row in rows for key in KEYS]
    num_clear = sum(verdict["is_clear"] for verdict in verdicts)
    others = len(verdicts) - num_clear
    check_picture(
        "believe_signs", f"black: {num_clear} clear differences", f"white: {others} others"
    )
    off = {key: [100 * error for row in rows for error in errors(row, key)] for key in KEYS}
    check_picture("believe_errors", *(f"mean {mean(values):+.1f} %" for values in off.values()))
    ttft = off["TTFT mean"]
    said = f"{-mean(ttft):.0f} % too short on average, one by {-min(ttft):.0f} %"
    assert said in page("15_believe")


def test_memory_waste():
    """Shares of the cache, beside the paper's figure 2."""
    systems = result("memory")["waste"]["ShareGPT"]["systems"]
    parts = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation")
    shares = {name: [100 * system[part] for part in parts] for name, system in systems.items()}
    numbers = [f"{share:.1f}" for row in shares.values() for share in row if share > 3]
    _, reserved, _, free = shares["paged"]
    papers = [f"the paper: {100 * share:.1f}" for share in PAPER_TOKEN_STATES.values()]
    check_picture("memory_waste", *numbers, f"{reserved:.1f} reserved, {free:.1f} free", *papers)
    *orca, paged = [f"{row[0]:.0f}" for row in shares.values()]
    assert f"{', '.join(orca)} and {paged} percent tokens" in page("02_blocks")
    assert f"fills {paged} % of the" in page("00_overview").replace("\n", " ")


def test_memory_sharing():
    """What sharing saves, beside the paper's figure 15; chapter 13 quotes our numbers."""
    papers = {key: [f"{100 * share:.0f}" for share in pair] for key, pair in PAPER_SAVED.items()}
    said = [f"paper, {name}: {share}" for (name, _), pair in papers.items() for share in pair]
    check_picture("memory_sharing", *said)
    ours = {
        (name, kind, width): f"{100 * row['saved']:.0f}"
        for name, kinds in result("memory")["sharing"].items()
        for kind in ("samples", "beams")
        for width, row in kinds[kind].items()
    }
    few, many = (
        f"{ours[name, 'samples', '2']} to {ours[name, 'samples', '6']} % (the paper"
        for name in ("Alpaca", "ShareGPT")
    )
    beams = " and ".join(
        f"{ours[name, 'beams', '6']} % on {name}" for name in ("Alpaca", "ShareGPT")
    )
    text = page("13_samples")
    assert f"long prompts, saves {many}" in text and f"short ones, {few}" in text
    assert f"With six beams we save {beams}." in text


def test_cpu_roofline():
    """How far the largest decodes are below the roof."""
    gains = []
    for name in ("cpu_embedded", "cpu_qwen3_0.6b_float32"):
        ours = result(name)["engines"]["nanovllm"]
        machine = Hardware(**ours["ceilings"])
        rows = [dict(zip(ours["steps"]["columns"], row)) for row in ours["steps"]["decode"]]
        most = max(row["sequences"] for row in rows).bit_length()
        group = [row for row in rows if row["sequences"].bit_length() == most]
        flops, size, seconds = (
            sum(row[key] for row in group) for key in ("flops", "bytes", "seconds")
        )
        roof = min(flops / size * machine.bytes_per_second, machine.flops_per_second)
        gains.append(f"{roof * seconds / flops:.1f}")
        flat, rising = machine.flops_per_second / 1e9, machine.bytes_per_second / 1e9
        check_picture(
            "cpu_roofline",
            f"{gains[-1]} x to gain at most",
            f"flat: {flat:.0f} GFLOP/s, a large matrix product",
            f"rising: {rising:.0f} GB/s, a large copy",
        )
    assert f"{' and '.join(gains)} times below the roof" in page("12_performance")


def test_performance_engines():
    for name in ("cpu_embedded", "cpu_qwen3_0.6b_float32"):
        engines = result(name)["engines"].values()
        speeds = sorted(
            (engine["output_tokens_per_second"], *engine["output_tokens_per_second_range"])
            for engine in engines
        )
        rows = ["{:,.0f}  ({:,.0f} to {:,.0f})".format(*speed) for speed in speeds[::-1]]
        check_picture("performance_engines", "\n".join(rows))


def test_model_experts():
    requests = result("experts")["requests"].values()
    for row in requests:
        check_picture("model_experts", f"{row['tokens_per_second']:.0f}")
        assert abs(row["experts_hit"] - row["experts_hit_if_uniform"]) < 1
    per_expert = [row["step_ms"] / row["experts_hit"] for row in requests]
    assert 6 < min(per_expert) and max(per_expert) < 8 and "6 to 8 ms for each" in page("05_model")


# --- what the engine does ---


def test_overview_memory():
    shape = shape_of(SHAPES["qwen3-0.6b"], itemsize=2)
    for count in (1, 11, 16, 64):
        cache = count * 1000 * shape.kv_bytes / 1e6
        check_picture(
            "overview_memory", f"weights {shape.weight_bytes / 1e6:,.0f}\ncache {cache:,.0f}"
        )


def tables(num_host_blocks: int) -> list[list[tuple[str, ...]]]:
    """Of each step of chapter 04, the owner of each block, in the cache and on the host."""
    found: list[list[tuple[str, ...]]] = []

    class Watched(Scheduler):
        def schedule(self):
            schedule = super().schedule()
            owned = [["", ""] for _ in range(8)]
            for request in self.unfinished():
                (seq,) = request.sequences
                for place, table in enumerate((seq.block_table, seq.host_table)):
                    for i, block in enumerate(table):
                        tokens = f" {4 * i}..{4 * i + 3}" if num_host_blocks else ""
                        owned[block][place] = request.request_id + tokens
            found.append([*zip(*owned)])
            return schedule

    jobs = [("A", 0, 6, 12), ("B", 0, 7, 10), ("C", 1, 4, 8)]
    play(jobs, Watched, num_blocks=8, num_host_blocks=num_host_blocks)
    return found


def test_preemption_blocks():
    steps = [owners for owners, _ in tables(0)]
    check_picture("preemption_blocks", "\n".join(name for step in steps for name in step if name))
    lost = [block for block, name in enumerate(steps[5]) if name == "C"]
    assert "C" not in steps[6]
    check_picture("preemption_blocks", "C gives up blocks {} and {}".format(*lost))


def test_blocks_swap():
    steps = tables(8)
    for number in (6, 7, 11):
        rows = [
            "\n".join(f"{name}\n{block}".strip() for block, name in enumerate(owners))
            for owners in steps[number - 1]
        ]
        check_picture("blocks_swap", f"KV cache\n{rows[0]}\nhost's memory\n{rows[1]}")


def test_a_layer_is_nine_launches():
    """Operations that the backend or a matrix does in the first layer, in a decode."""
    llm = LLM(num_blocks=16, block_size=4, device="cpu")
    llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    llm.step()
    calls = []

    class Noted:
        def __init__(self, ops):
            self.ops = ops

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self.ops, name)

    for module in llm.runner.model.model.layers[0].modules():
        if hasattr(module, "ops"):
            module.ops = Noted(module.ops)
        if isinstance(module, Linear):
            module.register_forward_pre_hook(lambda *args: calls.append("linear"))
    llm.step()
    assert len(calls) == 9 and "A layer is nine launches" in page("11_graphs")
    assert calls.count("rotate_and_store") == 1  # in PyTorch and in the picture, two operations
    said = "eager: Python launches the 10 operations of a layer, and the device waits (hatched)"
    check_picture("graphs_replay", said)


def test_guesses_steps():
    """Of each step the guesses, and the token that the step draws by itself."""
    llm = LLM(speculative_config={})
    decode = llm.get_tokenizer().decode
    cells, right = [], []

    def observe(schedule, seconds):
        (item,) = schedule.items
        is_draft = isinstance(item.seq, Draft)
        guesses = item.seq.token_ids[-item.seq.place :] if is_draft else []
        cells.extend([*guesses, seq.token_ids[-1]])
        right.append(len(schedule.sampled) - 1)

    llm.observers.append(observe)
    question = [{"role": "user", "content": "sort 31, 47, 52, 60, 74, 88, 93, 12"}]
    llm.add_request({"messages": question}, SamplingParams(temperature=0, max_tokens=40), "0")
    (seq,) = llm.requests["0"].sequences
    while llm.has_unfinished():
        llm.step()
    read = [decode([i]).replace(" ", "\u2423").replace("\n", "\\n") for i in cells]
    check_picture(
        "guesses_steps", "\n".join("end" if text.startswith("<") else text for text in read)
    )
    assert right == [0, 0, 0, 1, 4, 4, 4, 4, 4, 0]
    assert "In step 10, its draft is wrong." in page("22_speculative")


def test_hybrid():
    """Bytes of a request of 8,000 tokens, and a decode at 32,000: what the chapter prints, and its table."""
    seconds = json.loads((TUTORIALS / "results" / "cpu_hybrid.json").read_bytes())["seconds"]
    attention, hybrid = (
        round(1000 * seconds[name]["32000"], 1) for name in ("attention", "hybrid")
    )
    text = page("23_hybrid")
    assert f"| 32,000 | {attention} ms | {hybrid} ms |" in text and "300 MiB in all" in text
    check_picture("hybrid_decode", f" in 2, and states in 6:\n {hybrid:.0f} ms")
    check_picture(
        "hybrid_bytes", " attention in 32 layers:\n 1,000 MiB", " in 8, and states in 24:\n 300 MiB"
    )


# --- what the simulator says ---


def test_policies():
    """How much later each of the ten jobs has its first token than with FCFS."""
    fcfs = run_ten()
    waits = [first_token(request) for request in fcfs.requests]
    for cls in ("ShortestFirst", "PromptBound", "FairByTenant", "UrgentPushesOut"):
        run = run_ten(getattr(policies, cls))
        times = [first_token(request) for request in run.requests]
        moves = [b - a for a, b in zip(waits, times)]
        check_picture(
            "policies", "\n".join(f"{move:+.0f}" if round(move) else "0" for move in moves)
        )
        pauses = " to ".join(f"{longest_pause(one.requests):.0f}" for one in (fcfs, run))
        means = f"mean {mean(waits):.0f} to {mean(times):.0f} ms"
        assert f": {means}, longest pause {pauses} ms\n" in picture_texts("policies"), cls


def test_policies_clock():
    """J's wait, and E's prompt in steps and in time."""
    run = run_ten()
    of_e = [step for step in run.steps if any((i, p) == (4, True) for i, _, p in step.items)]
    spans = [step.end - step.start for step in of_e]
    steps, share = f"{len(spans)} of {len(run.steps)}", f"{sum(spans) / run.seconds:.0%}"
    check_picture(
        "policies_clock",
        f"{first_token(run.requests[9]):.0f} ms to the first token",
        f"first come, first served, by steps: E's prompt is {steps}",
        f"the same by the clock: E's prompt is {share} of the time",
    )


class TwoMilliseconds(Machine):
    def seconds(self, *args, **kwargs) -> float:
        return 0.002


def test_simulator_clock():
    """The tokens of each step, and when "late" joins, if steps take 2 ms, and by the cost model."""
    jobs = [
        Job(asked.arrival, ((i, asked.num_prompt),), asked.num_outputs, answer=100, max_tokens=64)
        for i, asked in enumerate(FOUR, 1)
    ]
    config = Config(model=EMBEDDED_MODEL, dtype="float32", num_blocks=64, max_num_batched_tokens=98)
    cpu = MACHINES["cpu"]
    joins = []
    for machine in (TwoMilliseconds(cpu.hardware), cpu):
        run = simulate(jobs, config, machine, keep_steps=True)
        numbers = [[*(n for _, n, _ in step.items), i] for i, step in enumerate(run.steps, 1)]
        check_picture(
            "simulator_clock", "\n".join(str(n) for step in numbers for n in step) + "\nstep"
        )
        joins += [i for i, step in enumerate(run.steps, 1) if (3, 14, True) in step.items]
    assert joins == [4, 3]
    said = "late joins step 4; by the cost model step 1 takes {:.1f} ms, and late joins step 3"
    assert said.format(1000 * run.steps[0].end) in page("14_simulator")
