"""The static buffers of CUDA graphs. Here recording and replay are a plain call; on a GPU they are real.

Run: pytest tests/test_cuda_graphs.py [-k padding]
"""

import pytest
import torch
from checkpoints import new_model, save

from nanovllm import LLM, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.cuda_graphs import DecodeGraphs, graph_sizes, padding, to_device
from nanovllm.model_runner import ModelRunner
from nanovllm.scheduler import Schedule
from nanovllm.sequence import Request
from nanovllm.stats import check_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_sizes():
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(256) == [1, 2, 4, 8, *range(16, 257, 16)]
    assert graph_sizes(257)[-1] == 272 and graph_sizes(10_000)[-1] == 512


def test_one_copy_and_always_the_same_places():
    tensors = {
        "a": torch.arange(3),
        "b": torch.rand(2, 3).T,  # not contiguous
        "none": torch.zeros(0, dtype=torch.int64),
        "c": torch.tensor([True]),
        "d": torch.arange(5, dtype=torch.int32),
    }
    buffer = torch.zeros(200, dtype=torch.uint8, device=DEVICE)
    moved = to_device(tensors, DEVICE, buffer)
    for name, tensor in tensors.items():
        assert torch.equal(moved[name].cpu(), tensor) and moved[name].dtype == tensor.dtype
        assert moved[name].data_ptr() % 16 == 0 or tensor.numel() == 0
    to_device({name: tensor * 0 for name, tensor in tensors.items()}, DEVICE, buffer)
    assert not any(tensor.any() for tensor in moved.values())  # the views of before show what was copied now
    with pytest.raises(RuntimeError):
        to_device({"too_long": torch.zeros(100)}, DEVICE, buffer)


def decode(rows: int) -> Schedule:
    return Schedule([(Request(None, None, [1], SamplingParams()).sequences[0], 1) for _ in range(rows)])


def test_which_steps_have_a_graph():
    graphs = DecodeGraphs(lambda inputs: None, max_num_seqs=20, width=3, device=DEVICE)
    assert [graphs.size_for(decode(rows)) for rows in (1, 2, 3, 9, 20, 32, 33)] == [1, 2, 4, 16, 32, 32, None]
    mixed = decode(2)
    mixed.items.append((Request(None, None, [1, 2], SamplingParams()).sequences[0], 2))
    assert graphs.size_for(mixed) is None


def test_rows_that_are_not_needed_are_padding():
    graphs = DecodeGraphs(lambda inputs: None, max_num_seqs=20, width=3, device=DEVICE)
    inputs = {name: tensor + 7 for name, tensor in padding(3, 2).items()} | {"sampled_rows": torch.arange(3)}
    inputs["cu_seqlens_q"] = torch.arange(4, dtype=torch.int32)
    padded = graphs.padded(inputs, 4)
    assert {name: t.shape for name, t in padding(4, 3).items()} == {n: padded[n].shape for n in padding(4, 3)}
    assert torch.equal(padded["sampled_rows"], inputs["sampled_rows"])
    assert padded["slot_mapping"].tolist() == [6, 6, 6, -1] and padded["context_lens"].tolist() == [7, 7, 7, 0]
    assert padded["cu_seqlens_q"].tolist() == [0, 1, 2, 3, 4]
    assert padded["block_tables"].tolist() == [[7, 7, 0]] * 3 + [[0, 0, 0]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(new_model("qwen3", head_dim=32), tmp_path_factory.mktemp("qwen3"))


@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")  # padding rows attend to nothing: any numbers
def test_the_engine_gives_the_same_tokens_as_without(path):
    """Greedy and with every option of sampling, while the batch grows, shrinks and is preempted."""
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
            num_blocks=10, max_num_batched_tokens=24,
        )  # fmt: skip
        assert (llm.runner.graphs is None) == eager
        for size, step in llm.runner.graphs.steps.items() if not eager else ():
            llm.runner.graphs.steps[size] = lambda size=size, step=step: replayed.append(size) or step()
        answers.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
        assert llm.stats()["preemptions"] > 0
        check_blocks(llm.block_manager, [])
    for with_graphs, without in zip(*answers):
        assert with_graphs.token_ids == without.token_ids
    assert {1, 2, 4} <= set(replayed)


class Generous(BlockManager):
    """Reserves far more blocks for a sequence than its tokens can fill, as contiguous allocators do."""

    def allocate(self, seq, num_tokens):
        copies = super().allocate(seq, num_tokens)
        while len(seq.block_table) < 40:
            seq.block_table.append(self._take().id)
        return copies


@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
def test_tables_may_be_longer_than_those_of_the_recording(path):
    """No context reaches the blocks beyond ceil(max_model_len / block_size)."""
    answers = []
    for manager_cls in (None, Generous):
        llm = LLM(
            path, dtype="float32", attention_backend="triton", max_num_seqs=2, max_model_len=30, block_size=4,
            num_blocks=80, block_manager_cls=manager_cls,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        answers.append([o.outputs[0].token_ids for o in llm.generate([[5] * 10, [6] * 3], params, use_tqdm=False)])
        assert llm.runner.graphs.width == 8 and llm.block_manager.num_used_blocks == 0
    assert answers[0] == answers[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py does it with real memory")
@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_trials_that_size_the_cache_of_a_gpu_run(path, monkeypatch, backend, mode):
    """The largest step, and the recordings, before there is a cache; what the device says is made up."""
    total, free, reserved, peak, recorded = 2**28, 2**27, 2**22, 2**24, []
    said = {"mem_get_info": (free, total), "memory_reserved": reserved, "max_memory_allocated": peak}
    for name, value in (said | {"reset_peak_memory_stats": None}).items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value)
    record = DecodeGraphs.record
    monkeypatch.setattr(DecodeGraphs, "record", lambda self, size: recorded.append(size) or record(self, size))
    fit = lambda self, config: self._memory_left(config) // self.block_bytes  # noqa: E731
    monkeypatch.setattr(ModelRunner, "_num_blocks_that_fit", fit)
    llm = LLM(
        path, dtype="float32", attention_backend=backend, max_num_seqs=2, max_num_batched_tokens=40, block_size=16,
        preemption_mode=mode, swap_gib=0.01,
    )  # fmt: skip
    left = int(total * 0.9) - (total - free - reserved) - peak - (2**26 if mode == "swap" else 0)
    num_blocks = left // llm.runner.block_bytes
    assert llm.runner.num_blocks == llm.runner.kv_cache.shape[2] == num_blocks > 0
    assert recorded == ([2, 1, 2, 1] if backend == "triton" else [])
    assert (llm.runner.host_cache is not None) == (mode == "swap")
