"""The model that ships with the package is an ordinary small checkpoint, and the engine gives right answers on it.

Run: pytest tests/core/test_embedded.py [-k answers]
"""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from tutorials.tiny_qwen3.data import CHECKED, phone_book, story

GREEDY = SamplingParams(temperature=0, max_tokens=256)


@pytest.fixture(scope="module")
def llm():
    return LLM()


def user(question: str) -> list[dict]:
    return [{"role": "user", "content": question}]


def mixed_questions(count: int) -> list[str]:
    rng = random.Random(7)
    tasks = [*CHECKED.values(), story, lambda r: phone_book(r, 40)]
    return [tasks[i % len(tasks)](rng)[0] for i in range(count)]


def test_it_is_an_ordinary_small_hugging_face_directory():
    files = {path.name: path.stat().st_size for path in Path(EMBEDDED_MODEL).iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    } <= files.keys()
    assert sum(files.values()) < 10_000_000
    tokenizer, model = (
        cls.from_pretrained(EMBEDDED_MODEL) for cls in (AutoTokenizer, AutoModelForCausalLM)
    )
    text = tokenizer.apply_chat_template(
        user("what is 20 + 30?"), tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nwhat is 20 + 30?<|im_end|>\n<|im_start|>assistant\n"
    assert model.config.model_type == "qwen3" and model.generation_config.temperature == 0.6
    weights = load_file(Path(EMBEDDED_MODEL) / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_it_runs_in_fp32_on_a_cpu(llm):
    assert llm.runner.device.type == "cuda" or llm.runner.dtype == torch.float32


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("task", CHECKED)
def test_its_answers_are_right(llm, task):
    """Looser than the model card, because this asks only 40 questions: a wrong block table costs far more."""
    rng = random.Random(2024)
    pairs = [CHECKED[task](rng) for _ in range(40)]
    outputs = llm.chat([user(question) for question, _ in pairs], GREEDY, use_tqdm=False)
    right = sum(output.outputs[0].text == answer for output, (_, answer) in zip(outputs, pairs))
    assert right >= 35


def test_answers_equal_those_of_transformers(llm):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL).float()
    for output in llm.chat([user(q) for q in mixed_questions(9)], GREEDY, use_tqdm=False):
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=256, do_sample=False
            )
        assert out[0, ids.shape[1] :].tolist() == output.outputs[0].token_ids
