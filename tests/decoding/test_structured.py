"""Structured outputs: every answer matches, whatever the schedule; a mask has the tokens that brute force finds; what
cannot be done is refused with its place; other requests notice nothing.

Run: pytest tests/decoding/test_structured.py [-k schemas]; with --slow it tries 1,000 random schemas
"""

import json
import re
import sys
from collections import Counter
from copy import deepcopy
from importlib.util import find_spec
from types import SimpleNamespace

import jsonschema
import llguidance
import pytest
import torch
from fake_engine import go_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.backends import torch_ops
from nanovllm.layers import sampler
from nanovllm.options import shown
from nanovllm.sequence import Request
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.decoding import structured
from nanovllm.topics.decoding.masks import masked_logits
from nanovllm.topics.decoding.rules import rules_of
from nanovllm.topics.decoding.structured import grammar_of, narrowed

assert llguidance  # without it, the whole file is skipped
EOS = {1533, 1535}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMPACT = {"json": PERSON, "disable_any_whitespace": True}
NESTED = 'start: "(" start ")" | WORD\nWORD: /[a-z]{1,8}/'


@pytest.fixture(scope="module")
def llm():
    return LLM(num_blocks=400, dtype="float32")


@pytest.fixture(scope="module")
def source(llm):
    """What grammars are compiled for, without an engine."""
    return SimpleNamespace(
        model="tiny",
        tokenizer=llm.tokenizer,
        vocab_size=1536,
        eos_token_ids=frozenset(EOS),
        vocabulary=None,
    )


def params(max_tokens=60, temperature=0, **fields) -> SamplingParams:
    """The fields are those of StructuredOutputsParams, or of SamplingParams."""
    names = {*structured.KINDS, "disable_any_whitespace"} & fields.keys()
    kinds = {name: fields.pop(name) for name in names}
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, structured_outputs=kinds or None, **fields
    )


def answers(llm: LLM, prompts, all_params) -> list:
    """The outputs of all; afterwards no block is in use."""
    outputs = llm.generate(prompts, all_params, use_tqdm=False)
    check_blocks(llm.block_manager, [])
    assert llm.block_manager.num_used_blocks == 0
    return [one for output in outputs for one in output.outputs]


def is_valid(text: str, schema: dict) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (jsonschema.ValidationError, json.JSONDecodeError):
        return False
    return True


# --- every answer matches ---

NAMES = st.sampled_from(["a", "id", "name", "x y", 'q"t', "é", "long_property_name"])
NUMBERS = st.integers(-1000, 1000)


@st.composite
def bounded(draw, kind: str, low: str, high: str, values, **more) -> dict:
    """A schema of this type, with one bound or two, or none."""
    first, last = sorted([draw(values), draw(values)])
    schema = {"type": kind, low: first, high: last}
    left_out = draw(st.sets(st.sampled_from([low, high])))
    return {key: value for key, value in schema.items() if key not in left_out} | more


LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]}]),
    bounded("integer", "minimum", "maximum", NUMBERS),
    bounded("number", "minimum", "maximum", NUMBERS),
    bounded("number", "minimum", "maximum", st.sampled_from([-2.5, 0, 0.125, 7.75])),
    st.sampled_from([2, 5, 0.25, 10]).map(lambda k: {"type": "number", "multipleOf": k}),
    bounded("string", "minLength", "maxLength", st.integers(0, 9)),
    st.sampled_from(["^[a-c]{2,4}$", "[0-9]", "^(yes|no)", "é+$", "^\\d{3}-\\w+$", "a.b"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "time", "uuid", "ipv4"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(
        st.sampled_from([1, -7, 2.5, "", "two words", 'q"\n', "😀", None, True]), min_size=1
    ).map(lambda values: {"enum": values}),
    st.sampled_from([{"const": "v1"}, {"const": {"a": [1, None]}}]),
)


@st.composite
def objects(draw, schemas) -> dict:
    properties = draw(st.dictionaries(NAMES, schemas, max_size=4))
    schema: dict = {"type": "object", "properties": properties}
    schema["required"] = [name for name in properties if draw(st.booleans())]
    more = draw(st.sampled_from([False, False, None, {"type": "integer"}]))
    return schema if more is None else schema | {"additionalProperties": more}


@st.composite
def arrays(draw, schemas) -> dict:
    schema = draw(bounded("array", "minItems", "maxItems", st.integers(0, 3)))
    schema["items"] = draw(schemas)
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(schemas, min_size=1, max_size=2))
    return schema


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=8,
)


def test_a_schema_is_narrowed_to_what_is_named():
    """And an unknown format is a comment. What combines schemas, or is no schema, stays as it is."""
    named = {"type": "object", "properties": {"a": {"format": "path"}, "b": {"format": "date"}}}
    known = {**named, "properties": {"a": {}, "b": {"format": "date"}}}
    assert narrowed({"items": deepcopy(named)}) == {
        "items": {**known, "additionalProperties": False}
    }
    for more in ({"additionalProperties": True}, {"allOf": [{"required": ["a"]}]}, {"anyOf": [{}]}):
        assert narrowed(deepcopy({**named, **more})) == {**known, **more}
    kept = {"const": {"format": "path", "properties": {}}}
    assert narrowed(deepcopy(kept)) == kept


@pytest.mark.parametrize("num_examples", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_answers_to_random_schemas_are_valid(llm, num_examples):
    """Ten schemas at a time, each with a greedy answer and a drawn one."""
    counts: Counter = Counter()
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

    @settings(
        max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=checks
    )
    @given(st.lists(SCHEMAS, min_size=10, max_size=10), st.booleans())
    def try_schemas(schemas, is_compact):
        asked = [
            (schema, params(90, t, json=schema, disable_any_whitespace=is_compact, seed=i))
            for i, schema in enumerate(schemas)
            for t in (0, 1)
            if is_possible(llm, schema)
        ]
        outputs = answers(llm, ["An answer: "] * len(asked), [one for _, one in asked])
        for (schema, _), output in zip(asked, outputs):
            counts[output.finish_reason] += 1
            if output.finish_reason == "stop":
                assert is_valid(output.text, schema), (schema, output.text)
        counts["tried"] += 2 * len(schemas)

    try_schemas()
    assert counts["stop"] > 0.4 * counts["tried"], counts
    assert counts["stop"] + counts["length"] > 0.9 * counts["tried"], counts


def is_possible(llm: LLM, schema: dict) -> bool:
    """Some random schemas contradict themselves; nothing else may be refused."""
    try:
        llm.inputs.request("x", params(json=schema))
    except ValueError as error:
        assert "Unsatisfiable" in str(error) or "no text matches" in str(error), error
        return False
    return True


REGEXES = [
    r"[0-9]{3}-[a-f]{2,5}",
    r"(yes|no)( maybe)?",
    r"\d+\.\d{2} (EUR|USD)",
    r"[^a-z\n]{1,4}/\\x",
    r"é{2}(😀|ß)?",
    r"",
]


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex(llm, regex, temperature):
    (output,) = answers(llm, "Once upon", params(120, temperature, regex=regex, seed=3))
    if output.finish_reason == "stop":
        assert re.fullmatch(regex, output.text)
    assert output.finish_reason == "stop" or "+" in regex


def test_a_choice(llm):
    """Also of texts that begin alike, or have what grammars write in another way."""
    texts = ["no", "none", "", 'a"b\\n', "line\nend", "é/😀|{", "x" * 40]
    asked = [params(80, 1, choice=texts, seed=seed) for seed in range(40)]
    outputs = answers(llm, ["Well, "] * 40, asked)
    assert {output.text for output in outputs} <= set(texts)
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert len({output.text for output in outputs}) > 1
    for text in texts:  # each can be chosen
        (output,) = answers(llm, "Well, ", params(80, choice=[text]))
        assert output.text == text and output.token_ids[-1] in EOS


def test_a_grammar_and_any_object(llm):
    texts = [
        output.text
        for output in answers(
            llm, ["("] * 20, [params(60, 1, grammar=NESTED, seed=i) for i in range(20)]
        )
        if output.finish_reason == "stop"
    ]
    assert len(texts) > 10
    for text in texts:
        depth = text.count("(")
        assert re.fullmatch("[a-z]{1,8}", text[depth : len(text) - depth])
        assert text.startswith("(" * depth) and text.endswith(")" * depth)
    (output,) = answers(llm, "x", params(grammar='root ::= "yes" | "no"'))  # as GBNF writes it
    assert output.text in ("yes", "no")
    (output,) = answers(
        llm, "x", params(200, json_object=True, disable_any_whitespace=True, seed=1)
    )
    assert output.text.startswith("{")
    assert output.finish_reason == "length" or isinstance(json.loads(output.text), dict)


# --- the mask ---


def token_bytes(tokenizer) -> dict[int, bytes]:
    """The bytes of each token, by the table of GPT-2: a printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
    tokens = tokenizer.convert_ids_to_tokens(range(1533))
    return {i: bytes(byte_of[char] for char in token) for i, token in enumerate(tokens)}


def new_seq(source, output_token_ids=(), **fields):
    request = Request("r", None, [1, 2], params(**fields))
    request.rules = rules_of(request, source)
    (seq,) = request.sequences
    seq.token_ids += output_token_ids
    return seq


def allowed(seq, vocab_size=1536) -> set[int]:
    """What can be drawn after the sequence, whatever the model thinks."""
    logits = masked_logits(torch.zeros(1, vocab_size), [seq])
    return set((logits[0] > -1).nonzero().view(-1).tolist())


MATCHES = ["the fox", "the foxes", "there", "t", "né", "n😀", 'he said "no"', "\t\n"]


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": MATCHES},
        {"regex": "|".join(map(re.escape, MATCHES))},
        {"grammar": "start: " + " | ".join(map(json.dumps, MATCHES))},
    ],
    ids=["choice", "regex", "grammar"],
)
def test_a_mask_has_the_tokens_that_brute_force_finds(llm, source, fields):
    """A token is allowed if it keeps the text the start of a match; after each start that tokens can write. Where the
    next byte is certain, llguidance leaves only the token that the tokenizer would take."""
    tokens = token_bytes(llm.tokenizer)
    matches = [text.encode() for text in MATCHES]
    begins: list[tuple[int, ...]] = [()]
    for begin in begins:  # which grows
        text = b"".join(tokens[i] for i in begin)
        ends = [match[len(text) :] for match in matches if match.startswith(text)]
        expected = {i for i, new in tokens.items() if any(end.startswith(new) for end in ends)}
        found = allowed(new_seq(source, begin, **fields))
        if text in matches or len({end[0] for end in ends}) > 1:
            assert found == expected | (EOS if text in matches else set()), text
        else:
            assert found and found <= expected, text
        begins += [(*begin, i) for i in sorted(expected)[:4] if len(begins) < 60]


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 1e6}], ids=str
)
def test_both_backends_draw_what_is_allowed(source, options):
    """Also where a kernel sees nothing but forbidden tokens first, and where the filters would keep others."""
    rows = 4
    vocab_size = 5000
    larger = SimpleNamespace(**{**vars(source), "vocab_size": vocab_size, "vocabulary": None})
    seq = new_seq(larger, choice=["!", "zz"])
    expected = {vocab_size - 1 - i for i in allowed(seq, vocab_size)}
    torch.manual_seed(0)
    logits = torch.randn(rows, vocab_size) - 30 * (
        masked_logits(torch.zeros(1, vocab_size), [seq]) > -1
    )
    masked = masked_logits(logits, [seq] * rows).flip(1).contiguous()  # what is allowed comes last

    def of_all(name, dtype):
        return torch.full((rows,), options[name], dtype=dtype) if name in options else None

    sampling = sampler.Sampling(
        temperature=torch.full((rows,), options.get("temperature", 1.0)),
        seed=torch.arange(rows),
        position=torch.arange(rows),
        top_k=of_all("top_k", torch.int64),
        top_p=of_all("top_p", torch.float32),
        min_p=of_all("min_p", torch.float32),
        max_top_k=options.get("top_k", 0),
        all_top_k_small="top_k" in options,
    )
    drawn = torch_ops.sample(masked, sampling).tolist()
    assert set(drawn) <= expected
    if not options or "temperature" in options:
        assert len(set(drawn)) > 1
    if find_spec("triton"):
        from nanovllm.backends import triton_ops

        assert triton_ops.sample(masked, sampling).tolist() == drawn


# --- whatever the schedule ---

JOBS = [
    *[
        (f"A person, {i}: ", params(70, i % 2, n=1 + 3 * (i == 1), seed=i, **COMPACT))
        for i in range(6)
    ],
    ("Number: ", params(30, 1, n=4, seed=7, regex=r"[0-9]{20}(\.[a-z]{4,8})?", logprobs=3)),
    ("(", params(30, 0.8, seed=8, grammar=NESTED)),
]
NEIGHBORS = [
    ("Once upon a time", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)),
    ("There was a fox", SamplingParams(seed=5, n=2, max_tokens=40, ignore_eos=True)),
    ("Hello", SamplingParams(seed=6, max_tokens=30, presence_penalty=1, top_k=20, min_tokens=5)),
]


def tokens_of(llm: LLM, jobs) -> list[tuple]:
    prompts, all_params = zip(*jobs)
    outputs = answers(llm, list(prompts), list(all_params))
    return [(output.token_ids, output.text, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def expected(llm):
    """Each alone."""
    return [tokens_of(llm, [job]) for job in [*JOBS, *NEIGHBORS]]


def flat(lists) -> list:
    return [one for each in lists for one in each]


SCHEDULES = [
    {"num_blocks": 80, "preemption_mode": "swap", "swap_gib": 0.01},
    {"num_blocks": 80, "preemption_mode": "recompute"},
    {"num_blocks": 400, "max_num_batched_tokens": 24},
    {"num_blocks": 80, "max_num_batched_tokens": 30, "enable_prefix_caching": False},
]


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_tokens_do_not_depend_on_the_schedule(expected, options):
    """Samples that fork, are preempted, computed again or swapped, in chunks, beside others; and these get the tokens
    that they get without them."""
    llm = LLM(dtype="float32", block_size=4, max_num_seqs=24, **options)
    assert tokens_of(llm, [*JOBS, *NEIGHBORS]) == flat(expected)
    assert tokens_of(llm, NEIGHBORS) == flat(expected[len(JOBS) :])
    if options["num_blocks"] == 80:
        assert llm.scheduler.num_preemptions > 0
    reasons = Counter(reason for _, _, reason in flat(expected[: len(JOBS)]))
    assert reasons["stop"] > 8, reasons


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("when", ["collect", "launch"])
def test_tokens_after_a_fault(llm, expected, when, monkeypatch):
    """Steps fail, before their tokens are drawn and after."""
    launch = llm.runner.launch
    steps = []

    def failing(schedule):
        steps.append(schedule)
        fails = len(steps) in (3, 40)  # in between, each request runs alone once
        if fails and when == "launch":
            raise RuntimeError("a fault")
        collect = launch(schedule)
        if fails:
            collect()
            raise RuntimeError("a fault")
        return collect

    monkeypatch.setattr(llm.runner, "launch", failing)
    assert tokens_of(llm, [*JOBS, *NEIGHBORS]) == flat(expected)
    assert len(steps) > 40


# --- what is refused ---

REFUSED = [
    ({"regex": "a", "choice": ["a"]}, "structured_outputs has regex and choice: give one of"),
    ({"jsn": {}}, "no field 'jsn': did you mean 'json'?"),
    ({"json": 5}, "json=5 is not allowed: it must be a dict or its JSON text"),
    ({"choice": []}, "choice=[] is not allowed"),
    ({"choice": ["\ud800"]}, "structured_outputs.choice"),
    ({"json": "{"}, "structured_outputs.json='{' is not allowed: Expecting property name"),
    ({"json": {"a": {1, 2}}}, "set is not JSON serializable"),
    (
        {"json": {"properties": {"a": {"items": {"not": {}}}, "b": {"type": "integer"}}}},
        'Unimplemented keys: ["not"]',
    ),
    (
        {"regex": "a(b"},
        "structured_outputs.regex='a(b' is not allowed: unclosed group, at character 2",
    ),
    ({"regex": "ab(?=c)"}, "look-ahead and look-behind, is not supported, at character 3"),
    ({"grammar": 'start: "a" | b'}, 'at 1(8): unknown name: "b"'),
    ({"grammar": 'start: %json {"type": "integer", "multipleOf": 1000003}'}, "multipleOf=1000003"),
    ({"grammar": "start: %json 5"}, "json=5"),
    ({"grammar": "start: A\nA: /a/ & /b/"}, "no text matches it"),
]


def nested(depth: int, wrap, inner) -> dict:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


LOOP: dict = {"type": "array"}
LOOP["items"] = LOOP
BOMBS = [
    ({"regex": "(a{1000}){1000}"}, "too many expressions"),
    ({"regex": "(" * 5000 + ")" * 5000}, "nested"),
    ({"regex": "a" * 40_000}, "it has 40,000 characters: at most 32,768 are allowed"),
    ({"choice": ["a" * 1000] * 40}, "characters: at most 32,768"),
    ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "too deeply nested"),
    ({"grammar": 'start: a{30000}\na: "x"'}, "Too many items"),
    (
        {
            "grammar": "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40))
            + '\na40: "x"\nstart: a0'
        },
        "",
    ),
    ({"grammar": "start: A\nA: /.*a.{50}/ & /.*b.{40}/ & /.*c.{45}/"}, "fuel exhausted"),
    ({"json": LOOP}, "Circular reference"),
    ({"json": nested(200, lambda x: {"items": x}, {})}, "recursion limit"),
    ({"json": nested(20_000, lambda x: {"items": x}, {})}, "recursion"),
    ({"json": '{"items":' * 3000 + "{}" + "}" * 3000}, "recursion"),
    ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text matches it"),
    ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}}, "items"),
    ({"json": {"type": "integer", "multipleOf": 1_000_003}}, "at #: multipleOf=1000003"),
    (
        {"json": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}},
        "at #/allOf/1: multipleOf=9967",
    ),
    ({"json": {"properties": {f"p{i}": {"multipleOf": 997} for i in range(300)}}}, "multipleOf"),
    ({"json": nested(12, lambda x: {"allOf": [x, x]}, {"type": "integer"})}, "characters"),
]


@pytest.mark.parametrize("fields, problem", [*REFUSED, *BOMBS], ids=lambda x: shown(x, 40))
def test_it_is_refused_with_its_place(llm, fields, problem):
    """Before anything is allocated; the engine goes on."""
    with pytest.raises(ValueError) as refused:
        llm.add_request("x", SamplingParams(structured_outputs=fields))
    assert problem in str(refused.value)
    assert len(str(refused.value)) < 1000 and "\n" not in str(refused.value)
    assert not llm.has_unfinished() and llm.block_manager.num_used_blocks == 0


def test_where_structured_outputs_do_not_belong(llm):
    with pytest.raises(ValueError, match="it must be StructuredOutputsParams or a dict"):
        llm.add_request("x", SamplingParams(structured_outputs=SamplingParams()))
    with pytest.raises(ValueError, match="no field 'structured_outputs'"):
        BeamSearchParams(structured_outputs={"regex": "a"})


@pytest.mark.parametrize("prompt", ["Why? <think>\n", "Why?"])
def test_a_form_starts_behind_the_reasoning_that_the_prompt_has_opened(llm, monkeypatch, prompt):
    """Half of the tokens may be reasoning. This model does not end it by itself."""
    end = 1534
    monkeypatch.setattr(llm.tokenizer, "convert_tokens_to_ids", lambda text: end)
    (output,) = answers(llm, prompt, params(120, ignore_eos=True, **COMPACT))
    behind = output.token_ids
    if prompt != "Why?":
        assert behind.index(end) == 60 and not EOS & {*behind[:60]}
        behind = behind[61:]
    assert is_valid(llm.tokenizer.decode(behind, skip_special_tokens=True), PERSON)


def test_a_model_without_what_it_needs(source):
    for name, value, problem in (
        ("tokenizer", None, "model='tiny' has no tokenizer"),
        ("eos_token_ids", frozenset(), "model='tiny' has no end-of-sequence token"),
    ):
        other = SimpleNamespace(**{**vars(source), "vocabulary": None, name: value})
        with pytest.raises(ValueError, match=problem):
            grammar_of(params(regex="a"), other)


def test_without_the_library(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    other = SimpleNamespace(**{**vars(source), "vocabulary": None})
    with pytest.raises(ValueError, match=r"pip install 'nanovllm\[structured\]'"):
        grammar_of(params(regex="a"), other)


# --- what may go wrong later, and what others pay ---


def test_a_grammar_that_becomes_too_large_ends_with_an_error(monkeypatch):
    """Only its own request, without a step that fails."""
    monkeypatch.setitem(structured.LIMITS, "step_max_items", 300)
    llm = LLM(num_blocks=100, dtype="float32")
    expected = tokens_of(llm, NEIGHBORS)
    ambiguous = params(
        200, grammar='start: start start | "a" | "b"', logit_bias=dict.fromkeys(EOS, -100)
    )
    llm.add_request("x", ambiguous, "culprit")
    for i, (prompt, one) in enumerate(NEIGHBORS):
        llm.add_request(prompt, one, str(i))
    ended = go_on(llm)
    assert "the answer cannot go on: " in str(ended["culprit"].error)
    assert ended["culprit"].outputs[0].finish_reason == "error"
    found = [one for i in range(len(NEIGHBORS)) for one in ended[str(i)].outputs]
    assert [(one.token_ids, one.text, one.finish_reason) for one in found] == expected
    assert llm.recovery.num_failed_steps == 0
    with pytest.raises(ValueError, match="the answer cannot go on"):
        llm.generate("x", ambiguous, use_tqdm=False)
    check_blocks(llm.block_manager, [])
    assert llm.block_manager.num_used_blocks == 0
