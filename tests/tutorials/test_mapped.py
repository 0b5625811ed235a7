"""What chapter 20 counts: copies out of blocks and rows, and nothing else.

Run: pytest tests/tutorials/test_mapped.py
"""

import pytest
import torch
from book import needs_of

from nanovllm import LLM
from tutorials.mapped import Copies


@pytest.fixture
def llm() -> LLM:
    needs_of("20")
    options = {"block_size": 8, "num_blocks": 4, "max_model_len": 16, "max_num_seqs": 2}
    return LLM(attention_backend="vattention", dtype="float32", **options)


@pytest.mark.parametrize("where", ["blocks", "rows"])
@pytest.mark.parametrize(
    "copy",
    [
        torch.clone,
        lambda keys: keys.index_select(0, torch.tensor([1])),
        lambda keys: keys[torch.tensor([1, 0])],
        lambda keys: keys.transpose(0, 1).contiguous(),
        lambda keys: keys.half(),
    ],
)
def test_each_copy_of_cached_keys_is_counted(llm, where, copy):
    cache = llm.runner.kv_cache
    keys = cache.layers[3][0] if where == "blocks" else cache.rows.layers[3][0]
    with Copies(llm) as copies:
        result = copy(keys)
    assert copies.copied == result.nbytes > 0


def test_views_and_other_tensors_are_not_counted(llm):
    other = torch.zeros(4, 4)
    with Copies(llm) as copies:
        llm.runner.kv_cache.rows.layers[0][0][0:1].transpose(0, 1).flatten(1, 2)
        other.clone()
        other.index_select(0, torch.tensor([1]))
    assert copies.copied == 0
