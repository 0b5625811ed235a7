"""Checkpoints that are quantized already, written by the layouts of GPTQ, AWQ and FP8, against transformers with the
weights that they stand for.

Run: pytest tests/quantization/test_checkpoints.py [-k fp8]
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from checkpoints import greedy, new_model
from safetensors.torch import load_file, save_file
from thread_group import Threads

from nanovllm import LLM, SamplingParams, loader
from nanovllm.backends import torch_ops
from nanovllm.config import Config
from nanovllm.layers.experts import Stack, product
from nanovllm.layers.linear import Linear
from nanovllm.topics.quantization.groups import dequantized
from nanovllm.topics.quantization.layers import quantizer

PROMPT = [*range(1, 60)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
# one call would be compiled for each form; with such weights, test_numba_step.py compares it
OPTIONS = {"dtype": "float32", "num_blocks": 50, "enforce_eager": True}
SIZES = {"hidden_size": 128, "head_dim": 32}
QWEN2 = {"hidden_size": 128, "family": "qwen2"}
# each token uses all experts: a rounded row could choose other ones
EXPERTS = SIZES | {"family": "qwen3_moe", "moe_intermediate_size": 64, "num_experts_per_tok": 8}


class Checkpoint(NamedTuple):
    path: Path
    model: torch.nn.Module  # with the weights that the files stand for


def in_int32(numbers, bits, order=range(8)) -> torch.Tensor:
    """Each row: the number at place order[i] of every 32 / bits is in the i-th lowest bits."""
    places = [*order][: 32 // bits]
    parts = numbers.long().unflatten(1, (-1, len(places)))[..., places]
    return (parts << bits * torch.arange(len(places))).sum(-1).to(torch.int32)


def codes_of(
    weight, quant_method, bits, group_size, checkpoint_format="gptq", sym=False, zero=None, **_
):
    """Random codes: the tensors by the end of their names, and the weight [out, in]. With `zero`, this number is stored
    for all zeros."""
    num_out, num_in = weight.shape
    codes = torch.randint(0, 2**bits, (num_in, num_out))
    shape = (num_in // group_size, num_out)
    has_zeros = bits == 4 and not sym
    zeros = torch.randint(0, 16, shape) if has_zeros else torch.full(shape, 2 ** (bits - 1))
    scales = ((torch.rand(shape) + 0.5) * 0.6 / 2**bits).half()
    group = torch.arange(num_in, dtype=torch.int32) // group_size
    stands_for = (codes - zeros[group.long()]) * scales[group.long()].float()
    if quant_method == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {"qweight": in_int32(codes, 4, order), "qzeros": in_int32(zeros, 4, order)}
    else:
        stored = zeros if checkpoint_format == "gptq_v2" else (zeros - 1) % 2**bits
        stored = stored if zero is None else torch.full(shape, zero)
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


def matrices(model) -> dict[str, torch.Tensor]:
    """The weight of each linear layer, and the matrices of each expert, by their names in a file."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[name] = module.weight
        elif name.endswith("experts"):
            for e, both in enumerate(module.gate_up_proj):
                of_expert = zip(("gate", "up", "down"), (*both.chunk(2), module.down_proj[e]))
                found |= {f"{name}.{e}.{part}_proj": weight for part, weight in of_expert}
    return found


@torch.no_grad()
def written(path: Path, is_sharded=False, lm_head=False, sizes=SIZES, **settings) -> Checkpoint:
    """With the settings in config.json. If it is sharded, scales are in another file than codes."""
    largest_group = settings.get("group_size") == 128
    model = new_model(intermediate_size=256 if largest_group else 192, **sizes)
    model.config.save_pretrained(path)
    of_layers = settings.pop("of_layers", {})  # settings of layers by the ends of their names
    said = settings | {"zero": None} | settings.pop("config", {})  # what config.json says instead
    said = {key: value for key, value in said.items() if value is not None}
    change(path, quantization_config=said)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor for name, tensor in stored.items() if "experts" not in name}
    for name, weight in matrices(model).items():
        if "proj" in name or lm_head:
            tensors.pop(f"{name}.weight", None)
            of_method = fp8_of if settings["quant_method"] == "fp8" else codes_of
            own = next((own for end, own in of_layers.items() if name.endswith(end)), {})
            found, stands_for = of_method(weight, **settings | own)
            tensors = {f"{name}.{kind}": tensor for kind, tensor in found.items()} | tensors
            weight.copy_(stands_for)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
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


def edit(path: Path, name: str, function) -> None:
    """Replaces a tensor by what the function makes of it; without a function, removes the tensor."""
    files = [*path.glob("*.safetensors")]
    file = next((one for one in files if name in load_file(one)), files[0])
    tensors = load_file(file)
    tensor = tensors.pop(name, None)
    if function is not None:
        tensors[name] = function(tensor).contiguous()
    save_file(tensors, file)


def check_near(llm, model, most) -> None:
    """The log-probabilities of the 20 likeliest first tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    found = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].logprobs[0]
    expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    assert max(abs(logprob - expected[i].item()) for i, logprob in found.items()) < most


def weight_in(layer: Linear) -> torch.Tensor:
    """What the codes of a layer stand for."""
    return dequantized(layer.quantized.weight())


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
SYM = GPTQ | {"sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FORMAT = {"checkpoint_format": None, "format": "gptq_v2"}
CASES = {
    "gptq": GPTQ | {"lm_head": True},
    "gptq, 8 bits": GPTQ | {"bits": 8, "is_sharded": True, "sizes": QWEN2},
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 64},
    "gptq, 128": GPTQ | {"group_size": 128, "sizes": SIZES | {"tie_word_embeddings": True}},
    "symmetric": SYM,
    "symmetric, 8 stored for 8": SYM | {"zero": 8},  # as some tools write it (vllm#52637)
    "symmetric, 0 stored for 128": SYM | {"zero": 0, "bits": 8, "sizes": QWEN2},
    "another name of the format": GPTQ | {"checkpoint_format": "gptq_v2", "config": FORMAT},
    "act order, which changed nothing": GPTQ | {"config": {"desc_act": True, "bits": 4.0}},
    "8 bits in one layer": SYM | {"of_layers": {"down_proj": {"bits": 8}}},
    "experts": GPTQ | {"sizes": EXPERTS, "is_sharded": True},
    "experts in 8 bits": GPTQ | {"bits": 8, "sizes": EXPERTS},
    "awq": AWQ | {"is_sharded": True},
    "awq, experts": AWQ | {"sizes": EXPERTS},
    "awq, in capitals": AWQ | {"version": "GEMM"},
    "awq, 32": AWQ | {"group_size": 32, "sizes": SIZES | {"tie_word_embeddings": True}},
    "awq, 128": AWQ | {"group_size": 128, "sizes": QWEN2},
}


@pytest.mark.slow(but_every=3)
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
            weights = [matrices(model)[part] for part in parts or [name]]
            assert torch.equal(weight_in(module).cpu(), torch.cat(weights))
            num_groups += 1
    assert num_groups == 8 + ("lm_head" in CASES[case])
    if CASES[case]["group_size"] == 32:
        whole = LLM(path, device="cpu", **OPTIONS)  # where the ranks are, too
        with Threads(path, 2, **OPTIONS) as split:
            outputs = [one.generate([PROMPT], GREEDY, use_tqdm=False)[0] for one in (whole, split)]
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("is_sharded, sizes", [(False, SIZES), (True, SIZES), (True, EXPERTS)])
def test_fp8(is_sharded, sizes, tmp_path):
    """Scales of activations and caches, which are not needed, are not read."""
    path, model = written(tmp_path, is_sharded, sizes=sizes, **FP8)
    attention = "model.layers.0.self_attn"
    for name in ("k_proj.input_scale", "attn.k_scale", "v_scale"):
        edit(path, f"{attention}.{name}", lambda _: torch.ones(1))
    with Threads(path, 2, **OPTIONS) as split:
        for llm in (LLM(path, **OPTIONS), split):
            (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == greedy(model, PROMPT, 8)
            check_near(llm, model, 1e-3)
    for quantization, most in (("int8", 1), ("int4", 4)):
        llm = LLM(path, quantization=quantization, **OPTIONS)
        assert llm.runner.model.lm_head.weight.is_meta
        check_near(llm, model, most)


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize(
    "family",
    [
        {"family": "qwen3_5_text"},
        {"family": "qwen3_5_moe_text", "shared_expert_intermediate_size": 64},
    ],
    ids=["dense", "experts"],
)
@pytest.mark.parametrize("settings", [GPTQ, AWQ, FP8], ids=["gptq", "awq", "fp8"])
@torch.inference_mode()
def test_a_hybrid_model_with_the_names_of_a_vision_model(settings, family, tmp_path):
    sizes = EXPERTS | family | {"linear_num_value_heads": 8, "linear_value_head_dim": 16}
    path, model = written(tmp_path, sizes=sizes, **settings)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}, file
    )
    llm = LLM(path, **OPTIONS)
    for module in llm.runner.model.modules():
        if isinstance(module, Linear) and module.weight.is_meta:  # without rounded activations
            weight = weight_in(module).cpu()
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
            module.product = product if isinstance(module, Stack) else F.linear
    check_near(llm, model, 1e-3)


# --- what is refused ---

NOT_ONE_OF = [  # settings, the field that is refused, and what it must be one of
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format", r"\('gptq', 'gptq_v2', None\)"),
    (GPTQ | {"bits": 3}, "bits", r"\(4, 8\)"),
    (GPTQ | {"group_size": 96}, "group_size", r"\(128, 64, 32\)"),
    (AWQ | {"version": "gemv"}, "version", r"\('gemm', None\)"),
    (FP8 | {"weight_block_size": None}, "weight_block_size", r"\(\[128, 128\],\)"),
]
ARE = "gptq, awq and fp8 are"
REFUSED = [  # other settings, and what is said of them
    ({"quant_method": "bitsandbytes"}, f"quantization by 'bitsandbytes' is not supported: {ARE}"),
    ({"bits": 4, "group_size": 64}, f"quantization_config has no quant_method .*MLX.*: {ARE}"),
    ("awq", "quantization_config='awq' is not a JSON object"),
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
    check_refused(gptq, f"config.json cannot be read: {words}")


@pytest.mark.parametrize("settings, field, allowed", NOT_ONE_OF)
def test_values_that_are_refused(settings, field, allowed, gptq):
    change(gptq, quantization_config=settings)
    what = f"quantization by {settings['quant_method']!r} with {field}={settings[field]!r}"
    words = f"{what} is not supported: it must be one of {allowed}"
    check_refused(gptq, f"config.json cannot be read: {words}")


def test_groups_and_options_that_are_refused(gptq):
    change(gptq, quantization_config=GPTQ | {"group_size": 128})
    check_refused(gptq, "group_size=128 is not possible .*: groups of 128 .* rows of 192")
    change(gptq, quantization_config=GPTQ)
    own = "'int8' is not allowed: it must be None: the checkpoint has codes of its own, by gptq"
    check_refused(gptq, own, quantization="int8")
    change(gptq, quantization_config=AWQ)
    words = "tensor_parallel_size=2: groups of 64 numbers do not divide rows of 96"
    with pytest.raises(ValueError, match=words):
        quantizer(Config(tensor_parallel_size=2), loader.load_config(gptq), torch_ops)


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
    file = path / "model.safetensors"
    edit(path, f"{D}.{kind}", None)
    check_refused(path, words.format(path=file, layer=D))
    file.write_bytes(file.read_bytes()[:-1])
    check_refused(path, f"{file} is damaged or incomplete")


D = "model.layers.1.mlp.down_proj"
DAMAGED = [  # settings, the tensor, what is in the file instead, and the error message behind the file's name
    (GPTQ, "qweight", lambda t: t.float(), "{name} has dtype F32: it must be I32"),
    (GPTQ, "qweight", lambda t: t[0, 0], r"{name} has shape \[\], and not two dimensions"),
    (GPTQ, "qweight", lambda t: t[:-1], r"D.g_idx has shape \[192\]: it must be \[184\]"),
    (GPTQ, "qzeros", lambda t: t.float(), "{name} has dtype F32: it must be I32"),
    (GPTQ, "qzeros", lambda t: t[:1], r"{name} has shape \[1, 16\]: it must be \[6, 16\]"),
    (GPTQ, "scales", lambda t: t.T, r"{name} has shape \[128, 6\]: it must be \[6, 128\]"),
    (GPTQ, "g_idx", lambda t: t.flip(0), r"{name} is not in order \(act order\)"),
    (GPTQ, "g_idx", lambda t: t.half(), "{name} has dtype F16: it must be I32 or I64"),
    (GPTQ, "weight", lambda _: torch.zeros(128, 192), "D has a qweight and a weight"),
    (
        GPTQ | {"config": FP8},
        "qweight",
        lambda t: t,
        "model.* holds codes, but quant_method is 'fp8'",
    ),
    (AWQ, "qzeros", lambda t: t.T, r"{name} has shape \[16, 3\]: it must be \[3, 16\]"),
    (FP8, "weight_scale_inv", lambda t: t[0, 0], r"{name} has shape \[\]: it must be \[1, 2\]"),
    (FP8, "weight_scale_inv", lambda t: t.T, r"{name} has shape \[2, 1\]: it must be \[1, 2\]"),
    (FP8, "weight_scale_inv", lambda t: t.byte(), "{name} has dtype U8: it must be F16 or .*E8M0"),
    (FP8, "weight", lambda t: t.flatten(), r"{name} has shape \[24576\], and not two dimensions"),
]


@pytest.mark.parametrize("settings, kind, damage, words", DAMAGED)
def test_tensors_that_do_not_fit(settings, kind, damage, words, tmp_path):
    path, _ = written(tmp_path, **settings)
    edit(path, f"{D}.{kind}", damage)
    words = words.replace("D", D, 1) if words.startswith("D") else words.format(name=f"{D}.{kind}")
    check_refused(path, f"model.safetensors: {words}")


def test_layers_that_are_quantized_in_part(tmp_path):
    """And a head in codes where config.json ties it to the embedding."""
    tied = SIZES | {"tie_word_embeddings": True}
    path, _ = written(tmp_path / "tied", **GPTQ, lm_head=True, sizes=tied)
    check_refused(path, "lm_head.qweight cannot be loaded: tie_word_embeddings is true")
    path, _ = written(tmp_path / "part", **GPTQ)
    attention = "model.layers.0.self_attn"
    for kind in ("qweight", "qzeros", "scales", "g_idx"):
        edit(path, f"{attention}.v_proj.{kind}", None)
    edit(path, f"{attention}.v_proj.weight", lambda _: torch.zeros(64, 128))
    words = f"{attention}.k_proj, {attention}.v_proj must all be quant"
    with pytest.raises(ValueError, match=words):
        LLM(path, **OPTIONS)


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    path, _ = written(tmp_path, **GPTQ)
    (path / "own.py").write_text("raise SystemExit('it was run')", encoding="utf-8")
    change(path, model_type="mystery", auto_map={"AutoConfig": "own.Config"})
    with pytest.raises(ValueError, match="config.json cannot be read: "):
        LLM(path, **OPTIONS)


FAR = 0x7E7E7E7E  # zeros of 127, and 255 would be 128
NUMBERS = [
    (8, "qzeros", FAR, "up_proj has codes of 8 bits with zeros far from 128"),
    (4, "bias", 1, "unexpected tensors .*up_proj.bias.*, 1 in all"),
]


@pytest.mark.parametrize("bits, kind, value, words", NUMBERS)
def test_numbers_that_are_refused(bits, kind, value, words, tmp_path):
    """GPTQ's tools give each layer a bias: of zeros, if the model has none."""
    path, _ = written(tmp_path, **GPTQ | {"bits": bits})
    edit(path, f"model.layers.1.mlp.up_proj.{kind}", lambda t: t.fill_(value))
    with pytest.raises(ValueError, match=words):
        LLM(path, **OPTIONS)


def test_a_long_list_of_tensors_is_cut_off(gptq):
    change(gptq, quantization_config=None)
    words = r"missing tensors .*cters\), 14 in all; unexpected tensors .*cters\), 70 in all .is quantization_config missing"
    with pytest.raises(ValueError, match=words) as error:
        LLM(gptq, **OPTIONS)
    assert len(str(error.value)) < 800
