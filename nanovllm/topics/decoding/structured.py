"""Structured outputs: only tokens with which the text can still match a JSON schema, a regular
expression, a list of choices or a grammar.

llguidance (Microsoft, MIT) knows which tokens these are. A step asks it for one mask per sequence.
What a sequence has matched so far follows from its output tokens, so nothing is lost when it is
preempted, or when a step fails. A request without structured outputs passes nothing in here.

The model's end-of-sequence tokens are allowed where the match may end, and nothing else is where it
must end. So `min_tokens` cannot prolong an answer that is complete, and with `ignore_eos` it is
filled up with end-of-sequence tokens. A stop string may still cut an answer in the middle.
Log-probabilities are those of the model, as with penalties. Imports no torch until a step masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from collections.abc import Sequence as Texts
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import lcm
from typing import Any, ClassVar

from nanovllm.options import Options, Rule, listed, refusal, shown
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Request, Sequence

THINK = "<think>"
END_OF_THINK = "</think>"
KINDS = ("json", "json_object", "regex", "choice", "grammar")
NO_TEXT = "no text matches it"
# what clients send must neither keep a server busy nor fill its memory
MOST_CHARS = 2**15  # of a schema, a regex, all choices or a grammar
MOST_REMAINDERS = 100_000  # states that the multipleOf of a schema take
# between two parts of JSON: some models would write spaces without end
SPACES: Any = {"whitespace_pattern": r" ?|\n {0,40}"}
NO_SPACES: Any = {"whitespace_flexible": False}
# within a grammar: as chat templates write the arguments of a call
AS_WRITTEN: Any = {**NO_SPACES, "item_separator": ", ", "key_separator": ": "}
COMBINED = {"allOf", "if", "not", "dependentSchemas", "patternProperties", "unevaluatedProperties"}
FORMATS = "date date-time duration email hostname ipv4 ipv6 time uri uuid".split()
LIMITS: dict[str, Any] = dict(
    max_items_in_row=1000,  # what a grammar may mean at once
    step_max_items=4000,  # as many as 245 optional properties need
    initial_lexer_fuel=100_000,  # a tenth of a second
    max_lexer_states=50_000,
    verbose_errors=False,
)


TEXT = Rule(lambda value: isinstance(value, str), "a string")
TEXTS = listed(TEXT.allows, "a list of strings, not empty")
# what these classes are in most dialects; the library's hold the digits of all alphabets
ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(Options):
    """The form of an output: exactly one of these kinds."""

    json: dict | str | None = None
    """A JSON schema, or its text."""

    json_object: bool = False
    """Any JSON object."""

    regex: str | None = None
    """A regular expression for the whole text, without lookaround."""

    choice: Texts[str] | None = None
    """The texts to choose from."""

    grammar: str | None = None
    """A context-free grammar, as Lark or as GBNF writes it. In Lark, `%json {...}` is a schema."""

    disable_any_whitespace: bool = False
    """JSON without spaces and line ends."""

    RULES: ClassVar[dict[str, Rule]] = {
        "json": Rule(lambda value: isinstance(value, dict | str), "a dict or its JSON text"),
        "regex": TEXT,
        "choice": Rule(lambda texts: bool(texts) and TEXTS.allows(texts), TEXTS.words),
        "grammar": TEXT,
    }

    def __post_init__(self):
        super().__post_init__()
        if len(self.given) != 1:
            has = " and ".join(self.given) or "nothing"
            raise ValueError(f"structured_outputs has {has}: give one of {', '.join(KINDS)}")

    @property
    def given(self) -> list[str]:
        """The kinds that are given."""
        return [name for name in KINDS if getattr(self, name) not in (None, False)]

    @property
    def schema(self) -> dict:
        """The JSON schema. Raises an exception if there is none in the text."""
        if self.json_object:
            return {"type": "object"}
        text = self.json if isinstance(self.json, str) else json.dumps(self.json)
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("it is no JSON object")
        return {key: value for key, value in schema.items() if key != "x-guidance"}


class DeadEnd(ValueError):
    """An answer cannot go on in its form. The schema allows no text there, which is known late."""


# --- from what a user wrote to a grammar ---

Source = Any  # the engine's `Inputs`, which imports this file


def grammar_of(sampling: SamplingParams, source: Source) -> Grammar:
    """Compiles the structured outputs that are asked for.

    Raises ValueError with the field, its value, and what is wrong where. Any thread may call it:
    the requests share nothing but the vocabulary, which does not change.
    """
    given = sampling.structured_outputs
    params = given
    if isinstance(given, dict):
        params = StructuredOutputsParams(**{str(name): value for name, value in given.items()})
    if not isinstance(params, StructuredOutputsParams):
        raise refusal("structured_outputs", given, "it must be StructuredOutputsParams or a dict")
    if source.vocabulary is None:
        source.vocabulary = new_vocabulary(source)
    try:
        matcher = new_matcher(grammar_text(params), source.vocabulary)
        problem = matcher.get_error() or problem_of_first_tokens(matcher, source.eos_token_ids)
    except Exception as error:  # half a surrogate pair, a schema that contains itself ...
        problem = str(error) or type(error).__name__
    if problem:
        (name,) = params.given
        raise refusal(f"structured_outputs.{name}", getattr(params, name), sentence(problem))
    return Grammar(matcher, source.eos_token_ids)


def prepare_vocabulary(source: Source) -> None:
    """Makes the vocabulary before the first request needs it, if structured outputs can be had."""
    if find_spec("llguidance") and source.tokenizer and source.eos_token_ids:
        source.vocabulary = new_vocabulary(source)


def new_vocabulary(source: Source) -> Any:
    """The tokens as bytes, for llguidance. Takes about a second for 150,000 of them."""
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        install = "pip install 'nanovllm[structured]'"
        raise ValueError(f"structured_outputs needs llguidance: {install}") from error
    eos_token_ids = sorted(source.eos_token_ids)
    for name, value in (("tokenizer", source.tokenizer), ("end-of-sequence token", eos_token_ids)):
        if not value:
            raise ValueError(f"structured_outputs: model={source.model!r} has no {name}")
    num_ids = max(source.vocab_size, len(source.tokenizer))
    return from_tokenizer(source.tokenizer, num_ids, eos_token_ids)


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance reads it. Raises an exception if it is too large for a server."""
    from llguidance import LLMatcher, grammar_from

    choices = " | ".join(map(json.dumps, params.choice or ()))
    for text in (params.regex, params.grammar, choices):
        check_length(text or "")
    if params.regex is not None:
        regex = re.sub(r"\\(.)", lambda found: ASCII.get(found[1], found[0]), params.regex)
        return LLMatcher.grammar_from_regex(regex)
    if params.choice is not None:
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    if params.grammar is not None:
        return grammar_from("grammar", with_checked_schemas(params.grammar))
    schema = params.schema
    check_schema(schema)
    spaces = NO_SPACES if params.disable_any_whitespace else SPACES
    return LLMatcher.grammar_from_json_schema(narrowed(schema), spaces)


def with_checked_schemas(text: str) -> str:
    """A grammar. The schemas in it, behind %json, are checked as those without a grammar."""
    parts: list[str] = []
    schemas = []
    while "%json" in text:
        before, _, rest = text.partition("%json")
        value, end = json.JSONDecoder().raw_decode(rest.lstrip())
        text = rest.lstrip()[end:]
        schema = StructuredOutputsParams(json=value).schema
        schemas.append(schema)
        parts += [before, "%json ", json.dumps(narrowed(schema) | {"x-guidance": AS_WRITTEN})]
    check_schema({"anyOf": schemas})
    return "".join([*parts, text])


def check_length(text: str) -> None:
    if len(text) > MOST_CHARS:
        raise ValueError(f"it has {len(text):,} characters: at most {MOST_CHARS:,} are allowed")


def check_schema(schema: dict) -> None:
    """Refuses what takes long to compile, though no limit of llguidance counts it: a number's
    remainders by multipleOf, also by several together."""
    check_length(json.dumps(schema))
    factors = [1]
    for path, part in parts_of(schema):
        if "multipleOf" in part:
            digits = re.sub(r"e.*|[^0-9]", "", repr(part["multipleOf"])).strip("0")  # 0.250 -> 25
            factors.append(int(digits or 1))
            if lcm(*factors) * len(factors) > MOST_REMAINDERS:
                value = shown(part["multipleOf"])
                raise ValueError(f"at {path}: multipleOf={value} takes too long to compile")


def narrowed(schema: dict) -> dict:
    """The schema, changed in place. An unknown `format` is a comment. An object has no properties
    but those that are named, as in vLLM, unless the schema says so or combines several schemas: a
    small model would invent some."""
    values = {"const", "enum", "default", "examples"}  # no schemas
    parts = [part for path, part in parts_of(schema) if not values & {*path.split("/")}]
    named = [part for part in parts if isinstance(part.get("properties"), dict)]
    is_combined = any(COMBINED & part.keys() for part in parts)
    has_choice = any({"$ref", "anyOf", "oneOf"} & part.keys() for part in named)
    for part in () if is_combined or has_choice else named:
        part.setdefault("additionalProperties", False)
    for part in parts:
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
    return schema


def new_matcher(text: str, vocabulary: Any) -> Any:
    """An LLMatcher at the start of the text. It raises nothing: see `get_error`."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**LIMITS))


def problem_of_first_tokens(matcher: Any, eos_token_ids: frozenset[int]) -> str:
    """Tries the first two steps. A grammar that is too large fails here already, before it is
    served; and so does one that no text matches."""
    matcher = matcher.deep_copy()
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    for token_id in eos_token_ids:
        allowed &= ~(1 << token_id)
    if allowed:
        lowest = (allowed & -allowed).bit_length() - 1
        matcher.consume_token(lowest)
        matcher.compute_bitmask()
    is_possible = allowed or matcher.is_accepting()
    return matcher.get_error() or ("" if is_possible else NO_TEXT)


# --- what is wrong, and where ---


def parts_of(schema: dict) -> Iterator[tuple[str, dict]]:
    """All objects in a schema with their places, such as #/properties/age; those around first."""
    stack: list[tuple[str, Any]] = [("#", schema)]
    while stack:
        path, part = stack.pop()
        pairs: Any = enumerate(part) if isinstance(part, list) else ()
        if isinstance(part, dict):
            yield path, part
            pairs = part.items()
        stack += reversed([(f"{path}/{key}", value) for key, value in pairs])


def sentence(problem: str) -> str:
    """The library's message on one line: without its pictures, but with the place that they show.

    "regex parse error:\\n    a(b\\n     ^\\nerror: unclosed group" becomes
    "unclosed group, at character 2".
    """
    of_regex = re.search(r"\n    ( *)\^+\nerror: (.*)", problem)
    if of_regex:
        return f"{of_regex[2]}, at character {len(of_regex[1]) + 1}"
    line = problem.partition("\n")[0].rpartition("(in regex): ")[2]
    return line.replace("NoExtensionBias", NO_TEXT)[:300]


# --- the steps ---


@dataclass
class Grammar:
    """A request's compiled grammar, and what its sequences have matched of it."""

    start: Any  # an LLMatcher that has consumed nothing
    eos_token_ids: frozenset[int]
    # by the sequence's index: a matcher, and the tokens that it has consumed
    matches: dict[int, tuple[Any, list[int]]] = field(default_factory=dict)
    # if the model thinks first: the token after which the form starts, and the most tokens before
    end_of_think: int | None = None
    most_thinking: int = 0

    def think_first(self, request: Request, tokenizer: Any) -> None:
        """Lets the form start behind the reasoning, if the prompt has opened it and a token closes
        it. At most half of the answer's tokens are reasoning."""
        end = tokenizer.convert_tokens_to_ids(END_OF_THINK)
        is_open = (request.prompt or "").rstrip().endswith(THINK)
        if is_open and end not in (None, tokenizer.unk_token_id):
            self.end_of_think = end
            self.most_thinking = (request.max_len - len(request.prompt_token_ids)) // 2

    def bits(self, seq: Sequence) -> int:
        """The allowed tokens: bit i of the number is token i."""
        token_ids = seq.output_token_ids
        if self.end_of_think is None or self.end_of_think in token_ids:
            return int.from_bytes(self.matcher_of(seq).compute_bitmask(), "little")
        if len(token_ids) >= self.most_thinking:
            return 1 << self.end_of_think
        return ~sum(1 << i for i in self.eos_token_ids)

    def __reduce__(self) -> tuple:
        """It does not travel: a process that gets the request compiles its own."""
        return type(None), ()

    def matcher_of(self, seq: Sequence) -> Any:
        """The matcher after all output tokens of the sequence, without the reasoning. It takes back
        those that are gone, as after a wrong draft token or a fault, and consumes those that are
        new."""
        token_ids = seq.output_token_ids
        if self.end_of_think in token_ids:
            token_ids = token_ids[token_ids.index(self.end_of_think) + 1 :]
        elif self.end_of_think is not None:
            token_ids = []
        matcher, consumed = self.matches.pop(seq.index, (None, []))
        if matcher is None:
            matcher = self.start.deep_copy()
        num_right = len(consumed)
        while consumed[:num_right] != token_ids[:num_right]:
            num_right -= 1
        matcher.rollback(len(consumed) - num_right)
        num_new = matcher.try_consume_tokens(token_ids[num_right:])
        self.matches[seq.index] = matcher, token_ids[: num_right + num_new]
        return matcher

    def check(self, seq: Sequence) -> None:
        """Raises DeadEnd if the sequence has ended with an end-of-sequence token too early:
        nothing else is allowed once a matcher has failed."""
        if seq.token_ids[-1] in self.eos_token_ids:
            matcher = self.matcher_of(seq)
            if not matcher.is_accepting():
                problem = sentence(matcher.get_error()) or "no token can follow"
                raise DeadEnd(f"structured_outputs: the answer cannot go on: {problem}")
