"""Messages: the forms of a conversation, and how it becomes text. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm.options import Options, Rule, listed, refusal

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Conversation = list[dict]  # {"role": ..., "content": ...}; content is text or a list of text parts
Prompt = str | list[int] | Conversation | dict
"""Text, token ids, messages, or as vLLM writes it: {"prompt": ...} or {"prompt_token_ids": ...}; or
the fields of Chat: {"messages": ..., "tools": ...}"""


@dataclass(kw_only=True)
class Chat(Options):
    """A conversation, and how the model's chat template is to write it."""

    messages: Conversation
    add_generation_prompt: bool = True
    """End with the words that open the assistant's answer."""
    continue_final_message: bool = False
    """Leave the last message open: the answer is its rest."""
    tools: list[dict] | None = None
    """Functions that the model may call, as JSON schemas."""
    chat_template: str | None = None
    """Instead of the model's own, in Jinja."""
    chat_template_kwargs: dict | None = None
    """More names for the template, such as `enable_thinking`."""

    RULES: ClassVar[dict[str, Rule]] = {
        "messages": Rule(lambda it: is_conversation(it), "a list of {'role': ..., 'content': ...}"),
        "tools": listed(lambda tool: isinstance(tool, dict), "a list of dicts"),
        "chat_template": Rule(lambda text: isinstance(text, str), "text"),
        "chat_template_kwargs": Rule(
            lambda names: isinstance(names, dict) and all(isinstance(name, str) for name in names),
            "a dict with names as keys",
        ),
    }

    def __post_init__(self):
        super().__post_init__()
        self.messages = with_plain_text(self.messages)
        is_both = self.add_generation_prompt and self.continue_final_message
        allowed = "False with add_generation_prompt=True: an answer is begun or continued"
        self.require("continue_final_message", not is_both, allowed)

    def text(self, tokenizer: Any) -> str:
        if not (self.chat_template or tokenizer.chat_template):
            raise ValueError("the model has no chat template: pass the whole prompt to generate()")
        names = {
            **(self.chat_template_kwargs or {}),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "tools": self.tools or None,
            "chat_template": self.chat_template,
            "tokenize": False,
        }
        return str(tokenizer.apply_chat_template(self.messages, **names))


def unwrapped(prompt: Prompt) -> str | list[int] | Chat:
    """The content of a prompt, whatever its form."""
    if isinstance(prompt, str):
        return prompt
    if is_conversation(prompt):
        return Chat(messages=prompt)
    if isinstance(prompt, list | tuple):
        return [*prompt]
    if not isinstance(prompt, dict):
        raise refusal("prompt", prompt, "it must be text, token ids or a list of messages")
    if "messages" in prompt and all(isinstance(name, str) for name in prompt):
        return Chat(**prompt)
    for name, kind in (("prompt", str), ("prompt_token_ids", list)):
        if prompt.keys() == {name} and isinstance(prompt[name], kind):
            return prompt[name]
    forms = "{'prompt': text}, {'prompt_token_ids': token ids} or {'messages': messages}"
    raise refusal("prompt", prompt, f"a dict must be {forms}")


def is_conversation(prompt) -> TypeIs[Conversation]:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(map(is_message, prompt))


def is_message(message: object) -> bool:
    """Whether this is a message. Instead of a content, it may have tool calls."""
    if not isinstance(message, dict) or "role" not in message:
        return False
    return "content" in message or "tool_calls" in message


def with_plain_text(messages: Sequence[dict]) -> Conversation:
    """Each message with its content as one text: parts are joined by line ends, as in vLLM."""
    return [
        {**message, "content": plain_text(message, f"messages[{i}]['content']")}
        for i, message in enumerate(messages)
    ]


def plain_text(message: dict, place: str) -> str:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""  # it only called tools
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise refusal(place, content, "it must be text, or a list of {'type': 'text', 'text': ...}")
    for i, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise refusal(f"{place}[{i}]", part, "it must be {'type': 'text', 'text': ...}")
    return "\n".join(part["text"] for part in content)
