"""Inputs: validates all user input, and turns it into requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.options import PromptTooLong, is_int, is_text, refusal, shown
from nanovllm.processing.messages import Conversation, Prompt, is_conversation, unwrapped
from nanovllm.sampling_params import LARGEST_COUNT, RequestParams, SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Conversations = Conversation | list[Conversation]
Prompts = Prompt | Sequence[Prompt]
Params = RequestParams
AllParams = Params | list[Params] | None  # one for all prompts, or one for each


def is_one_prompt(prompts) -> TypeIs[Prompt]:
    is_list = isinstance(prompts, list | tuple)
    return not is_list or is_conversation(prompts) or any(isinstance(x, int) for x in prompts[:1])


def for_each(name: str, given: Any, prompts: Sized) -> list:
    """A list with one value for each prompt, from one value for all or from such a list."""
    values = list(given) if isinstance(given, list | tuple) else [given] * len(prompts)
    if len(values) != len(prompts):
        counts = f"{len(prompts)} prompts, but {len(values)} {name}"
        forms = "give a list with one for each prompt, or one for all without a list"
        raise ValueError(f"{counts}: {forms}")
    return values


@dataclass
class Inputs:
    """Turns prompts and parameters into requests, for a tokenizer (or None) and vocabulary size."""

    model: str
    scheduler: Scheduler
    tokenizer: Any
    vocab_size: int
    default_params: SamplingParams
    eos_token_ids: frozenset[int]
    vocabulary: Any = None  # an LLTokenizer, made by the first request that needs it
    tool_form: Any = None  # a Form of tool calls, in a server

    def __post_init__(self) -> None:
        vocab = self.tokenizer.get_vocab() if self.tokenizer else ()
        self.longest_token = max(map(len, vocab), default=0)  # in characters

    def request(
        self,
        prompt: Prompt,
        params: Params | None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Request:
        """Raises ValueError with the name of the wrong argument, its value, and what is allowed."""
        params = self.default_params if params is None else params
        if not isinstance(params, RequestParams):
            allowed = "it must be SamplingParams or BeamSearchParams"
            raise refusal("sampling_params", params, allowed)
        sampling = params.sampling_params()
        if request_id is not None and not is_text(request_id):
            raise refusal("request_id", request_id, "it must be a string, and not empty")
        if not is_int(priority, -LARGEST_COUNT, LARGEST_COUNT):
            raise refusal("priority", priority, "it must be an integer; the smallest goes first")
        text, token_ids = self.encode(prompt)
        if not token_ids:
            raise ValueError(f"prompt={shown(prompt)} is empty: it must have at least one token")
        self.check_ids("prompt", token_ids)
        if sampling.truncate_prompt_tokens is not None:
            most = sampling.truncate_prompt_tokens
            most = self.scheduler.max_model_len - 1 if most == -1 else most
            if len(token_ids) > most:
                text = None  # it no longer matches the token ids
                token_ids = token_ids[-most:]
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_ids(name, getattr(sampling, name) or [])
        fields = (request_id or "", text, token_ids, sampling, self.eos_token_ids)
        request = Request(*fields) if params is sampling else params.new_request(*fields)
        if sampling.stop:
            self.stop_at_special_tokens(request)
        request.user_priority = priority
        self.scheduler.set_max_len(request)
        if request.needs_rules:
            from nanovllm.topics.decoding.rules import rules_of  # chapter 08

            request.rules = rules_of(request, self)
        return request

    def stop_at_special_tokens(self, request: Request) -> None:
        """Adds the special tokens among the stop strings to the stop tokens. As strings they would
        not be found: the text of an answer leaves them out."""
        stop = request.params.stop or ()
        if self.tokenizer is None:
            raise refusal("stop", stop, f"model={self.model!r} has no tokenizer")
        texts = [text for text in stop if text in self.tokenizer.all_special_tokens]
        special = {self.tokenizer.convert_tokens_to_ids(text) for text in texts}
        request.stop_token_ids |= special
        request.user_stop_token_ids |= special - self.eos_token_ids

    def check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        limit = self.vocab_size - 1
        for i in token_ids:
            if type(i) is not int or not 0 <= i <= limit:
                allowed = f"ids must be integers from 0 to {limit}"
                raise ValueError(f"{name} has the token id {shown(i)}: {allowed}")

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it has one, and its token ids."""
        content = prompt if isinstance(prompt, str) else unwrapped(prompt)
        if isinstance(content, list):
            return None, content
        if self.tokenizer is None:
            no_tokenizer = f"model={self.model!r} has no tokenizer, so pass token ids"
            raise refusal("prompt", prompt, no_tokenizer)
        try:
            if isinstance(content, str):
                begin = self.tokenizer.bos_token
                has_begun = bool(begin) and content.startswith(begin)  # by a chat template
                return content, self.tokens(content, add_special_tokens=not has_begun)
            text = content.text(self.tokenizer)
            return text, self.tokens(text, add_special_tokens=False)
        except PromptTooLong:
            raise
        except Exception as error:  # half a surrogate pair, a message that the template rejects ...
            raise refusal("prompt", prompt, f"the tokenizer rejects it: {error}") from error

    def tokens(self, text: str, **options) -> list[int]:
        """Tokenizes a text. Raises PromptTooLong without tokenizing, which may take seconds, if the
        text cannot fit."""
        most = self.scheduler.max_model_len * self.longest_token
        if len(text) > most:
            limit = f"max_model_len={self.scheduler.max_model_len} tokens hold {most:,} at most"
            raise PromptTooLong(f"the prompt has {len(text):,} characters, but {limit}")
        return self.tokenizer.encode(text, **options)
