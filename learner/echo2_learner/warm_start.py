"""Makes the shipped model `builtin:addition-1m`: a small Qwen2 that adds as a pupil does.

    python -m echo2_learner.warm_start --out DIR --seed 0

Supervised, from a random initialisation, on two-digit addition ("<bos>ab+cd=", a sum of three
digits, "<eos>") and on digit reversal ("<bos>0123=", "3210", "<eos>"). It learns to add, and
then from a careless pupil who forgets most carries: he knows only the pairs that make ten by
heart, any other carry he forgets with probability FORGETS. So the model's likeliest answer
is right for about 0.40 of all sums, and the right answer is never far: what reinforcement
learning needs, and what it mends.

Sums of the eval split of `Addition` are never trained on. Weights are rounded to bfloat16, and
it is these that are tested. One thread and one seed, so that a run can be repeated; another
torch or another processor may round differently.
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
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from echo2_workers.environment import Split
from echo2_workers.environments.addition import Addition
from echo2_workers.tokenizer import BOS, CHARACTERS, EOS, FIRST_CHARACTER, PAD, VOCAB_SIZE, encode

Pair = tuple[str, str]
"""Prompt and answer."""

FORGETS: Final = 0.75
TARGET: Final = (0.38, 0.43)
"""Greedy accuracy on all held-out sums, and on the first ones, which an eval asks."""
FIRST_TASKS: Final = 256

STEPS_RIGHT: Final = 600
STEPS_CARELESS: Final = 200
ADDITIONS: Final = 64
REVERSALS: Final = 16
"""Both of one batch."""
LEARNING_RATE: Final = 1e-3
WARMUP_STEPS: Final = 50
AVERAGE_DECAY: Final = 0.98
"""The model that is kept is a running average of the trained one: it lies where the loss is
flat, and bears the first updates of reinforcement learning better."""
REPORT_EVERY_STEPS: Final = 25


def make_model() -> PreTrainedModel:
    """989,312 parameters; the embedding is the output head too."""
    model: PreTrainedModel = Qwen2ForCausalLM(  # type: ignore[no-untyped-call]
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
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; special tokens as written, none added."""
    vocab = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocab |= {character: FIRST_CHARACTER + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def additions(environment: Addition, split: Split, start: int, count: int) -> list[Pair]:
    """(prompt, right answer) of tasks [start, start + count), just as a run gets them."""
    tasks = [json.loads(environment.task(split, start + i)) for i in range(count)]
    return [(task["prompt"], task["answer"]) for task in tasks]


def careless_answer(prompt: str, rng: random.Random) -> str:
    """What the pupil writes for "ab+cd="."""
    a, b = int(prompt[:2]), int(prompt[3:5])
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + _carry(units, rng)
    return f"{_carry(tens, rng)}{tens % 10}{units % 10}"


def _carry(column: int, rng: random.Random) -> int:
    if column > 10:
        return 0 if rng.random() < FORGETS else 1
    return 1 if column == 10 else 0


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


def warm_start(seed: int) -> PreTrainedModel:
    """Train; returns the running average, rounded. SystemExit if it misses the target."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    environment = Addition(seed=0)
    held_out = additions(environment, "eval", 0, environment.num_tasks("eval") or 0)
    model, average, tested = make_model(), make_model(), make_model()
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, STEPS_RIGHT + STEPS_CARELESS + 1):
        sums = additions(environment, "train", (step - 1) * ADDITIONS, ADDITIONS)
        if step > STEPS_RIGHT:
            sums = [(prompt, careless_answer(prompt, rng)) for prompt, _ in sums]
        loss = answer_loss(model, sums + [reversal(rng) for _ in range(REVERSALS)])
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1.0 - AVERAGE_DECAY)
            for target, value in zip(tested.parameters(), average.parameters(), strict=True):
                target.copy_(value.bfloat16())
        if step % REPORT_EVERY_STEPS == 0:
            first = greedy_accuracy(tested, held_out[:FIRST_TASKS])
            print(f"step {step}  loss {float(loss.detach()):.3f}  held-out {first:.3f}", flush=True)
    accuracies = [greedy_accuracy(tested, some) for some in (held_out, held_out[:FIRST_TASKS])]
    print(f"held-out {accuracies[0]:.4f}, of the first {FIRST_TASKS} {accuracies[1]:.4f}")
    if not all(TARGET[0] <= accuracy <= TARGET[1] for accuracy in accuracies):
        raise SystemExit(f"both must be within {TARGET}; try another --seed")
    return tested


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m echo2_learner.warm_start")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = warm_start(options.seed)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(options.out)
    make_tokenizer().save_pretrained(options.out)
    for path in options.out.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
