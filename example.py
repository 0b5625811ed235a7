"""Several prompts, answered together: `python example.py [model]`.

Without an argument it runs the embedded model. With one, a Hugging Face hub id or a local directory, for
example `python example.py Qwen/Qwen3-0.6B`.
"""

import argparse
import sys

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL

PHONE_BOOK = """phone book:
Anna 4711
Otto 0815
Søren 1234
Maya 9090
Theo 7562
what is the number of Maya?"""
QUESTIONS = [
    "introduce yourself",
    "list all prime numbers within 100",
    "what is 347 + 285?",
    "what is 502 - 178?",
    "sort 52, 7, 98, 13, 71, 40",
    "reverse the words: river stone apple cloud",
    PHONE_BOOK,
    "tell me a story about a shy fox",
]


def main():
    sys.stdout.reconfigure(errors="replace")  # a console may lack a letter
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("model", nargs="?", default=EMBEDDED_MODEL, help="hub id or directory")
    try:
        llm = LLM(parser.parse_args().model)
    except (ValueError, OSError) as error:
        sys.exit(f"example.py: {error}")
    exact = SamplingParams(temperature=0, max_tokens=256)
    free = SamplingParams(temperature=0.6, max_tokens=256, seed=0)
    params = [
        free if question in (QUESTIONS[0], QUESTIONS[-1]) else exact for question in QUESTIONS
    ]
    outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    for question, output in zip(QUESTIONS, outputs):
        print(f"\n> {question}\n{output.outputs[0].text}")
    stats = llm.stats()
    print(
        f"\n{stats['output_tokens']} tokens in {stats['steps']} steps, {stats['output_tokens_per_second']:.0f} tokens/s, "
        f"at most {stats['kv_blocks_used_peak']} of {stats['kv_blocks']} KV blocks in use"
    )


if __name__ == "__main__":
    main()
