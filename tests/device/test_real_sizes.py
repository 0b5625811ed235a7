"""Attention and swaps at the sizes of Qwen3-0.6B, and its tokens, beside PyTorch's. Each engine on a GPU compares its other
kernels at these sizes when it starts (check_kernels.py). Without a GPU the same runs in Triton's interpreter with tiny
sizes, so that no typo waits for a GPU.

Run: pytest tests/device/test_real_sizes.py --slow [-k attention]
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from backends import move_batch

from nanovllm import LLM, SamplingParams
from nanovllm.backends import torch_ops
from nanovllm.layers import attention
from nanovllm.topics.simulator.cost_model import FIELDS
from tutorials.machine import interpreter_problem
from tutorials.measure.batches import random_batch
from tutorials.measure.checkpoints import random_model, write_checkpoint

triton_ops = pytest.importorskip("nanovllm.backends.triton_ops", reason="Triton is there for Linux")
triton_attention = pytest.importorskip("nanovllm.layers.triton_attention")
triton_plan = pytest.importorskip("nanovllm.layers.triton_plan")
HAS_GPU = torch.cuda.is_available()
PROBLEM = None if HAS_GPU else interpreter_problem()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
    # padding rows attend to nothing: any numbers
    pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning"),
]
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU and torch.cuda.is_bf16_supported(False) else torch.float16
ALLOWED = 2e-2  # error of a result, as a share of its largest number

HEADS = 16  # this and the next two: Qwen3-0.6B's attention
KV_HEADS = 8
HEAD_DIM = 128
BLOCK_SIZE = 16
TINY = dict(zip(FIELDS.split(), ("qwen3", 64, 128, 1, 4, 2, 32, True, 300, 512)))

if HAS_GPU:
    LAYERS, SWAPS = 28, 50
    PROMPTS, TOKENS = 32, 48
    OPTIONS = {}
    DECODES = [
        (1, 4000),
        (8, 4000),
        (33, 2500),
        (48, 2500),
        (256, 600),
    ]  # sequences, longest context
    SHARES = [None, 1, 64, 1024]  # by far more programs than these few sequences need
    CHUNKS = [
        (1000, 1000),
        (17, 17),
        (513, 513),
        (2, 700),
        (64, 1500),
        (300, 301),
    ]  # queries, context
else:
    LAYERS, SWAPS = 1, 2
    PROMPTS, TOKENS = 2, 2
    OPTIONS = {
        "kv_cache_gib": 0.01,
        "max_num_seqs": 4,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
    }
    DECODES = [(2, 60)]
    SHARES = [None, 2]
    CHUNKS = [(20, 20), (2, 30)]


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are NaN, or the largest integer: a result that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, allowed: float = ALLOWED) -> None:
    error = (actual.float() - expected.float()).abs().max().item()
    assert error <= allowed * expected.float().abs().max().item()  # which NaN is not, either


def decodes(count: int, longest: int) -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [(1, longest), *((1, rng.randint(1, longest)) for _ in range(count - 1))]


MIXTURE = [(1, 1), (1, CHUNKS[0][1]), (1, 17), *CHUNKS]
STEPS = {f"{count} decodes": (decodes(count, longest), SHARES) for count, longest in DECODES}
STEPS |= {"chunks": (CHUNKS, SHARES), "decodes, then chunks": (MIXTURE, SHARES)}


@pytest.mark.parametrize("name", STEPS)
def test_attention(name, monkeypatch):
    """With several numbers of programs for contexts in parts."""
    sequences, all_shares = STEPS[name]
    num_blocks = sum(-(-context // BLOCK_SIZE) for _, context in sequences) + 8
    batch, keys = random_batch(sequences, KV_HEADS, HEAD_DIM, BLOCK_SIZE, num_blocks, num_layers=1)
    move_batch(batch, DEVICE, DTYPE)
    new = torch.cat([kv[:, 0, -length:] for kv, (length, _) in zip(keys, sequences)], dim=1)
    new = new.to(DEVICE, DTYPE)
    torch_ops.store_kv(*new, batch, 0)
    q = randn(new.shape[1], HEADS, HEAD_DIM)
    expected = attention.paged_attention(q, batch, 0, HEAD_DIM**-0.5)
    for share in all_shares:
        if share is not None:
            monkeypatch.setattr(triton_plan, "share_of", lambda *args, share=share: share)
        batch.layout = triton_attention.layout(batch)
        with poisoned():
            out = triton_attention.paged_attention(q, batch, 0, HEAD_DIM**-0.5)
        assert_close(out, expected)


# --- the whole model ---


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Random weights."""
    if HAS_GPU:
        return str(random_model("qwen3-0.6b", Path("~/.cache/nanovllm")))
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_checkpoint(TINY, path)
    return str(path)


def answers(llm: LLM, max_tokens: int) -> list:
    rng = random.Random(0)
    lengths = [rng.randint(1, 4 * TOKENS) for _ in range(PROMPTS)]
    prompts = [[rng.randrange(300) for _ in range(length)] for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("eager", [True, False])
def test_tokens_are_those_of_pytorch(model, eager):
    """In float32, unless two tokens are equally likely: rounding decides a tie."""
    options = OPTIONS | {"dtype": "float32"}
    expected = answers(LLM(model, attention_backend="torch", **options), TOKENS)
    llm = LLM(model, attention_backend="triton", enforce_eager=eager, **options)
    for output, other in zip(answers(llm, TOKENS), expected):
        pairs = zip(output.token_ids, other.token_ids)
        at = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if at is not None:
            second, first = sorted(output.logprobs[at].values())[-2:]
            assert first - second < 1e-4, (at, output.token_ids, other.token_ids)
