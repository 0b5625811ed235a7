"""vAttention: mapped memory against a dictionary of pages, attention against dense attention, tokens against
paging in software, and nothing left behind.

Run: pytest tests/vattention/test_vattention.py [-k rows]
"""

import errno
import gc
import logging
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from backends import DEVICE, PROBLEM
from checkpoints import new_model, save
from dense_attention import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.backends import torch_ops, triton_ops
from nanovllm.config import Limits
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.topics.vattention import memory as virtual_memory
from nanovllm.topics.vattention import ops as vattention
from nanovllm.topics.vattention.cache import PageTable, VirtualCache, VirtualShape
from nanovllm.topics.vattention.memory import HostMemory, System, mappings_free
from tutorials.measure.batches import random_batch

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd_create is Linux's")

PAGE = HostMemory.page_bytes
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def our_mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:nanovllm")


def our_files() -> int:
    return sum("memfd:nanovllm" in link for link in map(link_of, os.listdir("/proc/self/fd")))


def link_of(name: str) -> str:
    path = f"/proc/self/fd/{name}"
    return os.readlink(path) if os.path.islink(path) else ""


@pytest.fixture(scope="module")
def little_garbage():
    """A collection looks only at what the tests of this file make: of what others have imported, it takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left(little_garbage):
    """Of any test: what is mapped, the files, and the addresses."""
    gc.collect()
    before = our_mappings(), our_files()
    yield
    gc.collect()
    assert (our_mappings(), our_files()) == before


def system(num_mappings: int = 10_000, page_bytes: int = PAGE) -> System:
    return System(page_bytes, num_mappings, HostMemory)


# --- memory ---


@given(
    st.lists(st.tuples(st.sampled_from(["map", "write"]), *[st.integers(0, 7)] * 3), max_size=30)
)
@settings(max_examples=60, deadline=None)
def test_mapped_memory_against_a_dictionary(actions):
    memory = HostMemory(8 * PAGE)
    pool = memory.reserve(8 * PAGE)
    memory.map(pool, 0, 8 * PAGE)
    physical = memory.view(pool, 8 * PAGE).view(8, PAGE)
    physical[:] = torch.arange(1, 9, dtype=torch.uint8).unsqueeze(1)
    address = memory.reserve(16 * PAGE)
    seen = memory.view(address, 16 * PAGE).view(16, PAGE)
    shown: dict[int, int] = {}  # page of the range -> page of the memory
    value = 100
    for kind, place, page, length in actions:
        length = min(length + 1, 8 - page)
        if kind == "map":
            memory.map(address + place * PAGE, page * PAGE, length * PAGE)
            shown |= {place + i: page + i for i in range(length)}
        elif place in shown:
            value += 1
            seen[place] = value  # through one address, to be read through all others
            assert (physical[shown[place]] == value).all()
        for p in range(16):
            expected = physical[shown[p]] if p in shown else torch.zeros(PAGE, dtype=torch.uint8)
            assert seen[p].equal(expected)


def test_memory_lives_as_long_as_a_view():
    memory = HostMemory(PAGE)
    address = memory.reserve(PAGE)
    memory.map(address, 0, PAGE)
    part = memory.view(address, PAGE)[:10].view(torch.int16)
    del memory
    gc.collect()
    part.fill_(3)
    assert our_files() > 0 and part.tolist() == [3] * 5


def test_more_memory_than_there_is():
    with pytest.raises(OSError, match=r"the machine has [\d,]+ bytes"):
        HostMemory(2**60)
    memory = HostMemory(PAGE)
    with pytest.raises(OSError, match="mmap, 1,152,921,504,606,846,976 bytes"):
        memory.reserve(2**60)


# --- shapes ---


@given(
    layers=st.sampled_from([1, 2, 5, 28]),
    heads=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([16, 32, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 256, 3, 5, 48]),
    page_bytes=st.sampled_from([4096, 65536, 2**21]),
    num_mappings=st.sampled_from([300, 10_000, 10**9]),
)
def test_blocks_have_whole_pages_and_tokens_at_equal_distances(
    layers, heads, head_dim, dtype, block_size, page_bytes, num_mappings
):
    shape = CacheShape(layers, block_size, heads, head_dim, dtype)
    limits = Limits(max_model_len=1000, max_num_seqs=64, max_num_batched_tokens=100)
    try:
        found = VirtualShape(shape, limits, system(num_mappings, page_bytes))
    except ValueError as error:
        is_uneven = block_size & (block_size - 1) and f"block_size={block_size} is" in str(error)
        is_scarce = num_mappings < 1001 // block_size + 2 and "vm.max_map_count" in str(error)
        assert is_uneven or is_scarce
        return
    size = found.block_bytes
    assert size % page_bytes == 0 and size % block_size == 0
    assert size // block_size % 16 == 0 and size >= shape.block_bytes
    assert 1 <= found.num_rows <= 64
    assert found.num_rows * (-(-1000 // block_size) + 1) <= num_mappings
    if block_size & (block_size - 1) == 0:  # padded to the next page, and not more
        assert size - shape.block_bytes < page_bytes


def test_blocks_and_rows_show_the_same_numbers():
    """The number of a token says where it is, in each of them."""
    shape = CacheShape(3, 4, 2, 16, torch.float32)
    limits = Limits(max_model_len=10, max_num_seqs=2, max_num_batched_tokens=100)
    cache = VirtualShape(shape, limits, system()).new_cache(5, CPU)
    assert cache.tensor.shape == (2, 3, 5, 4, 2, 16)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    tables = [[4, 0, 2], [4, 3]]
    rows = cache.page_table.show(tables, [0, 0])
    for row, table in zip(rows, tables):
        for layer in range(3):
            expected = cache.tensor[:, layer, table].flatten(1, 2)
            seen = cache.rows.tensor[:, layer, row]
            assert seen[:, : expected.shape[1]].equal(expected)
            assert not seen[:, expected.shape[1] :].any()


# --- rows ---


class Interrupted:
    """Memory whose n-th change from now on is interrupted, before or after it is made; then none."""

    def __init__(self, memory):
        self.memory = memory
        self.left = 0

    def __getattr__(self, name):
        function = getattr(self.memory, name)
        return partial(self.change, function) if name == "map" else function

    def change(self, function, *args):
        self.left -= 1
        if self.left == 0:
            if args[0] % (2 * PAGE):
                function(*args)
            raise KeyboardInterrupt
        function(*args)


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=4), max_size=4), max_size=12
    ),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_rows_show_what_the_tables_say(steps, every, rng):
    """Of whatever sequences, with interrupts: each in a row of its own."""
    shape = CacheShape(2, 4, 1, 32, torch.float32)
    limits = Limits(max_model_len=16, max_num_seqs=4, max_num_batched_tokens=100)
    cache = VirtualShape(shape, limits, system()).new_cache(12, CPU)
    cache.tensor.copy_(torch.arange(1.0, 13).view(12, 1, 1, 1).expand(cache.tensor.shape))
    table = cache.page_table
    table.memory = Interrupted(table.memory)
    for tables in steps:
        starts = [rng.randrange(4 * len(blocks)) for blocks in tables]
        table.memory.left = every
        try:
            rows = table.show(tables, starts)
        except KeyboardInterrupt:
            rows = table.show(tables, starts)
        assert len(set(rows)) == len(rows) == len(tables)
        for row, blocks in zip(rows, tables):
            shown = cache.rows.tensor[0, 1, row, ::4, 0, 0].tolist()
            assert shown[: len(blocks)] == [b + 1.0 for b in blocks]


class Counted:
    """Memory that counts what is mapped, and waits."""

    def __init__(self, memory):
        self.memory, self.mapped, self.waits = memory, 0, 0

    def map(self, *args):
        self.mapped += 1
        self.memory.map(*args)

    def wait(self):
        self.waits += 1


def counted_table() -> PageTable:
    shape = CacheShape(1, 4, 2, 128, torch.float32)
    limits = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=100)
    table = VirtualShape(shape, limits, system()).new_cache(30, CPU).page_table
    table.memory = Counted(table.memory)
    return table


def test_only_what_is_new_is_mapped():
    table = counted_table()
    assert table.show([[5, 6], [7]], [0, 0]) == [0, 1] and table.memory.mapped == 3
    assert table.show([[7], [5, 6]], [3, 7]) == [1, 0]  # the same ones in another order
    assert table.memory.mapped == 3
    assert table.show([[5, 6, 8], [7]], [8, 4]) == [0, 1] and table.memory.mapped == 4
    # copy-on-write: the second one of two has another block in this place
    assert table.show([[5, 6, 8], [5, 6, 9]], [9, 9]) == [0, 1] and table.memory.mapped == 7
    assert table.memory.waits == 1  # until no step in flight reads block 7


def test_a_conversation_goes_on_where_it_was():
    """Its blocks are still mapped when it comes back, if no other sequence needed its row."""
    table = counted_table()
    table.show([[5, 6], [7]], [0, 0])
    table.show([[7]], [3])
    mapped = table.memory.mapped
    assert table.show([[7], [5, 6, 1]], [4, 8]) == [1, 0] and table.memory.mapped == mapped + 1
    table.show([[2], [3], [4], [9]], [0] * 4)  # the new sequences need all rows
    assert [shown[0] for shown in table.shown] == [2, 3, 4, 9]


def test_only_a_change_of_what_may_be_read_waits_for_the_device():
    """A step in flight reads the blocks of the last table, and none behind them."""
    table = counted_table()
    table.show([[5, 6, 8]], [0])
    assert table.show([[5, 6, 8], [1]], [12, 0]) == [0, 1] and table.memory.waits == 0
    assert table.show([[5, 2]], [8]) == [0] and table.memory.waits == 1  # block 6 is replaced
    table.show([[5, 2, 9]], [8])
    assert table.memory.waits == 1  # block 8 was there, but no step in flight reads it
    table.show([[3], [4], [7], [10]], [0] * 4)
    assert table.memory.waits == 2


# --- attention ---


def virtual(batch, num_rows: int, num_mappings: int = 10_000):
    """The same batch, with its cache in a VirtualCache."""
    tensor = batch.kv_cache.tensor
    _, layers, num_blocks, block_size, heads, head_dim = tensor.shape
    shape = CacheShape(layers, block_size, heads, head_dim, tensor.dtype)
    longest = max(64, int(batch.context_lens.max()))
    limits = Limits(max_model_len=longest, max_num_seqs=num_rows, max_num_batched_tokens=100)
    cache = VirtualShape(shape, limits, system(num_mappings)).new_cache(num_blocks, CPU)
    cache.tensor.copy_(tensor)
    batch.kv_cache = cache
    return batch


def check(sequences, num_heads, num_kv_heads, head_dim, num_rows=64, ops=None, **kwargs):
    """What no sequence owns is NaN: also behind the end of a sequence, in its last block."""
    ops = ops or vattention.on_cpu()
    batch, keys = random_batch(sequences, num_kv_heads, head_dim, **kwargs)
    batch = virtual(batch, num_rows)
    layer, scale = 1, head_dim**-0.5
    lengths = [length for length, _ in sequences]
    q = torch.randn(sum(lengths), num_heads, head_dim, generator=torch.Generator().manual_seed(1))
    new = torch.cat([kv[:, layer, -length:] for kv, length in zip(keys, lengths)], dim=1)
    batch.layout = ops.layout(batch)
    # of the step's two forms, either may store
    torch_ops.store_kv(new[0], new[1], batch.layout if sum(lengths) % 2 else batch, layer)
    expected = [dense_attention(x, *kv[:, layer], scale) for x, kv in zip(q.split(lengths), keys)]
    out = ops.paged_attention(q, batch, layer, scale)
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-4)
    return batch


MIXTURE = [(1, 9), (1, 1), (1, 33), (1, 31), (1, 30), (5, 5), (3, 20), (17, 40)]


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 2), (7, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", [16, 32, 80])
def test_a_mixture_of_prompts_chunks_and_decodes(heads, head_dim):
    check(MIXTURE, *heads, head_dim)


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("num_rows", [7, 8, 64])
def test_with_few_rows_block_tables_are_read(block_size, num_rows):
    batch = check(MIXTURE, 4, 2, 16, num_rows, block_size=block_size, num_blocks=500)
    assert (batch.layout.kv_cache is batch.kv_cache) == (num_rows < len(MIXTURE))


@pytest.mark.slow(but_every=3)
@pytest.mark.skipif(PROBLEM is not None or DEVICE != "cpu", reason=str(PROBLEM))
@pytest.mark.parametrize("num_rows", [7, 64])
@pytest.mark.parametrize("block_size", [2, 16])
def test_kernels_of_a_gpu_take_a_row_for_a_block(num_rows, block_size, monkeypatch):
    """In Triton's interpreter, with contexts in parts. With few rows, they read block tables."""
    monkeypatch.setattr("nanovllm.layers.triton_plan.share_of", lambda *args: 9)
    monkeypatch.setattr("nanovllm.layers.triton_plan.PART", 16)
    options = dict(block_size=block_size, num_blocks=200)
    check(MIXTURE, 4, 2, 20, num_rows, vattention.on_gpu(), **options)


# --- the engine ---


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(new_model(), tmp_path_factory.mktemp("qwen3"))


def tokens(outputs) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


@pytest.mark.slow(but_every=6)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_tokens_are_those_of_paging_in_software(path, block_size, mode):
    """Chunks, scarce memory, shared prefixes, several samples and beams, one after the other."""
    prefix = list(range(5, 45))
    prompts = [prefix + [i] * (3 + 5 * i) for i in range(5)]
    params = [SamplingParams(temperature=0.8, n=1 + i % 3, seed=i, max_tokens=14) for i in range(5)]
    answers = []
    for backend in ("torch", "vattention"):
        options = dict(attention_backend=backend, block_size=block_size, preemption_mode=mode)
        options |= dict(swap_prefixes=mode == "swap", swap_gib=0.01)  # 4 GiB are millions of blocks
        num_blocks = 130 // block_size + 9
        llm = LLM(
            path,
            dtype="float32",
            num_blocks=num_blocks,
            max_num_batched_tokens=20,
            max_model_len=256,
            **options,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts, GREEDY, use_tqdm=False)
        outputs += llm.beam_search(
            prompts[:2], BeamSearchParams(beam_width=3, max_tokens=12), use_tqdm=False
        )
        answers.append(tokens(outputs))
        assert llm.stats()["kv_blocks_used"] == 0 < llm.stats()["preemptions"]
        if backend == "vattention":
            assert isinstance(llm.runner.kv_cache, VirtualCache)
    assert answers[0] == answers[1]


@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")  # of padding rows
@pytest.mark.skipif(PROBLEM is not None or DEVICE != "cpu", reason=str(PROBLEM))
@pytest.mark.parametrize("way", ["a CPU's", pytest.param("a GPU's", marks=pytest.mark.slow)])
def test_nan_stays_with_its_request(way, tmp_path, monkeypatch):
    """A token's embedding is NaN, and blocks with NaN are used again. On a GPU, decodes are recorded in rows, and steps
    overlap: here recording and replay are plain calls."""
    # pytest keeps what is logged, an error keeps its frames, and these keep the engine
    monkeypatch.setattr(logging.getLogger("nanovllm.recovery"), "disabled", True)
    if way == "a GPU's":
        monkeypatch.setattr(vattention, "on_cpu", vattention.on_gpu)
        for name in ("add_and_norm", "silu_and_mul"):  # which know nothing of rows
            monkeypatch.setattr(triton_ops, name, getattr(torch_ops, name))
    model = new_model("qwen3", head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    options = dict(dtype="float32", num_blocks=14, max_num_seqs=3, block_size=4, max_model_len=24)
    prompts = [[*range(20, 20 + n)] for n in (9, 3, 6)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    path = save(model, tmp_path)
    expected = tokens(
        LLM(path, attention_backend="torch", **options).generate(prompts, params, use_tqdm=False)
    )
    llm = LLM(path, attention_backend="vattention", overlap=True, **options)
    assert (llm.runner.recorder is not None) == (way == "a GPU's")
    for _ in range(2):
        ids = [llm.add_request(prompt, params) for prompt in ([5, 7, 6, 5, 6], *prompts)]
        done = {}
        while llm.has_unfinished():
            done |= {output.request_id: output for output in llm.step() if output.finished}
        assert "NaN" in str(done[ids[0]].error)
        assert tokens(done[i] for i in ids[1:]) == expected


def test_a_mapping_that_fails_ends_one_step_and_the_engine_goes_on(path, monkeypatch):
    """The system may lack mappings when it is too late to refuse the engine."""
    # pytest keeps what is logged, an error keeps its frames, and these keep the engine
    monkeypatch.setattr(logging.getLogger("nanovllm.recovery"), "disabled", True)
    llm = LLM(path, dtype="float32", attention_backend="vattention", num_blocks=100)
    before = tokens(llm.generate([[7] * 30, [8] * 9], GREEDY, use_tqdm=False))
    llm.reset_prefix_cache()
    plain, failures = HostMemory.map, []

    def fails_once(*args):
        if not failures:
            failures.append(args)
            raise OSError(errno.ENOMEM, "mmap")
        plain(*args)

    monkeypatch.setattr(HostMemory, "map", fails_once)
    assert tokens(llm.generate([[7] * 30, [8] * 9], GREEDY, use_tqdm=False)) == before
    assert failures and llm.stats()["failed_steps"] == 1 and llm.stats()["kv_blocks_used"] == 0


# --- what cannot work ---


@pytest.mark.parametrize("missing", ["memfd_create", "/proc"])
def test_a_system_that_cannot_map(missing, tmp_path, monkeypatch):
    if missing == "/proc":
        monkeypatch.setattr(virtual_memory, "MAPPINGS", tmp_path / "maps")
    else:
        monkeypatch.delattr(os, missing)
    with pytest.raises(ValueError, match="it needs memfd_create and /proc, which Linux has, or a"):
        LLM(attention_backend="vattention")
    LLM(attention_backend="torch", num_blocks=10)


def test_no_room_for_another_file(path, monkeypatch):
    """The reason is the system's, and not a lack of memory."""

    def refused(name):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refused)
    problem = r"there is no room for 20 KV blocks .* bytes each: Too many open files"
    with pytest.raises(ValueError, match=problem):
        LLM(path, attention_backend="vattention", num_blocks=20)


def test_too_few_mappings(monkeypatch):
    monkeypatch.setattr(virtual_memory, "mappings_free", lambda: 160)
    problem = (
        r"attention_backend='vattention' is not allowed: there is room for 120 mappings "
        r"\(vm.max_map_count\), and a sequence of max_model_len=2048 tokens in blocks of 16 takes 129"
    )
    with pytest.raises(ValueError, match=problem):
        LLM(attention_backend="vattention")
    llm = LLM(attention_backend="vattention", max_model_len=1024, num_blocks=100)
    assert llm.runner.shape.num_rows == 1
    questions = [[i] * 20 for i in range(5)]  # block tables are read until one is left
    paged = LLM(attention_backend="torch", num_blocks=100)
    assert tokens(llm.generate(questions, GREEDY)) == tokens(paged.generate(questions, GREEDY))


def test_a_block_that_no_page_holds():
    with pytest.raises(
        ValueError, match=r"block_size=17 is not allowed: its .* use a power of two"
    ):
        shape = CacheShape(2, 17, 2, 16, torch.float32)
        VirtualShape(
            shape, Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=9), system()
        )


def test_mappings_are_counted():
    before = mappings_free()
    memory = HostMemory(20 * PAGE)
    address = memory.reserve(40 * PAGE)
    for i in range(20):
        memory.map(address + 2 * i * PAGE, (19 - i) * PAGE, PAGE)
    assert 38 <= before - mappings_free() <= 42
