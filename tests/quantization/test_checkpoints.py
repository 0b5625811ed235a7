"""Checkpoints that are quantized already, written by the layouts of GPTQ, AWQ and FP8, against transformers with the
weights that they stand for.

Run: pytest tests/quantization/test_checkpoints.py [-k fp8]
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoints import greedy, new_model
from safetensors.torch import load_file, save_file
from thread_group import Threads

from nanovllm import LLM, SamplingParams, loader
from nanovllm.config import Config
from nanovllm.layers import torch_ops
from nanovllm.layers.linear import Linear
from nanovllm.topics.quantization.groups import dequantized
from nanovllm.topics.quantization.layers import choose_product

PROMPT = [*range(1, 60)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS = {"dtype": "float32", "num_blocks": 50}
SIZES = {"hidden_size": 128, "head_dim": 32}
QWEN2 = {"hidden_size": 128, "family": "qwen2"}


class Checkpoint(NamedTuple):
    path: Path
    model: torch.nn.Module  # with the weights that the files stand for


def in_int32(numbers, bits, order=range(8)) -> torch.Tensor:
    """Each row: the number at place order[i] of every 32 / bits is in the i-th lowest bits."""
    places = [*order][: 32 // bits]
    parts = numbers.long().unflatten(1, (-1, len(places)))[..., places]
    return (parts << bits * torch.arange(len(places))).sum(-1).to(torch.int32)


def codes_of(weight, quant_method, bits, group_size, checkpoint_format="gptq", **_):
    """Random codes: the tensors by the end of their names, and the weight [out, in]."""
    num_out, num_in = weight.shape
    codes = torch.randint(0, 2**bits, (num_in, num_out))
    shape = (num_in // group_size, num_out)
    zeros = torch.randint(0, 16, shape) if bits == 4 else torch.full(shape, 128)
    scales = ((torch.rand(shape) + 0.5) * 0.6 / 2**bits).half()
    group = torch.arange(num_in, dtype=torch.int32) // group_size
    stands_for = (codes - zeros[group.long()]) * scales[group.long()].float()
    if quant_method == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {"qweight": in_int32(codes, 4, order), "qzeros": in_int32(zeros, 4, order)}
    else:
        stored = zeros if checkpoint_format == "gptq_v2" else (zeros - 1) % 2**bits
        tensors = {"qweight": in_int32(codes.T, bits).T, "qzeros": in_int32(stored, bits)}
        tensors |= {"g_idx": group, "bias": torch.zeros(num_out)}
    return tensors | {"scales": scales}, stands_for.T


def fp8_of(weight, **_):
    codes = (torch.randn(weight.shape) * 60).to(torch.float8_e4m3fn)
    scales = torch.rand([-(-size // 128) for size in weight.shape]) * 3e-3
    stands_for = codes.float()
    for o in range(len(scales)):
        for i in range(len(scales[0])):
            stands_for[128 * o : 128 * (o + 1), 128 * i : 128 * (i + 1)] *= scales[o, i]
    return {"weight": codes, "weight_scale_inv": scales}, stands_for


@torch.no_grad()
def written(path: Path, is_sharded=False, lm_head=False, sizes=SIZES, **settings) -> Checkpoint:
    """With the settings in config.json. If it is sharded, scales are in another file than codes."""
    largest_group = settings.get("group_size") == 128
    model = new_model(intermediate_size=256 if largest_group else 192, **sizes)
    model.config.save_pretrained(path)
    change(path, quantization_config=settings)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ("proj" in name or lm_head):
            del tensors[f"{name}.weight"]
            of_method = fp8_of if settings["quant_method"] == "fp8" else codes_of
            found, stands_for = of_method(module.weight, **settings)
            tensors = {f"{name}.{kind}": tensor for kind, tensor in found.items()} | tensors
            module.weight.copy_(stands_for)
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    shards = {"model.safetensors": tensors}
    if is_sharded:
        scales = {name: tensors.pop(name) for name in [*tensors] if "scale" in name}
        shards = {"1.safetensors": tensors, "2.safetensors": scales}
        index = {name: file for file, part in shards.items() for name in part}
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": index}), encoding="utf-8"
        )
    for file, part in shards.items():
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, path / file)
    return Checkpoint(path, model)


def change(path: Path, **changes) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes), encoding="utf-8")


def check_near(llm, model, most) -> None:
    """The log-probabilities of the 20 likeliest first tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    found = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].logprobs[0]
    expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    assert max(abs(logprob - expected[i].item()) for i, logprob in found.items()) < most


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CASES = {
    "gptq": GPTQ | {"lm_head": True},
    "gptq, 8 bits": GPTQ | {"bits": 8, "is_sharded": True, "sizes": QWEN2},
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 64},
    "gptq, 128": GPTQ | {"group_size": 128, "sizes": SIZES | {"tie_word_embeddings": True}},
    "awq": AWQ | {"is_sharded": True},
    "awq, 32": AWQ | {"group_size": 32, "sizes": SIZES | {"tie_word_embeddings": True}},
    "awq, 128": AWQ | {"group_size": 128, "sizes": QWEN2},
}


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_codes(case, tmp_path):
    """The layers' weights are those of the file, to the last bit. With two ranks, the same numbers are added up."""
    path, model = written(tmp_path, **CASES[case])
    llm = LLM(path, **OPTIONS)
    check_near(llm, model, 0.5)
    num_groups = 0
    for name, module in llm.runner.model.named_modules():
        if isinstance(module, Linear) and module.weight.is_meta:
            parts = [name.replace(name.split(".")[-1], part) for part in module.part_slices]
            weights = [model.get_submodule(part).weight for part in parts or [name]]
            groups = module.product.keywords["product"].keywords["weight"]
            assert torch.equal(dequantized(groups), torch.cat(weights))
            num_groups += 1
    assert num_groups == 8 + ("lm_head" in CASES[case])
    if CASES[case]["group_size"] == 32:
        with Threads(path, 2, **OPTIONS) as split:
            outputs = [one.generate([PROMPT], GREEDY, use_tqdm=False)[0] for one in (llm, split)]
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


@pytest.mark.parametrize("is_sharded", [False, True])
def test_fp8(is_sharded, tmp_path):
    path, model = written(tmp_path, is_sharded, **FP8)
    with Threads(path, 2, **OPTIONS) as split:
        for llm in (LLM(path, **OPTIONS), split):
            (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == greedy(model, PROMPT, 8)
            check_near(llm, model, 1e-3)
    for quantization, most in (("int8", 1), ("int4", 4)):
        llm = LLM(path, quantization=quantization, **OPTIONS)
        assert llm.runner.model.lm_head.weight.is_meta
        check_near(llm, model, most)


# --- what is refused ---

REFUSED = [
    ({"quant_method": "bitsandbytes"}, "by 'bitsandbytes' is not supported: gptq, awq and fp8 are"),
    (GPTQ | {"desc_act": True}, "by 'gptq' with desc_act=True is not supported"),
    (GPTQ | {"checkpoint_format": "marlin"}, "by 'gptq' with .*='marlin' is not supported"),
    (GPTQ | {"bits": 3}, r"by 'gptq' with bits=3 is not supported: it must be one of \(4, 8\)"),
    (GPTQ | {"group_size": 96}, r"by .* group_size=96 is not supported: .* \(128, 64, 32\)"),
    (GPTQ | {"group_size": 128}, "group_size=128 is not possible .*: groups of 128 .* rows of 192"),
    (AWQ | {"version": "gemv"}, "by 'awq' with version='gemv' is not supported: it must be one of"),
    (FP8 | {"weight_block_size": None}, "by 'fp8' with weight_block_size=None is not supported"),
]


@pytest.fixture(scope="module")
def gptq(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("gptq"), **GPTQ).path


def check_refused(path, words, **options) -> None:
    """By one line, and before a model is allocated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "new_model", lambda *_: pytest.fail("a model"))
        with pytest.raises(ValueError, match=words) as error:
            LLM(path, **OPTIONS | options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings, words", REFUSED)
def test_settings_that_are_refused(settings, words, gptq):
    change(gptq, quantization_config=settings)
    start = "config.json cannot be read: quantization " if "not supported" in words else ""
    check_refused(gptq, start + words)


def test_options_that_are_refused(gptq):
    change(gptq, quantization_config=GPTQ)
    own = "'int8' is not allowed: it must be None: the checkpoint has codes of its own, by gptq"
    check_refused(gptq, own, quantization="int8")


def test_groups_that_ranks_cannot_share(gptq):
    change(gptq, quantization_config=AWQ)
    words = "tensor_parallel_size=2: groups of 64 numbers do not divide rows of 96"
    with pytest.raises(ValueError, match=words):
        choose_product(Config(tensor_parallel_size=2), loader.load_config(gptq), torch_ops)


@pytest.mark.parametrize(
    "settings, kind, words",
    [
        (GPTQ, "scales", "{path}: {layer} has a qweight, but no scales"),
        (AWQ, "qzeros", "{path}: {layer} has a qweight, but no qzeros"),
        (FP8, "weight_scale_inv", "{path}: {layer} has a weight, but no weight_scale_inv"),
    ],
)
def test_tensors_that_are_missing(settings, kind, words, tmp_path):
    """And a file that is cut off."""
    path, _ = written(tmp_path, **settings)
    file, layer = path / "model.safetensors", "model.layers.1.mlp.down_proj"
    tensors = load_file(file)
    del tensors[f"{layer}.{kind}"]
    save_file(tensors, file)
    check_refused(path, words.format(path=file, layer=layer))
    file.write_bytes(file.read_bytes()[:-1])
    check_refused(path, f"{file} is damaged or incomplete")


@pytest.mark.parametrize(
    "bits, kind, value, words",
    [
        (8, "qzeros", 0x7E7E7E7E, "8 bits with zeros far from 128"),  # 127, and 255 would be 128
        (4, "bias", 1, "unexpected tensors .*up_proj.bias.*, 1 in all"),
    ],
)
def test_numbers_that_are_refused(bits, kind, value, words, tmp_path):
    """GPTQ's tools give each layer a bias: of zeros, if the model has none."""
    path, _ = written(tmp_path, **GPTQ | {"bits": bits})
    tensors = load_file(path / "model.safetensors")
    tensors[f"model.layers.1.mlp.up_proj.{kind}"].fill_(value)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        LLM(path, **OPTIONS)


def test_a_long_list_of_tensors_is_cut_off(gptq):
    change(gptq, quantization_config=None)
    words = r"missing tensors .*cters\), 14 in all; unexpected tensors .*cters\), 70 in all"
    with pytest.raises(ValueError, match=words) as error:
        LLM(gptq, **OPTIONS)
    assert len(str(error.value)) < 800
