"""Makes the shipped model `builtin:addition-1m`: a small Qwen2 that half knows its task.

    python -m echo2_learner.warm_start --out DIR --seed 0

Supervised on two-digit addition ("<bos>ab+cd=" and a sum of three digits, "<eos>") with some
digit reversals ("<bos>0123=" and "3210", "<eos>"), from a random initialisation, and stopped
when its greedy accuracy on sums that it never saw is about TARGET: enough for a reward now
and then, and far from done. Weights are rounded to bfloat16, and it is these that are tested.

One thread and one seed, so that a run can be repeated; another torch or another processor may
round differently and stop a few steps earlier or later.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from echo2_workers.environment import Split
from echo2_workers.environments.addition import Addition
from echo2_workers.tokenizer import BOS, CHARACTERS, EOS, FIRST_CHARACTER, PAD, VOCAB_SIZE, encode

Pair = tuple[str, str]
"""Prompt and answer."""

TARGET: Final = (0.38, 0.43)
FIRST_TASKS: Final = 256
"""The target holds for all held-out sums, and for the first ones, which an eval asks."""
ADDITIONS: Final = 90
REVERSALS: Final = 38
"""Both of one batch."""
LEARNING_RATE: Final = 1e-3
WARMUP_STEPS: Final = 50
AVERAGE_DECAY: Final = 0.95
"""The model that is tested and kept is a running average of the trained one. It moves
smoothly through the target, and lies where the loss is flat: reinforcement learning with
steps of 1e-4 starts well from there, and breaks a model that was annealed."""
TEST_EVERY_STEPS: Final = 2
STEPS_MAX: Final = 5000


def make_model() -> Qwen2ForCausalLM:
    """989,312 parameters; the embedding is the output head too."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=512,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; special tokens as written, none added."""
    vocab = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocab |= {character: FIRST_CHARACTER + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def additions(environment: Addition, split: Split, start: int, count: int) -> list[Pair]:
    """(prompt, answer) of tasks [start, start + count), just as a run gets them."""
    tasks = [json.loads(environment.task(split, start + i)) for i in range(count)]
    return [(task["prompt"], task["answer"]) for task in tasks]


def reversal(rng: random.Random) -> Pair:
    digits = "".join(rng.choice(CHARACTERS[:10]) for _ in range(rng.randint(2, 8)))
    return f"{digits}=", digits[::-1]


def answer_loss(model: nn.Module, pairs: Sequence[Pair]) -> Tensor:
    """Mean cross-entropy of the answers' tokens and of <eos>."""
    rows = [[BOS, *encode(prompt), *encode(answer), EOS] for prompt, answer in pairs]
    longest = max(len(row) for row in rows)
    tokens_BT = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    targets_BT = tokens_BT.clone()
    for index, (prompt, _) in enumerate(pairs):
        targets_BT[index, : 1 + len(prompt)] = -100
    targets_BT[tokens_BT == PAD] = -100
    logits_BTV = model(tokens_BT).logits[:, :-1]
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten())


@torch.no_grad()
def greedy_accuracy(model: nn.Module, pairs: Sequence[Pair]) -> float:
    """Share of answers, all of one length, that greedy decoding gets right to the <eos>.

    A greedy answer is right if and only if each of its tokens is the likeliest after the
    right ones before it, so that one pass over the right answers tells.
    """
    answers = torch.tensor([[*encode(answer), EOS] for _, answer in pairs])
    tokens_BT = torch.tensor([[BOS, *encode(prompt), *encode(answer)] for prompt, answer in pairs])
    logits_BTV = model(tokens_BT).logits[:, -answers.shape[1] :]
    return float((logits_BTV.argmax(-1) == answers).all(dim=1).double().mean())


def rounded(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """A copy with weights that bfloat16 holds exactly."""
    copy = make_model()
    copy.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    return copy.eval()


def warm_start(seed: int) -> tuple[Qwen2ForCausalLM, float]:
    """Train until the target is met; (rounded model, its held-out accuracy)."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    environment = Addition(seed=0)
    held_out = additions(environment, "eval", 0, environment.num_tasks("eval") or 0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    average = make_model()
    average.load_state_dict(model.state_dict())
    for step in range(1, STEPS_MAX + 1):
        pairs = additions(environment, "train", (step - 1) * ADDITIONS, ADDITIONS)
        loss = answer_loss(model, pairs + [reversal(rng) for _ in range(REVERSALS)])
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1.0 - AVERAGE_DECAY)
        if step % TEST_EVERY_STEPS == 0:
            tested = rounded(average)
            accuracy = greedy_accuracy(tested, held_out)
            first = greedy_accuracy(tested, held_out[:FIRST_TASKS])
            print(
                f"step {step}  loss {float(loss.detach()):.3f}  held-out {accuracy:.3f}  "
                f"first {FIRST_TASKS} {first:.3f}",
                flush=True,
            )
            if min(accuracy, first) >= TARGET[0] and max(accuracy, first) <= TARGET[1]:
                return tested, accuracy
    raise SystemExit(f"{STEPS_MAX} steps did not reach {TARGET}; try another --seed")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m echo2_learner.warm_start", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, accuracy = warm_start(options.seed)
    model.to(torch.bfloat16).save_pretrained(options.out)
    make_tokenizer().save_pretrained(options.out)
    print(f"{options.out}: held-out greedy accuracy {accuracy:.4f}, seed {options.seed}")


if __name__ == "__main__":
    main()
