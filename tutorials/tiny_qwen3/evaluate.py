"""Asks the embedded model fresh questions and counts the right answers: a gauge of the model and of the engine.

python tutorials/tiny_qwen3/evaluate.py [--model DIR] [--questions 200]
"""

import argparse
import random

from data import CHECKED, NAMES, as_typed, phone_book

from nanovllm import LLM, SamplingParams

TASKS = CHECKED | {
    f"phone_book of {entries} names": lambda rng, entries=entries: phone_book(rng, entries)
    for entries in (2, 16, 50, 110, len(NAMES))
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--questions", type=int, default=200, help="for each task")
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--show-wrong", type=int, default=0)
    args = parser.parse_args()

    llm = LLM(*[args.model] if args.model else [])
    rng = random.Random(args.seed)
    print("| task | right answers | longest prompt |\n|---|---|---|")
    for name, task in TASKS.items():
        pairs = [task(rng) for _ in range(args.questions)]
        chats = [[{"role": "user", "content": as_typed(rng, question)}] for question, _ in pairs]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
        wrong = [
            (q, a, o.outputs[0].text) for (q, a), o in zip(pairs, outputs) if o.outputs[0].text != a
        ]
        longest = max(len(output.prompt_token_ids) for output in outputs)
        print(f"| {name} | {1 - len(wrong) / len(pairs):.1%} | {longest} tokens |", flush=True)
        for question, answer, text in wrong[: args.show_wrong]:
            print(f"  asked {question!r}\n  right {answer!r}\n  said  {text!r}")


if __name__ == "__main__":
    main()
