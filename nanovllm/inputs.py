"""Inputs: checks what a user asks for and turns it into a Request. Everything a user can get wrong is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from nanovllm.beam_search import BeamRequest, BeamSearch, BeamSearchParams
from nanovllm.options import is_int, shown
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Conversation = list[dict[str, str]]
Conversations = Conversation | list[Conversation]
Prompt = str | list[int] | Conversation
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | BeamSearchParams
AllParams = Params | list[Params] | None  # one for all prompts, or one for each
Defaults = tuple[
    SamplingParams, frozenset[int]
]  # the model's own parameters, and its end-of-sequence tokens


def is_conversation(prompt) -> TypeIs[Conversation]:
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return is_list and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt
    )


def is_one_prompt(prompts) -> TypeIs[Prompt]:
    is_list = isinstance(prompts, list | tuple)
    return not is_list or is_conversation(prompts) or any(isinstance(x, int) for x in prompts[:1])


class Inputs:
    """Turns prompts and parameters into requests, for a given tokenizer (or None) and vocabulary size."""

    def __init__(
        self, model: str, scheduler: Scheduler, tokenizer, vocab_size: int, defaults: Defaults
    ):
        self.model, self.scheduler, self.tokenizer, self.vocab_size = (
            model,
            scheduler,
            tokenizer,
            vocab_size,
        )
        (self.default_params, self.eos_token_ids), self.no_tokenizer = (
            defaults,
            f"model={model!r} has no tokenizer",
        )

    def request(
        self, prompt: Prompt, params: Params | None, request_id: str | None = None
    ) -> Request:
        """Raises ValueError with the name of the wrong argument, its value, and what is allowed."""
        params, beams = self.default_params if params is None else params, None
        if not isinstance(params, Params):
            raise ValueError(
                f"params={shown(params)} is not allowed: it must be SamplingParams or BeamSearchParams"
            )
        params = copy(params)  # a copy of our own ...
        params.__post_init__()  # ... checked again, since its fields may have been changed
        if isinstance(params, BeamSearchParams):
            beams, params = params, params.sampling_params()
        if request_id is not None and not (isinstance(request_id, str) and request_id):
            raise ValueError(
                f"request_id={shown(request_id)} is not allowed: it must be a string, and not empty"
            )
        text, token_ids = self.encode(prompt)
        if not token_ids:
            raise ValueError(f"prompt={shown(prompt)} is empty: it must have at least one token")
        for name, ids in (("prompt", token_ids), ("stop_token_ids", params.stop_token_ids or ())):
            wrong = [i for i in ids if not is_int(i, 0, self.vocab_size - 1)]
            if wrong:
                limit = self.vocab_size - 1
                raise ValueError(
                    f"{name} has the token id {shown(wrong[0])}: ids must be integers from 0 to {limit}"
                )
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={shown(params.stop)} is not allowed: {self.no_tokenizer}")
        fields = (request_id or "", text, token_ids, params, self.eos_token_ids)
        request = Request(*fields)
        if beams is not None:
            room = min(params.max_tokens, self.scheduler.max_model_len - len(token_ids))
            request = BeamRequest(*fields, search=BeamSearch(beams, request.stop_token_ids, room))
        self.scheduler.check(request)
        return request

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, list | tuple) and not is_conversation(prompt):
            return None, list(prompt)
        if not isinstance(prompt, str | list | tuple):
            raise ValueError(
                f"prompt={shown(prompt)} is not allowed: it must be text, token ids or a list of messages"
            )
        is_text = isinstance(prompt, str)
        if self.tokenizer is None:
            raise ValueError(
                f"prompt={shown(prompt)} is not allowed: {self.no_tokenizer}, so pass token ids"
            )
        if not is_text and not self.tokenizer.chat_template:
            raise ValueError(
                f"model={self.model!r} has no chat template: pass the whole prompt to generate()"
            )
        try:
            text = prompt
            if not is_text:
                text = self.tokenizer.apply_chat_template(
                    prompt, tokenize=False, add_generation_prompt=True
                )
            return str(text), self.tokenizer.encode(text, add_special_tokens=is_text)
        except (
            Exception
        ) as error:  # half a surrogate pair, a message that the template rejects, ...
            raise ValueError(
                f"prompt={shown(prompt)} is not allowed: the tokenizer rejects it: {error}"
            ) from error
