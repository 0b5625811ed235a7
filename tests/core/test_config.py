"""Every option is checked, a wrong one is named with what is allowed, and no caller changes what the
user configured.

Run: pytest tests/core/test_config.py [-k nearest]
"""

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from types import SimpleNamespace

import pytest
import torch
from extras import needs
from wrong_values import FIELDS, wrong_values

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.config import EMBEDDED_MODEL, TOKENS_PER_STEP, Config, Limits
from nanovllm.model_runner import choose_dtype

WRONG = [
    (cls, field, value, allowed)
    for cls, fields_of_cls in FIELDS.items()
    for field, allowed, values in fields_of_cls
    for value in values
]


@pytest.mark.parametrize("cls, field, value, allowed", WRONG)
def test_a_wrong_value_is_named_with_its_field_and_what_is_allowed(cls, field, value, allowed):
    with pytest.raises(ValueError) as error:
        cls(**{field: value})
    begin, end = f"{field}={value!r}", f" is not allowed: it must be {allowed}"
    if len(begin) > 200:  # it is cut off
        assert str(error.value).startswith(begin[:200]) and str(error.value).endswith(end)
        assert len(str(error.value)) < 400
    else:
        assert str(error.value) == begin + end


@pytest.mark.parametrize("cls", FIELDS)
def test_each_field_has_a_wrong_value(cls):
    assert wrong_values(cls).keys() == {field.name for field in fields(cls)}


def test_a_number_that_python_does_not_print():
    with pytest.raises(ValueError, match="^seed=an integer of 16610 bits is not allowed: "):
        SamplingParams(seed=10**5000)


@pytest.mark.parametrize(
    "cls, wrong, message",
    [
        (
            SamplingParams,
            "temprature",
            "SamplingParams has no field 'temprature': did you mean 'temperature'?",
        ),
        (SamplingParams, "max_new_tokens", "did you mean 'max_tokens'?"),
        (SamplingParams, "zzz", "SamplingParams has no field 'zzz': allowed are n, temperature,"),
        (SamplingParams, "use_beam_search", "call LLM.beam_search(prompts, BeamSearchParams(...))"),
        (BeamSearchParams, "num_beams", "BeamSearchParams has no field 'num_beams'"),
        (Config, "swap_space", "did you mean 'swap_gib', with preemption_mode='swap'?"),
    ],
)
def test_an_unknown_keyword_is_an_error_that_names_the_nearest(cls, wrong, message):
    with pytest.raises(ValueError) as error:
        cls(**{wrong: 1})
    assert message in str(error.value)


def test_positional_arguments_are_refused():
    with pytest.raises(ValueError, match=r"SamplingParams takes keyword arguments only, not 0.7"):
        SamplingParams(0.7)


def test_what_a_vllm_field_becomes_exists():
    """The hints for names of vLLM's name fields and methods that are there."""
    for cls in (SamplingParams, Config):
        names = {field.name for field in fields(cls)}
        assert cls.elsewhere and not names & cls.elsewhere.keys()
    assert callable(LLM.beam_search) and {"swap_gib", "max_num_batched_tokens"} <= names


def test_what_does_not_fit_is_not_generated():
    llm = LLM(max_model_len=16, num_blocks=4)
    params = SamplingParams(max_tokens=10**12, temperature=0, ignore_eos=True)
    (output,) = llm.generate([[5] * 6], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 10 and output.outputs[0].finish_reason == "length"


def test_parameters_cannot_be_changed():
    params = SamplingParams(n=2, stop="x", stop_token_ids=[3], extra_args={"tenant": "a"})
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'top_p'"):
        params.top_p = 2.0
    with pytest.raises(ValueError, match=r"top_p=2.0 is not allowed"):
        replace(params, top_p=2.0)
    copy = params.clone()
    assert copy == params == pickle.loads(pickle.dumps(params)) and copy is not params
    copy.extra_args["tenant"] = "b"  # for a scheduler of one's own
    assert params.extra_args == {"tenant": "a"}


def test_stop_is_a_tuple_afterwards():
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()


@pytest.mark.parametrize(
    "checkpoint, chosen",
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (None, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])  # as transformers 5 and 4 call it
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_auto_on_a_gpu_is_16_bits_that_the_gpu_has(
    checkpoint, chosen, name, capability, monkeypatch
):
    """Before sm_80 there is no bfloat16 in hardware."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    if capability < (8, 0):
        chosen = torch.float16
    hf_config, cuda = SimpleNamespace(**{name: checkpoint}), torch.device("cuda")
    for model in ("Qwen/Qwen3-0.6B", EMBEDDED_MODEL):
        assert choose_dtype(Config(model=model), hf_config, cuda) == chosen
    # a caller that asks for it gets it
    assert choose_dtype(Config(dtype="float32"), hf_config, cuda) == torch.float32


@pytest.mark.parametrize("in_hardware", [True, False])
def test_auto_on_a_cpu_is_bfloat16_only_where_the_cpu_has_it(in_hardware, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: in_hardware)
    hf_config, cpu = SimpleNamespace(dtype=torch.bfloat16), torch.device("cpu")
    chosen = torch.bfloat16 if in_hardware else torch.float32
    assert choose_dtype(Config(model="Qwen/Qwen3-0.6B"), hf_config, cpu) == chosen
    assert choose_dtype(Config(), hf_config, cpu) == torch.float32  # the embedded model
    assert choose_dtype(Config(dtype="float16"), hf_config, cpu) == torch.float16


def test_what_is_left_open_is_resolved_apart_from_the_config():
    """An engine changes nothing in the Config that it was given."""
    config = Config(max_num_seqs=7)
    assert config.resolved(100, 64) == Limits(
        max_model_len=100, max_num_seqs=7, max_num_batched_tokens=64
    )
    assert config == Config(max_num_seqs=7) and config.max_model_len is None
    assert Config(max_model_len=50, max_num_batched_tokens=9).resolved(100, 64).max_model_len == 50


LIMITS = Limits(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=64)


def test_more_blocks_than_the_sequences_can_fill_are_of_no_use():
    assert LIMITS.num_useful_blocks(16) == 3 * 7 and LIMITS.num_useful_blocks(100) == 3
    config = Config(block_size=16)
    assert config.num_blocks_in(2199, 100, LIMITS) == 21
    assert config.num_blocks_in(2099, 100, LIMITS) == 20
    assert config.num_blocks_in(100, 100, LIMITS) == 1
    with pytest.raises(ValueError, match="a KV block of 1,000 bytes: .* leaves -5,000 bytes"):
        config.num_blocks_in(-5000, 1000, LIMITS)


def test_host_blocks():
    """Only to swap, no more than are of use, and one at least."""
    swap = {"preemption_mode": "swap", "block_size": 16}
    block_bytes = 2**20
    assert Config().num_host_blocks(block_bytes, LIMITS) == 0
    assert Config(swap_gib=20 / 1024, **swap).num_host_blocks(block_bytes, LIMITS) == 20
    assert Config(swap_gib=4, **swap).num_host_blocks(block_bytes, LIMITS) == 21
    with pytest.raises(ValueError, match="swap_gib=0.0001 is not .* a KV block of 1,048,576 bytes"):
        Config(swap_gib=0.0001, **swap).num_host_blocks(block_bytes, LIMITS)


def test_the_default_budget_is_the_devices():
    llm = LLM(device="cpu")
    assert llm.limits.max_num_batched_tokens == TOKENS_PER_STEP["cpu"] == 384
    assert TOKENS_PER_STEP["cuda"] == 8192


def test_the_interpreter_computes_nothing_in_bfloat16(monkeypatch):
    """It would give garbage without a word."""
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    config = Config(model="Qwen/Qwen3-0.6B", attention_backend="triton")
    assert (
        choose_dtype(config, SimpleNamespace(dtype=torch.bfloat16), torch.device("cpu"))
        == torch.float32
    )
    needs("triton")
    with pytest.raises(
        ValueError, match="dtype='bfloat16' is not allowed: it must be float32 or float16: "
    ):
        LLM(device="cpu", attention_backend="triton", dtype="bfloat16")


def test_a_step_has_room_for_all_seats():
    assert LLM(num_blocks=8, max_num_seqs=500).limits.max_num_batched_tokens == 500
