"""Random-weight checkpoints, small and strange, in the ordinary Hugging Face layout.

Tests import this file. An example that does: pytest tests/core/test_model.py
"""

from copy import deepcopy

import torch
import transformers

from nanovllm.topics.quantization.groups import Groups, packed

SHAPE = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
EXPERTS = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8}
EXPERTS |= {"num_experts_per_tok": 3, "norm_topk_prob": True}
HYBRID = dict(
    num_hidden_layers=4,  # three with a state, then one with a KV cache
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)


def new_model(family: str = "qwen3", seed: int = 0, **overrides):
    """A transformers model in fp32 whose logits are far from ties: larger weights than its own initialisation."""
    own = {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}, "qwen3_moe": EXPERTS}
    # a head_dim of 16 as all others, for which kernels are compiled
    own |= {"qwen2": {"hidden_size": 64}, "llama": {"hidden_size": 64}}
    own["qwen3_5_text"] = HYBRID
    own["qwen3_5_moe_text"] = HYBRID | EXPERTS | {"shared_expert_intermediate_size": 40}
    settings = SHAPE | own.get(family, {}) | overrides
    name = {
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen3_5_text": "Qwen3_5",
        "qwen3_5_moe_text": "Qwen3_5Moe",
    }[family]
    text = "Text" if family.endswith("_text") else ""
    config = getattr(transformers, f"{name}{text}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if "moe" in family and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others need operations that ttsem lacks
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qwen3_5" in family and ("norm" in name or parameter.dim() == 1):
                parameter.uniform_(-0.5, 0.5)  # of 1 + weight, and of decays
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.5 if "bias" in name else 0.2)
    return model


def save(model, path, **kwargs) -> str:
    model.save_pretrained(path, **kwargs)
    return str(path)


@torch.inference_mode()
def greedy(model, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers generates for one prompt on its own."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist()


def num_before_tie(router_logits, top: int) -> int:
    """The number of tokens before the first for which two experts nearly tie, in any layer."""
    ordered = torch.stack(router_logits).sort(-1, descending=True).values
    gaps = ordered[..., top - 1 : top] - ordered[..., top : top + 1]
    near = (gaps < 1e-4).any(-1).any(0)
    return near.tolist().index(True) if near.any() else len(near)


@torch.inference_mode()
def check_answer(model, prompt, output, tolerance=5e-4, is_greedy=True) -> None:
    """Log-probabilities of all tokens, and greedy tokens up to ties, against a full forward of a transformers model in
    float64: that in float32 may be as far from it. Behind a token for which two experts nearly tie, nothing is compared:
    rounding chooses one."""
    exact = deepcopy(model).double()
    options = {"output_router_logits": True} if "moe" in model.config.model_type else {}
    for answer in output.outputs:
        ids = prompt + answer.token_ids
        result = exact.model(torch.tensor([ids]), **options)
        rows = exact.lm_head(result.last_hidden_state)[0].log_softmax(-1)
        routers = getattr(result, "router_logits", None)
        sure = num_before_tie(routers, model.config.num_experts_per_tok) if routers else len(ids)
        known = [*(output.prompt_logprobs or [None] * len(prompt))[1:], *answer.logprobs]
        for i, (found, row) in enumerate(zip(known[:sure], rows)):
            token_id = ids[i + 1]
            assert found is None or abs(found[token_id] - row[token_id]) < tolerance
            if is_greedy and i >= len(prompt) - 1:
                assert row[token_id] > row.max() - tolerance


def check_answers(model, llm, prompts, params, **rest) -> list:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        check_answer(model, prompt, output, **rest)
    return outputs


def random_groups(num_out, num_groups, group, bits=4) -> Groups:
    """A weight of random codes."""
    codes = torch.randint(0, 16, (num_out, num_groups, group))
    scales = torch.rand(num_out, num_groups)
    if bits == 8:
        return Groups((codes * 17 - 128).to(torch.int8), scales, None)
    return Groups(packed(codes), scales, torch.randint(0, 16, scales.shape, dtype=torch.uint8))
