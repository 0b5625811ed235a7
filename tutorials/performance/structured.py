r"""What a mask costs, with two libraries: llguidance, which the engine uses, and xgrammar.

    OMP_NUM_THREADS=1 python -m tutorials.performance.structured \
        --json tutorials/results/cpu_structured.json

Two vocabularies: that of the embedded model, and one of Qwen3's size, which is made here: byte-level
BPE of made-up words. Both libraries go along the same answers, token by token: a
mask, then the token. Then the engine: the same eight sequences with a grammar that allows
everything, and without one. xgrammar is left out if it is not installed.
"""

import json
import random
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.decoding.masks import masked_logits
from nanovllm.decoding.structured import LIMITS, grammar_of, grammar_text, new_vocabulary
from nanovllm.sequence import Request
from tutorials.arguments import experiment
from tutorials.machine import device_name, environment, installed
from tutorials.report import aligned, percentile, write_json

END = "<|im_end|>"
LARGE = 151_936  # Qwen3's embedding has so many rows, ...
NUM_TOKENS = 151_643  # ... and its BPE so many tokens
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.[a-z]{2,3}$"},
        "colors": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
        },
    },
    "required": ["name", "age", "email"],
    "additionalProperties": False,
}
ANSWER = {
    "name": "Otto the quiet squirrel",
    "age": 41,
    "email": "otto.squirrel@forest.org",
    "colors": ["red", "blue"],
    "home": {"street": "Under the old oak, second branch", "number": 12},
}
FREE = {"title": "Once upon a time", "pages": [1, 20, 300], "by": {"name": "Finn", "is_bear": True}}
LARK = 'start: sum\nsum: item | sum "+" item\nitem: /[0-9]+/ | "(" sum ")"\n'
EBNF = 'root ::= item ("+" item)*\nitem ::= [0-9]+ | "(" root ")"\n'
CASES = {  # what must match, and an answer that does
    "json": ({"json": PERSON}, json.dumps(ANSWER)),
    "json_object": ({"json_object": True}, json.dumps(FREE)),
    "regex": ({"regex": "[A-Z][a-z]+( [a-z]+)*\\."}, "Once there was a quiet squirrel named otto."),
    "choice": ({"choice": [f"option number {i}" for i in range(100)]}, "option number 42"),
    "grammar": ({"grammar": LARK}, "12+(345+(6+78)+9)+1011"),
}


def new_tokenizer() -> PreTrainedTokenizerFast:
    """As many tokens as Qwen3 has: words of random syllables, and what JSON is written with."""
    rng = random.Random(0)
    starts = "b c d f g h j k l m n p r s t v w z st tr pl gr br ch sh".split()
    middles = "a e i o u ai ea ou".split()
    ends = ["", "", "n", "r", "s", "t", "l", "ng", "rd"]
    syllables = [a + b + c for a in starts for b in middles for c in ends]
    words: dict[str, None] = {}
    while len(words) < 170_000:
        word = "".join(rng.choices(syllables, k=rng.choice([1, 2, 2, 3, 3])))
        words[word.capitalize() if rng.random() < 0.15 else word] = None
    names = [*words]
    lines = [" " + " ".join(names[i : i + 1000]) for i in range(0, len(names), 1000)]
    for name in names[:2000]:
        lines.append(
            json.dumps({name: [name, rng.random(), rng.randrange(10**6)], "x": {"y": None}})
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


class LLGuidance:
    """As the engine uses it."""

    def __init__(self, tokenizer, vocab_size: int):
        self.model = ""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset([tokenizer.convert_tokens_to_ids(END)])
        self.vocabulary = new_vocabulary(self)

    def compile(self, fields: dict):
        from llguidance import LLMatcher, LLParserLimits

        text = grammar_text(StructuredOutputsParams(**fields))
        limits = LLParserLimits(**LIMITS)
        return LLMatcher(self.vocabulary, text, log_level=0, limits=limits)

    def new(self, compiled):
        return compiled.deep_copy()

    def mask(self, matcher) -> torch.Tensor:
        return torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)

    def consume(self, matcher, token_id: int) -> bool:
        return matcher.consume_token(token_id)


class XGrammar:
    def __init__(self, tokenizer, vocab_size: int):
        import xgrammar

        self.library = xgrammar
        stop = [tokenizer.convert_tokens_to_ids(END)]
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=stop
        )
        # compiled anew each time, by one thread, as by the other library
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self, fields: dict):
        (name,) = fields
        if name == "json":
            return self.compiler.compile_json_schema(json.dumps(PERSON), any_whitespace=True)
        if name == "json_object":
            return self.compiler.compile_builtin_json_grammar()
        if name == "regex":
            return self.compiler.compile_regex(fields["regex"])
        choices = " | ".join(json.dumps(text) for text in fields.get("choice", []))
        return self.compiler.compile_grammar(f"root ::= {choices}" if choices else EBNF)

    def new(self, compiled):
        return self.library.GrammarMatcher(compiled)

    def mask(self, matcher) -> torch.Tensor:
        matcher.fill_next_token_bitmask(self.bitmask)
        return self.bitmask[0].view(torch.uint8)

    def consume(self, matcher, token_id: int) -> bool:
        return matcher.accept_token(token_id)


LIBRARIES = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def seconds_of(function) -> tuple[float, object]:
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def walk(library, compiled, token_ids: list[int]) -> list[tuple[float, float]]:
    """Goes along an answer. Returns the seconds of each mask, and of each token taken in."""
    matcher = library.new(compiled)
    seconds = []
    for token_id in token_ids:
        of_mask, mask = seconds_of(lambda: library.mask(matcher))
        assert mask[token_id // 8] >> token_id % 8 & 1, token_id
        of_token, is_taken = seconds_of(lambda i=token_id: library.consume(matcher, i))
        assert is_taken
        seconds.append((of_mask, of_token))
    return seconds


def measure(name: str, tokenizer, vocab_size: int, repeat: int) -> dict:
    """One library with one vocabulary, in seconds. The first walk is told apart: a library may
    put off to it what the other one does before."""
    of_vocabulary, library = seconds_of(lambda: LIBRARIES[name](tokenizer, vocab_size))
    report: dict = {"vocabulary": of_vocabulary, "cases": {}}
    for case, (fields, answer) in CASES.items():
        token_ids = tokenizer.encode(answer, add_special_tokens=False)
        compiling = []
        firsts = []
        walks = []
        for _ in range(repeat):
            seconds, compiled = seconds_of(lambda f=fields: library.compile(f))
            compiling.append(seconds)
            first = walk(library, compiled, token_ids)
            firsts.append(sum(map(sum, first)))
            walks += walk(library, compiled, token_ids)
        masks = [mask for mask, _ in walks]
        report["cases"][case] = {
            "tokens": len(token_ids),
            "compile": median(compiling),
            "first_answer": median(firsts),
            "mask": median(masks),
            "mask_p99": percentile(masks, 99),
            "mask_max": max(masks),
            "token": median([token for _, token in walks]),
        }
    return report


def measure_masking(tokenizer, vocab_size: int, rows: int, repeat: int) -> float:
    """Seconds for masks and what PyTorch does with them, for a batch: `masked_logits`."""
    library = LLGuidance(tokenizer, vocab_size)
    seqs = []
    for i in range(rows):
        params = SamplingParams(structured_outputs={"json": PERSON})
        request = Request(str(i), None, [0], params)
        request.grammar = grammar_of(params, library)
        seqs += request.sequences
        seqs[-1].token_ids += tokenizer.encode('{"name": "Ot', add_special_tokens=False)
    logits = torch.randn(rows, vocab_size)
    masked_logits(logits, seqs)
    return median([seconds_of(lambda: masked_logits(logits, seqs))[0] for _ in range(repeat)])


def measure_steps(repeat: int) -> dict[str, float]:
    """Seconds of a decode step of eight sequences, with and without a grammar, in turns."""
    llm = LLM(num_blocks=512, dtype="float32", device="cpu")
    seconds: dict[str, list[float]] = {"plain": [], "structured": []}
    for _ in range(repeat):
        for name, given in (("plain", None), ("structured", {"regex": "(.|\n)*"})):
            params = SamplingParams(
                seed=0, max_tokens=60, ignore_eos=True, structured_outputs=given
            )
            steps: list[float] = []
            llm.observers[:] = [lambda schedule, s, steps=steps: steps.append(s)]
            llm.generate([f"Once upon a time {i}" for i in range(8)], params, use_tqdm=False)
            seconds[name] += steps[5:]
    return {name: median(steps) for name, steps in seconds.items()}


def package(name: str) -> dict | None:
    """What installing it brings: bytes, licence, and what it needs besides."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in found.files or []]
    needs = [one for one in found.requires or [] if "extra ==" not in one]
    return {
        "version": found.version,
        "bytes": sum(path.stat().st_size for path in paths if path.is_file()),
        "licence": found.metadata["License-Expression"] or found.metadata["License"],
        "needs": needs,
    }


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    embedded = LLM(num_blocks=8).get_tokenizer()
    vocabularies = {"embedded": (embedded, 1536), "qwen-size": (new_tokenizer(), LARGE)}
    libraries = [name for name in LIBRARIES if installed(name)]
    report = environment() | {"device": device_name(torch.device("cpu")), "repeat": args.repeat}
    report["versions"] = {name: installed(name) for name in ["torch", "tokenizers", *libraries]}
    names = ["llguidance", "xgrammar", "apache-tvm-ffi"]
    report["packages"] = {name: found for name in names if (found := package(name))}
    report["vocabularies"] = {}
    for vocabulary, (tokenizer, vocab_size) in vocabularies.items():
        found = {name: measure(name, tokenizer, vocab_size, args.repeat) for name in libraries}
        masking = {rows: measure_masking(tokenizer, vocab_size, rows, 50) for rows in (1, 32)}
        report["vocabularies"][vocabulary] = {"size": vocab_size, "libraries": found}
        report["vocabularies"][vocabulary]["masked_logits"] = masking
        rows = [["", "", "tokens", "compile ms", "mask us", "99 %", "slowest", "token us"]]
        for name, result in found.items():
            print(f"{vocabulary}, {name}: {1000 * result['vocabulary']:.0f} ms for the vocabulary")
            for case, one in result["cases"].items():
                us = [one[key] * 1e6 for key in ("mask", "mask_p99", "mask_max", "token")]
                numbers = [str(one["tokens"]), f"{1000 * one['compile']:.2f}"]
                rows.append([name, case, *numbers, *(f"{value:.1f}" for value in us)])
        print(aligned(rows))
        print({rows: f"{1000 * seconds:.3f} ms" for rows, seconds in masking.items()})
    report["steps"] = measure_steps(args.repeat)
    print({name: f"{1000 * seconds:.3f} ms" for name, seconds in report["steps"].items()})
    write_json(report, args.json)


if __name__ == "__main__":
    main()
