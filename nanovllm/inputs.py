"""Inputs: what a user asks for, checked, and made a Request. Everything that a user may get wrong is refused here."""

from copy import copy
from typing import TypeGuard

from nanovllm.beam_search import BeamSearch, BeamSearchParams
from nanovllm.options import is_int, shown
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

Conversation = list[dict[str, str]]
Prompt = str | list[int] | Conversation
Params = SamplingParams | BeamSearchParams
Defaults = tuple[SamplingParams, frozenset[int]]  # the model's own parameters, and its end-of-sequence tokens


def is_conversation(prompt) -> TypeGuard[Conversation]:
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return is_list and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)


def is_one_prompt(prompts) -> TypeGuard[Prompt]:
    is_list = isinstance(prompts, list | tuple)
    return not is_list or is_conversation(prompts) or any(isinstance(x, int) for x in prompts[:1])


class Inputs:
    """Turns prompts and parameters into requests, for a model with this tokenizer (or None) and vocabulary."""

    def __init__(self, model: str, scheduler: Scheduler, tokenizer, vocab_size: int, defaults: Defaults):
        self.model, self.scheduler, self.tokenizer, self.vocab_size = model, scheduler, tokenizer, vocab_size
        (self.default_params, self.eos_token_ids), self.no_tokenizer = defaults, f"model={model!r} has no tokenizer"

    def request(self, prompt: Prompt, params: Params | None, request_id: str | None = None) -> Request:
        """Raises ValueError with the name of what is wrong, its value, and what is allowed."""
        params, beams = self.default_params if params is None else params, None
        if not isinstance(params, Params):
            raise ValueError(f"params={shown(params)} is not allowed: it must be SamplingParams or BeamSearchParams")
        params = copy(params)  # nobody else's from now on ...
        params.__post_init__()  # ... and checked again
        if isinstance(params, BeamSearchParams):
            params, beams = params.sampling_params(), params
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id={shown(request_id)} is not allowed: it must be a string")
        text, token_ids = self.encode(prompt)
        if not token_ids:
            raise ValueError(f"prompt={shown(prompt)} is empty: it must have at least one token")
        for name, ids in (("prompt", token_ids), ("stop_token_ids", params.stop_token_ids)):
            wrong = [i for i in ids if not is_int(i, 0, self.vocab_size - 1)]
            if wrong:
                limit = self.vocab_size - 1
                raise ValueError(f"{name} has the token id {shown(wrong[0])}: ids must be integers from 0 to {limit}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={shown(params.stop)} is not allowed: {self.no_tokenizer}")
        request = Request(request_id, text, token_ids, params, self.eos_token_ids)
        if beams is not None:
            room = min(params.max_tokens, self.scheduler.max_model_len - len(token_ids))
            request.search_with(BeamSearch(beams, request.stop_token_ids, room))
        self.scheduler.check(request)
        return request

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        is_chat = not isinstance(prompt, str) and is_conversation(prompt)
        if isinstance(prompt, list | tuple) and not is_chat:
            return None, list(prompt)
        if not is_chat and not isinstance(prompt, str):
            raise ValueError(f"prompt={shown(prompt)} is not allowed: it must be text, token ids or a list of messages")
        if self.tokenizer is None:
            raise ValueError(f"prompt={shown(prompt)} is not allowed: {self.no_tokenizer}, give token ids")
        if is_chat and not self.tokenizer.chat_template:
            raise ValueError(f"model={self.model!r} has no chat template: give the whole prompt to generate()")
        try:
            text = prompt
            if is_chat:
                text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            return text, self.tokenizer.encode(text, add_special_tokens=not is_chat)
        except Exception as error:  # half a surrogate pair, a message that the template refuses, ...
            raise ValueError(f"prompt={shown(prompt)} is not allowed: the tokenizer refuses it: {error}") from error
