"""The static buffers of CUDA graphs. Here recording and replay are a plain call; on a GPU they are real.

Run: pytest tests/device/test_cuda_graphs.py [-k looks_for_it]
"""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import new_model, save

from nanovllm import LLM, SamplingParams
from nanovllm.backends import torch_ops, triton_ops
from nanovllm.backends.cuda_graphs import StepGraphs
from nanovllm.config import Limits
from nanovllm.device import memory
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.sampler import Sampling
from nanovllm.model_runner import ModelRunner
from nanovllm.step import StepInputs, move
from nanovllm.topics.checks.blocks import check_blocks
from tutorials.machine import interpreter_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CACHE = KVCache(torch.zeros(2, 1, 1, 4, 1, 8, device=DEVICE))


def limits_of(max_num_seqs, max_num_batched_tokens=8192, max_model_len=12) -> Limits:
    return Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def test_one_copy_and_always_the_same_places():
    tensors = {
        "first": torch.arange(3),
        "not contiguous": torch.rand(2, 3).T,
        "empty": torch.zeros(0, dtype=torch.int64),
        "bool": torch.tensor([True]),
        "last": torch.arange(5, dtype=torch.int32),
    }
    buffer = torch.zeros(200, dtype=torch.uint8, device=DEVICE)
    moved = move(tensors, DEVICE, buffer)
    assert list(moved) == list(tensors)
    for name, source in tensors.items():
        target = moved[name]
        assert torch.equal(target.cpu(), source) and target.dtype == source.dtype
        assert target.data_ptr() % 16 == 0 or source.numel() == 0
    move({name: tensor * 0 for name, tensor in tensors.items()}, DEVICE, buffer)
    # the views of before show what was copied now
    assert not any(tensor.any() for tensor in moved.values())
    with pytest.raises(RuntimeError):
        move({"too large": torch.zeros(100)}, DEVICE, buffer)


def test_pending_tokens_are_filled_in_on_the_device():
    """Where a recording reads them, too. A token that could not be drawn becomes any that exists."""
    drawn = torch.tensor([7, 8, -1], device=DEVICE)
    graphs = new_graphs(max_num_seqs=4)
    for num_decodes, chunks in ((3, []), (4, []), (2, [3])):
        step = step_of(num_decodes, chunks)
        step.last_token_ids = drawn
        known = step.input_ids.tolist()
        step.input_ids[:2] = torch.tensor([-3, -4])
        size = graphs.size_for(step)
        assert (size is None) == bool(chunks)
        if size is None:
            step = step.to(DEVICE)
            step.fill_in_pending()
        else:
            graphs.replays[size] = lambda: None
            _, step = graphs.run(step, size)
            assert step.input_ids.data_ptr() == graphs.buffer.data_ptr()
            known += [0] * (size - num_decodes)
        assert step.input_ids.tolist() == [8, 0, *known[2:]]


def new_graphs(max_num_seqs=20, max_model_len=12, num_drafts=0) -> StepGraphs:
    limits = replace(limits_of(max_num_seqs, max_model_len=max_model_len), num_drafts=num_drafts)
    model: Any = SimpleNamespace(ops=triton_ops)
    return StepGraphs(model, CACHE, limits)


def step_of(num_decodes: int, chunks: list[int]) -> StepInputs:
    """Each token, and each sequence, is a number that can be recognized."""
    counts = torch.tensor([1] * num_decodes + chunks)
    num_tokens, num_seqs = int(counts.sum()), len(counts)
    batch = Batch(
        CACHE,
        slot_mapping=100 + torch.arange(num_tokens),
        cu_seqlens_q=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        context_lens=50 + torch.arange(num_seqs, dtype=torch.int32),
        cu_blocks=torch.arange(num_seqs + 1, dtype=torch.int32),
        block_tables=torch.arange(num_seqs, dtype=torch.int32),
        num_decodes=num_decodes,
    )
    ids = torch.arange(num_tokens)
    return StepInputs(1 + ids, 300 + ids, batch, batch.cu_seqlens_q[1:].long() - 1)


def test_which_steps_have_a_graph():
    graphs = new_graphs()
    sizes = {rows: graphs.size_for(step_of(rows, [])) for rows in (1, 2, 3, 9, 20, 32, 33)}
    assert sizes == {1: 1, 2: 2, 3: 4, 9: 16, 20: 32, 32: 32, 33: None}
    for num_decodes, chunks in ((0, [2]), (1, [2]), (8, [65]), (3, [2] * 9)):
        assert graphs.size_for(step_of(num_decodes, chunks)) is None
    drafts = new_graphs(num_drafts=3)  # four tokens of each sequence, on average
    steps = {
        (0, 4): 1,
        (1, 4): 2,
        (0, 5): 2,
        (3, 2, 2): 8,
        (20, 4): 32,
        (20, 60): 32,
        (20, 120): None,
    }
    for (num_decodes, *chunks), size in steps.items():
        assert drafts.size_for(step_of(num_decodes, chunks)) == size
    assert drafts.size_for(step_of(3, [])) == 4
    long = step_of(4, [])  # the largest has 32 sequences, each with at most 3 blocks
    long.batch.block_tables = torch.zeros(3 * 32, dtype=torch.int32)
    assert graphs.size_for(long) == 4
    long.batch.block_tables = torch.zeros(3 * 32 + 1, dtype=torch.int32)
    assert graphs.size_for(long) is None


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("max_num_seqs, max_model_len", [(1, 1), (3, 12), (20, 1000), (600, 3)])
def test_the_buffer_holds_every_step(max_num_seqs, max_model_len, num_drafts):
    """All rows, the longest tables, every option of sampling; and hardly more."""
    graphs = new_graphs(max_num_seqs, max_model_len, num_drafts)
    rows = min(max_num_seqs, 512)
    num_tables = graphs.sizes[-1]
    step = step_of(0, [1 + num_drafts] * rows) if num_drafts else step_of(rows, [])
    max_num_seqs *= 1 + num_drafts  # rows that may draw
    step.batch.block_tables = torch.zeros(num_tables * -(-max_model_len // 4), dtype=torch.int32)
    step.sampled_rows = torch.zeros(2 * max_num_seqs, dtype=torch.int64)  # all draw, all are scored
    numbers = torch.ones(6, max_num_seqs)
    step.sampling = Sampling(*numbers[:1], *numbers[1:4].long(), *numbers[4:])
    size = graphs.size_for(step)
    moved = graphs.padded(step, size).to(DEVICE, graphs.buffer)
    assert moved.sampling.min_p.tolist() == [1.0] * max_num_seqs
    needed = sum(tensor.nbytes for tensor in moved.tensors.values())
    assert needed <= graphs.buffer.nbytes <= 2 * needed + 500


@pytest.mark.parametrize(
    "num_decodes, chunks", [(1, []), (3, []), (8, []), (20, []), (0, [4]), (2, [3, 4, 2]), (5, [9])]
)
def test_every_sequence_is_where_its_recording_looks_for_it(num_decodes, chunks):
    """By brute force: each sequence's tokens, context and blocks, in both forms of the step."""
    graphs, step = new_graphs(num_drafts=3), step_of(num_decodes, chunks)
    size = graphs.size_for(step)
    padded = graphs.padded(step, size)
    num_seqs = num_decodes + len(chunks)
    tokens = 4 if chunks else 1
    assert padded.batch.num_decodes == (0 if chunks else size)
    plain = graphs.padding(size, tokens).model_inputs
    shapes = {name: (t.shape, t.dtype) for name, t in plain.items()}
    for name, tensor in padded.model_inputs.items():
        assert name == "block_tables" or (tensor.shape, tensor.dtype) == shapes[name]
    seen = [of_sequence(padded, i) for i in range(num_seqs)]
    assert seen == [of_sequence(step, i) for i in range(num_seqs)]
    assert not padded.batch.context_lens[num_seqs:].any()
    if chunks:
        assert not padded.batch.cu_seqlens_q[num_seqs:].diff().any()
    num_real = len(step.input_ids)
    assert (padded.batch.slot_mapping >= 0).sum() == num_real
    sampled = padded.input_ids[padded.sampled_rows]
    assert torch.equal(sampled, step.input_ids[step.sampled_rows])


def of_sequence(step: StepInputs, b: int) -> tuple:
    start, end = step.batch.cu_seqlens_q[b : b + 2].tolist()
    tokens = [t[start:end].tolist() for t in (step.input_ids, step.positions)]
    slots = step.batch.slot_mapping[start:end].tolist()
    return tokens, slots, int(step.batch.context_lens[b]), int(step.batch.cu_blocks[b])


@pytest.fixture(scope="module", params=["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def path(request, tmp_path_factory):
    model = new_model(request.param, head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    return save(model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def interpret_little(monkeypatch):
    """Where there is no GPU, layers that know nothing of a graph's buffers do without Triton."""
    problem = interpreter_problem()
    if DEVICE.type == "cpu" and problem is not None:
        pytest.skip(problem)
    for name in ("add_and_norm", "silu_and_mul"):
        if DEVICE.type == "cpu":
            monkeypatch.setattr(triton_ops, name, getattr(torch_ops, name))


# padding rows attend to nothing: any numbers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
def test_the_engine_gives_the_same_tokens_as_without(interpret_little, path):
    """Greedy and with every option of sampling, while the batch grows, shrinks and is preempted. The recorded steps overlap,
    so the tokens of the step before are filled in where a recording reads them."""
    prompts = [[i] * (5 * i + 1) for i in range(5)]
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(max_tokens=3, seed=1),
        SamplingParams(max_tokens=6, top_k=5, seed=2),
        SamplingParams(max_tokens=7, top_k=20, top_p=0.9, min_p=0.01, seed=3),
        SamplingParams(temperature=0, max_tokens=5, logprobs=2),
    ]
    answers, replayed = [], []
    for eager in (False, True):
        llm = LLM(
            path, dtype="float32", attention_backend="triton", enforce_eager=eager, max_num_seqs=9, block_size=4,
            num_blocks=10, max_num_batched_tokens=24, overlap=not eager,
        )  # fmt: skip
        assert (llm.runner.recorder is None) == eager
        for size, step in llm.runner.recorder.replays.items() if not eager else ():
            llm.runner.recorder.replays[size] = lambda size=size, step=step: (
                replayed.append(size) or step()
            )
        answers.append(
            [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        )
        assert llm.stats()["preemptions"] > 0
        check_blocks(llm.block_manager, [])
    for with_graphs, without in zip(*answers):
        assert with_graphs.token_ids == without.token_ids
    assert {1, 2, 4} <= set(replayed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
def test_steps_with_drafts_are_replayed(interpret_little, path, monkeypatch):
    """Prompts, drafts and decodes beside each other, with contexts in parts."""
    monkeypatch.setattr("nanovllm.layers.triton_plan.share_of", lambda *args: 5)
    monkeypatch.setattr("nanovllm.layers.triton_plan.PART", 16)
    options = dict(dtype="float32", num_blocks=60, max_num_seqs=4, max_model_len=96, block_size=4)
    prompts = [[1, 2, 3] * 6, [4, 5] * 9, [7] * 21]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain = LLM(path, attention_backend="torch", **options)
    expected = [one.outputs[0].token_ids for one in plain.generate(prompts, params, use_tqdm=False)]
    drafts = {"num_speculative_tokens": 3}
    llm = LLM(path, attention_backend="triton", speculative_config=drafts, **options)
    replays, used = llm.runner.recorder.replays_of_drafts, []
    for size, step in replays.items():
        replays[size] = lambda size=size, step=step: used.append(size) or step()
    found = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    assert found == expected and used and llm.stats()["draft_tokens"] > 0


class MadeUpDevice:
    """Memory as PyTorch's caching allocator sees it: what a step has used stays reserved until `empty_cache`, which the
    beginning of a recording calls, too; what a recording uses is its own for good."""

    total, others, peak = 2**30, 2**27, 2**25

    def __init__(self, monkeypatch):
        self.cached, self.recorded, self.sizes = 0, 0, []
        said = {
            "mem_get_info": lambda: (
                self.total - self.others - self.cached - self.recorded,
                self.total,
            ),
            "memory_reserved": lambda: self.cached + self.recorded,
            "max_memory_reserved": lambda: self.peak,
            "empty_cache": self.empty_cache,
            "synchronize": lambda: None,
            "reset_peak_memory_stats": lambda: None,
        }
        for name, answer in said.items():
            monkeypatch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer())
        record, launch = StepGraphs.record, ModelRunner.launch

        def recorded(graphs, size):
            self.empty_cache()
            self.sizes.append(size)
            # the largest has the activations
            self.recorded += 2**24 if self.recorded == 0 else 2**20
            record(graphs, size)

        def ran(runner, schedule):
            # sorting 256 x 151,936 logits takes much more than the step's graph
            self.cached = 2**28
            return launch(runner, schedule)

        monkeypatch.setattr(StepGraphs, "record", recorded)
        monkeypatch.setattr(ModelRunner, "launch", ran)

    def empty_cache(self):
        self.cached = 0


@pytest.mark.parametrize("max_num_seqs, tried", [(1, [1, 1]), (2, [2, 1]), (20, [32, 16])])
def test_what_the_graphs_take_is_estimated_from_large_ones(monkeypatch, max_num_seqs, tried):
    """The largest takes the activations, the next one what all others take at most."""
    taken, recorded = {32: 500, 2: 500, 1: 30, 16: 70}, []

    def record(graphs, size):
        recorded.append(size)

    monkeypatch.setattr(StepGraphs, "record", record)
    monkeypatch.setattr(
        memory, "free_memory", lambda device: 10_000 - sum(taken[size] for size in {*recorded})
    )
    graphs = new_graphs(max_num_seqs)
    expected = {1: 30, 2: 500 + 30, 20: 500 + 70 * 5}[max_num_seqs]
    assert memory.graph_memory(torch.device("cuda"), graphs) == expected
    assert recorded == tried


def num_blocks_of_a_gpu(runner, config):
    return memory.memory_left(runner, config) // runner.shape.block_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py does it with real memory")
@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
def test_the_trials_that_size_the_cache_of_a_gpu_run(
    interpret_little, path, monkeypatch, backend, mode
):
    """The largest step, and the recordings, before there is a cache. What others hold, the step's peak and the graphs are
    taken off; what the allocator keeps for later is neither lost nor won."""
    device = MadeUpDevice(monkeypatch)
    monkeypatch.setattr(ModelRunner, "_num_blocks_that_fit", num_blocks_of_a_gpu)
    llm = LLM(
        path, dtype="float32", attention_backend=backend, max_num_seqs=2, max_num_batched_tokens=40, block_size=16,
        preemption_mode=mode, swap_gib=0.01,
    )  # fmt: skip
    graphs = 2**24 + 2**20 if backend == "triton" else 0
    swapped = llm.runner.shape.block_bytes if mode == "swap" else 0
    left = int(device.total * 0.9) - device.others - device.peak - graphs - swapped
    num_blocks = left // llm.runner.shape.block_bytes
    assert llm.runner.num_blocks == llm.runner.kv_cache.num_blocks == num_blocks > 0
    # two are tried, then all are recorded
    assert device.sizes == ([2, 1, 2, 1] if backend == "triton" else [])
    assert (llm.runner.caches.on_host is not None) == (mode == "swap")


@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("eager", [True, False])
def test_an_engine_that_is_gone_takes_its_memory_along(interpret_little, path, eager):
    """No cycle keeps the KV cache, so that the next engine has room."""
    llm = LLM(
        path,
        dtype="float32",
        attention_backend="triton",
        enforce_eager=eager,
        max_num_seqs=2,
        num_blocks=20,
    )
    llm.generate([[5] * 10], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    cache = weakref.ref(llm.runner.kv_cache.tensor)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert cache() is None
    finally:
        gc.enable()
