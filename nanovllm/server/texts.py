"""Texts: what single tokens look like to a client."""

import re
from functools import lru_cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = {char: byte for byte, char in bytes_to_unicode().items()}  # in vocabularies as GPT-2's
UNKNOWN = "\ufffd"  # what a tokenizer writes for a part of a character


class TokenTexts:
    """The text of tokens, with a tokenizer that only the event loop's thread uses."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.of = lru_cache(100_000)(self._of)
        self.bytes_of = lru_cache(100_000)(self._bytes_of)

    def _of(self, token_id: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id])

    def of_all(self, token_ids: list[int]) -> str:
        """A character may have several tokens."""
        if self.tokenizer is None:
            return "".join(map(self.of, token_ids))
        return self.tokenizer.decode(token_ids)

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character: joined, they are the text."""
        text = self.of(token_id)
        if UNKNOWN not in text:
            return text.encode()
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if all(char in BYTES for char in token):
            return bytes(BYTES[char] for char in token)
        return text.encode()

    def name_of(self, token_id: int) -> str:
        """Its text, or its bytes, as OpenAI writes them, if it is a part of a character."""
        text = self.of(token_id)
        if UNKNOWN not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token_id))

    def offsets(self, token_ids: list[int], num_chars: int = 0) -> tuple[list[int], int]:
        """Where each token begins in a text, in characters; and how many there are. A token that
        goes on with a character is where the character is."""
        places = []
        for token_id in token_ids:
            data = self.bytes_of(token_id)
            goes_on = bool(data) and is_continuation(data[0])
            places.append(max(0, num_chars - goes_on))
            num_chars += sum(not is_continuation(byte) for byte in data)
        return places, num_chars


def is_continuation(byte: int) -> bool:
    """Whether this byte of UTF-8 is not the first one of a character."""
    return byte & 0xC0 == 0x80
