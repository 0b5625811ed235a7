"""Messages: what a conversation may look like. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.options import refusal

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Conversation = list[dict]  # {"role": ..., "content": ...}; content is text or a list of text parts


def is_conversation(prompt) -> TypeIs[Conversation]:
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return is_list and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt
    )


def with_plain_text(messages: Sequence[dict]) -> Conversation:
    """Each message with its content as one text: parts are joined by line ends, as in vLLM."""
    return [
        {**message, "content": plain_text(message, f"messages[{i}]['content']")}
        for i, message in enumerate(messages)
    ]


def plain_text(message: dict, place: str) -> str:
    content = message["content"]
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
