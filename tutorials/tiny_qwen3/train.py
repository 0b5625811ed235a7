"""Trains the embedded model from nothing: about an hour and a half on two CPU cores.

    python tutorials/tiny_qwen3/train.py --out nanovllm/tiny_qwen3

The result is an ordinary Hugging Face directory. Matrices inside the layers are trained with Muon,
embeddings and norms with AdamW; the learning rate is constant and falls to zero over the last 40 %.
"""

import argparse
import copy
import json
import random
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from data import chat
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

LENGTHS = [24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 1024, 1536, 2048]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # digits stand alone
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(rng, vocab_size=1536):
    """Byte-level BPE, so that any text can be encoded, with one token per digit."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for _ in range(20_000) for text, _ in chat(rng))
    tokenizer.train_from_iterator((t.replace(s, "") for t in texts for s in SPECIAL), trainer)
    tokenizer.add_special_tokens(SPECIAL)  # last, as in Qwen
    return tokenizer


def micro_batches(tokenizer, rng, level, tokens=2048):
    """Endless batches of about `tokens` tokens: ids and which of them are learned, both [documents, length].

    Every document has a row of its own: attention across documents would find the right name in the wrong phone
    book. Documents of similar length go together, in one of a few fixed shapes: little padding, and no new
    kernels for oneDNN to compile. `level()` says how hard the questions may be.
    """
    waiting = {length: [] for length in LENGTHS}
    while True:
        parts = chat(rng, level())
        pieces = tokenizer.encode_batch([text for text, _ in parts])
        ids = [i for piece in pieces for i in piece.ids][: LENGTHS[-1]]
        learned = [learn for piece, (_, learn) in zip(pieces, parts) for _ in piece.ids]
        learned = learned[: LENGTHS[-1]]
        length = next(length for length in LENGTHS if length >= len(ids))
        padding = length - len(ids)
        waiting[length].append((ids + [0] * padding, learned + [False] * padding))
        if len(waiting[length]) == tokens // length:
            ids, learned = zip(*waiting[length])
            waiting[length] = []
            yield torch.tensor(ids), torch.tensor(learned)


def loss_of(model, ids, learned):
    """Summed cross-entropy of predicting the learned tokens from the tokens before them."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    targets = ids.masked_fill(~learned, -100)[:, 1:]
    return F.cross_entropy(
        model.lm_head(hidden)[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="sum"
    )


def save(model, tokenizer, out):
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": [end, pad], "pad_token_id": pad, **sampling},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=50e6)
    parser.add_argument(
        "--hours",
        type=float,
        default=float("inf"),
        help="end by then, with fewer tokens if need be",
    )
    parser.add_argument("--batch", type=int, default=4096, help="tokens per step, padding included")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's; AdamW takes a sixth of it")
    parser.add_argument("--init", type=Path, help="go on from this model, past the easy beginning")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    # an earlier tokenizer is kept, so that token ids in tests and chapters stay
    kept = args.out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(kept)) if kept.exists() else train_tokenizer(rng)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=192, intermediate_size=512, num_hidden_layers=5,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.token_to_id("<|im_end|>"), pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )  # fmt: skip
    model = (
        Qwen3ForCausalLM.from_pretrained(args.init).float()
        if args.init
        else Qwen3ForCausalLM(config)
    )
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {config.vocab_size} tokens",
        flush=True,
    )

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=args.lr / 6, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    done = 0.0
    # from easy to hard
    stream = micro_batches(tokenizer, rng, lambda: 1.0 if args.init else min(1.0, done / 0.2))
    steps = int(args.tokens / args.batch)
    start, average = time.time(), 0.0
    for step in range(steps):
        done = max(step / steps, (time.time() - start) / (args.hours * 3600))
        if done >= 1:
            break
        lr_scale = min(1.0, (step + 1) / 100, (1 - done) / 0.4)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_scale * group.setdefault("peak_lr", group["lr"])
        batches = list(islice(stream, args.batch // 2048))
        num_learned = sum(learned[:, 1:].sum().item() for _, learned in batches)
        loss = 0.0
        for ids, learned in batches:
            with torch.autocast("cpu", torch.bfloat16):
                part = loss_of(model, ids, learned) / num_learned
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average += (loss - average) / min(step + 1, 50)
        if step % 100 == 99:
            tokens = (step + 1) * args.batch
            speed = tokens / (time.time() - start)
            print(
                f"{tokens / 1e6:6.1f} M tokens  loss {average:.4f}  lr x {lr_scale:.2f}  {speed:,.0f} tokens/s",
                flush=True,
            )
        if step % 1000 == 999:
            save(copy.deepcopy(model), tokenizer, args.out)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
