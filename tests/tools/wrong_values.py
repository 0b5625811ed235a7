"""Wrong values of each field of SamplingParams, BeamSearchParams and Config, and wrong requests, with their messages.

Tests import this file. An example that does: pytest tests/core/test_config.py -k wrong
"""

from math import inf, nan
from typing import Any

import torch

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.config import Config
from nanovllm.scheduler import Scheduler

HUGE = 10**400  # no float is as large
BOOL = "True or False"
COUNT = "an integer from 1 to 2**31 - 1"
IDS = "a list of token ids, or None"
POSITIVE = "a positive integer"
SEED = "an integer from 0 to 2**63 - 1"
SIZE = "a positive number, at most 2**30"
TO_20 = "an integer from 0 to 20, or None"

# class -> (field, allowed values in words, wrong values)
FIELDS: dict[Any, list[tuple[str, str, list]]] = {
    SamplingParams: [
        ("n", POSITIVE, [0, -1, 1.0, 1.5, True, "1", None]),
        ("temperature", "0 (greedy) or a number up to 1,000,000", [-0.1, -1e-46, 1e7, HUGE, nan, inf, "hot", "1", None, 1j]),
        ("top_k", "a positive integer, or 0 or -1 for all tokens", [-2, 1.5, 2.0, True, "all", None]),
        ("top_p", "above 0 and at most 1", [0, -1e-9, 1.0000001, 1.01, nan, HUGE, "1", None]),
        ("min_p", "from 0 to 1", [-0.1, -1e-46, 1.0000001, 1.1, HUGE, None]),
        ("presence_penalty", "from -2 to 2", [2.1]),
        ("frequency_penalty", "from -2 to 2", [nan, "1"]),
        ("repetition_penalty", "from 0.01 to 100", [0, True]),
        ("logit_bias", "a dict of token ids with numbers from -100 to 100, or None", [{"5": 1.0}, {5: 101}, {-1: 1}, [5]]),
        ("max_tokens", "a positive integer, or None; what does not fit is not generated", [0, -1, 1.5, "all"]),
        ("min_tokens", "an integer from 0 on", [-1]),
        ("min_tokens", "an integer from 0 to max_tokens=256", [257]),
        ("stop", "a string or a list of strings, none of them empty, or None", ["", [""], ["a", ""], 5, [1], b"a", {"a"}, [None]]),
        ("stop_token_ids", IDS, [[-1], [1.0], [True], ["a"], 0, 5, "12"]),
        ("ignore_eos", BOOL, ["false", "no", 0, 1, None]),
        ("include_stop_str_in_output", BOOL, [None]),
        ("skip_special_tokens", BOOL, [1]),
        ("seed", f"{SEED}, or None", [-1, 2**63, 1.0, True, "0"]),
        ("logprobs", TO_20, [-1, 21, 10**30, True, "1"]),
        ("prompt_logprobs", TO_20, [-1, 21, True]),
        ("allowed_token_ids", IDS, [[], [-1], [1.5], 5, torch.tensor([1, 2])]),
        ("bad_words", "a list of strings, none of them empty, or None", [[""], [5], "word"]),
        ("truncate_prompt_tokens", "-1 or a positive integer, or None", [0, -2, True, torch.tensor([1, 2])]),
        ("cache_salt", "a string that is not empty, or None", ["", 0, b"a", ["a"]]),
        ("structured_outputs", "StructuredOutputsParams or a dict of its fields, or None", [{}, 5]),
        ("extra_args", "a dict, or None", [[], "a", 5, {1, 2}]),
    ],
    BeamSearchParams: [
        ("beam_width", POSITIVE, [0, None]),
        ("max_tokens", POSITIVE, [0, -1, 1.5, "all", None]),
        ("length_penalty", "from -10 to 10", [-11, 1e30, HUGE, nan, "1"]),
        ("early_stopping", "True, False or 'never'", [0, 1, None, "always", "maybe"]),
        ("ignore_eos", BOOL, ["no", 0, 1, None]),
    ],
    Config: [
        ("model", "a hub id or a directory", [5, "x" * 10_000]),
        ("dtype", "auto, float32, bfloat16 or float16", ["float64"]),
        ("device", "auto, cpu, cuda or cuda:N", ["tpu", "cuda:x", "auto:0", "cuda:", "cuda:99999999999999999999"]),
        ("max_model_len", "an integer from 2 to 2**31 - 1, or None", [0, 1]),  # with 1, no request fits
        ("max_num_seqs", COUNT, [0]),
        ("max_num_batched_tokens", f"{COUNT}, or None", [-5]),
        ("block_size", COUNT, [0, 2**63]),
        ("num_blocks", f"{COUNT}, or None", [0, 10**30]),
        ("gpu_memory_utilization", "above 0 and at most 1", [0, 1.5]),
        ("kv_cache_gib", SIZE, [-1, nan, inf]),
        ("kv_cache_dtype", "auto or int8", ["fp8"]),
        ("enable_prefix_caching", BOOL, ["yes"]),
        ("preemption_mode", "recompute or swap", ["hope"]),
        ("swap_gib", SIZE, [0, "4"]),
        ("swap_prefixes", BOOL, ["yes"]),
        ("attention_backend", "auto, torch, numba, triton or vattention", ["magic"]),
        ("quantization", "'int8' or 'int4' (a quantized checkpoint needs no option), or None", ["int3"]),
        ("tensor_parallel_size", COUNT, [0]),
        ("rank_timeout", "a number of seconds, at least 1", [0, 0.5, -1.0, nan, "60", None, True]),
        ("enforce_eager", BOOL, [1]),
        ("overlap", f"{BOOL}, or None", [1, "yes"]),
        ("check_kernels", "cuda, always or never", [True]),
        ("speculative_config", "a dict of SpeculativeConfig's fields, or None", [5]),
        ("scheduler_cls", "a subclass of Scheduler, or None", [int, Scheduler.__new__(Scheduler)]),
        ("block_manager_cls", "a subclass of BlockManager, or None", ["BlockManager"]),
        ("seed", SEED, [-1]),
    ],
}  # fmt: skip


def wrong_values(cls: Any) -> dict[str, list]:
    """The wrong values of each field of a class."""
    found: dict[str, list] = {}
    for field, _, values in FIELDS[cls]:
        found.setdefault(field, []).extend(values)
    return found


# --- requests, for an engine with the embedded model, max_model_len=64 and max_num_seqs=12 ---

ROOM = "but max_model_len=64 leaves room for at most 63"
NO_TOKEN = "ids must be integers from 0 to 1535"
NO_FORM = "it must be text, token ids or a list of messages"
NO_DICT = "a dict must be {'prompt': text}, {'prompt_token_ids': token ids} or {'messages': messages}"  # fmt: skip
HELLO = {"role": "user", "content": "hello"}
A = {"type": "text", "text": "a"}
SEVEN = {"type": "text", "text": 7}
IMAGE = {"type": "image_url", "image_url": "x"}
DICTS = [{"text": "a"}, {"prompt": [1]}, {"prompt_token_ids": "a"}, {"messages": [HELLO], 1: 2}, {"prompt": "a", "more": {}}]  # fmt: skip
CONTENTS = [
    ("", 5, 5),
    ("", None, None),
    ("", A, A),
    ("[1]", "b", [A, "b"]),
    ("[2]", SEVEN, [A, A, SEVEN]),
]
CONTENTS += [("[0]", part, [part]) for part in (IMAGE, {"type": "text"}, {"text": "a"})]

PROMPTS: list[tuple[Any, str]] = [  # with the beginning of the message
    *((prompt, f"prompt={prompt!r} is empty: it must have at least") for prompt in ("", [], ())),
    ("\ud800", r"prompt='\ud800' is not allowed: the tokenizer rejects it: "),
    *(([5, i], f"prompt has the token id {i!r}: {NO_TOKEN}") for i in (1536, -1, 2**63, 1.0, True, None, [1])),
    ([10**5000], f"prompt has the token id an integer of 16610 bits: {NO_TOKEN}"),
    *(([one], f"prompt has the token id {one!r}: {NO_TOKEN}") for one in ({"role": "user"}, {"content": "x"})),
    ([7] * 64, f"the prompt has 64 tokens, {ROOM}"),
    ("a " * 90, f"the prompt has 91 tokens, {ROOM}"),
    ("a" * 10**6, "the prompt has 1,000,000 characters, but max_model_len=64 tokens hold 832"),
    *((prompt, f"prompt={prompt!r} is not allowed: {NO_FORM}") for prompt in (None, 5, 1.5, b"abc", {1, 2})),
    *((prompt, f"prompt={prompt!r} is not allowed: {NO_DICT}") for prompt in ({}, HELLO, *DICTS)),
    *(
        ([HELLO, {"role": "user", "content": content}], f"messages[1]['content']{place}={wrong!r} is not allowed: it must be ")
        for place, wrong, content in CONTENTS
    ),
]  # fmt: skip

PARAMS: list[tuple[Any, str]] = [
    *((params, f"sampling_params={params!r} is not allowed: it must be SamplingParams or Beam") for params in (5, "greedy", {}, SamplingParams)),
    ([SamplingParams()], "sampling_params=[SamplingParams(n=1, "),
    (SamplingParams(n=13), "n=13 is not allowed: it must be at most max_num_seqs=12"),
    (BeamSearchParams(beam_width=13), "beam_width=13 is not allowed: it must be at most max_num_seqs=12"),
    (SamplingParams(n=12, max_tokens=60), "the request may need 180 KV blocks of 4 tokens (prompt of 1 tokens, max_tokens=60, n=12)"),
    (BeamSearchParams(beam_width=12, max_tokens=60), "the request may need 180 KV blocks of 4 tokens (prompt of 1 tokens, max_tokens=60, beam_w"),
    (SamplingParams(stop_token_ids=[3, 1536]), f"stop_token_ids has the token id 1536: {NO_TOKEN}"),
    (SamplingParams(allowed_token_ids=[1536]), f"allowed_token_ids has the token id 1536: {NO_TOKEN}"),
    (SamplingParams(logit_bias={5: 1, 1536: -1}), f"logit_bias has the token id 1536: {NO_TOKEN}"),
]  # fmt: skip
