"""Makes the shipped model `builtin:ascii-1m`: a small Qwen2 over the printable ASCII characters
that plays the text environments as a beginner does.

    python -m echo2_learner.warm_start_ascii --out DIR --seed 0

Supervised, from a random initialisation, on rollouts that scripted teachers play in the very
environments, training split only, so that formats and masks are those of a run:

- hold'em: bets without looking at the cards; its actions are allowed, and no more;
- Sokoban on 5 x 5 cells: the first moves of a shortest solution, some of them slipped;
- sums and differences of two numbers, "7 + 12 =": the right answer, for a short time.

Weights are stored in bfloat16. One thread and one seed, so that a run can be repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from echo2.types import Sampling, Span, Task, Version
from echo2_workers.environment import Completion, Environment, Rollout
from echo2_workers.environments.chat import Chat
from echo2_workers.environments.holdem import Holdem
from echo2_workers.environments.reasoning_gym import ReasoningGym
from echo2_workers.environments.sokoban import Sokoban
from echo2_workers.environments.sokoban_board import STEPS, Board

PAD, BOS, EOS = 0, 1, 2
CHARACTERS: Final = "\n" + "".join(chr(code) for code in range(32, 127))
VOCAB_SIZE: Final = 3 + len(CHARACTERS)
POSITIONS: Final = 512
SLIPS: Final = 0.2
"""Share of the Sokoban teacher's moves that are any move."""

HANDS: Final = 1500
PUZZLES: Final = 3500
SUMS: Final = 8000
TRAIN_STEPS: Final = 260
BATCH: Final = {"holdem": 8, "sokoban": 24, "sums": 64}
LEARNING_RATE: Final = 1.5e-3
WARMUP_STEPS: Final = 50
AVERAGE_DECAY: Final = 0.97
REPORT_EVERY_STEPS: Final = 25

Teacher = Callable[[str, Task], str]
"""What to say to the text so far."""


def make_model() -> PreTrainedModel:
    """997,888 parameters; the embedding is the output head too."""
    model: PreTrainedModel = Qwen2ForCausalLM(  # type: ignore[no-untyped-call]
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=512,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, <bos> first."""
    vocab = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocab |= {character: 3 + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------------------- teachers


def holdem_teacher(rng: random.Random) -> Teacher:
    """A player who does not look at his cards: mostly calls, else folds, bets or is all-in."""

    def say(text: str, task: Task) -> str:
        _, board, _, pot, to_call, stack = text.splitlines()[-1].rstrip(">").split()
        pot_chips, call_chips = int(pot), int(to_call)
        amount = 3 * call_chips if call_chips else pot_chips
        if board == "-":
            amount = 6 if call_chips <= 1 else 4 * call_chips
        bet = f"r{amount}" if amount < int(stack) else "a"
        if call_chips:
            return rng.choices(["f", "c", bet, "a"], [0.2, 0.6, 0.12, 0.08])[0]
        return rng.choices(["c", bet, "a"], [0.75, 0.17, 0.08])[0]

    return say


def sokoban_teacher(rng: random.Random, *, moves_per_turn: int) -> Teacher:
    def say(text: str, task: Task) -> str:
        rows = text.rstrip("\n").split("\n")
        height = len(json.loads(task.payload)["board"].split("\n"))
        board = Board("\n".join(rows[-height:]))
        moves = (solution(board) or rng.choice("LRUD"))[:moves_per_turn]
        return "".join(rng.choice("LRUD") if rng.random() < SLIPS else move for move in moves)

    return say


def adder(text: str, task: Task) -> str:
    a, sign, b, _ = text.split()
    return str(int(a) + int(b) if sign == "+" else int(a) - int(b))


def solution(board: Board) -> str | None:
    """A shortest solution, or None."""
    first = str(board)
    paths = {first: ""}
    frontier = [first]
    while frontier:
        reached = []
        for rows in frontier:
            for letter in STEPS:
                tried = Board(rows)
                if not tried.move(letter) or str(tried) in paths:
                    continue
                paths[str(tried)] = paths[rows] + letter
                if tried.is_solved:
                    return paths[str(tried)]
                reached.append(str(tried))
        frontier = reached
    return None


def played(environment: Environment, chat: Chat, teacher: Teacher, index: int) -> Rollout:
    """A rollout of a training task in which the teacher is the policy."""
    task = Task(index, environment.task("train", index))

    async def generate(token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        ids = (*chat.encode(teacher(chat.decode(token_ids), task)), EOS)
        spans = (Span(Version(0, 0), 0, len(ids)),)
        return Completion(ids, np.zeros(len(ids), np.float32), spans, "stop")

    return asyncio.run(environment.rollout(task, generate))


# ---------------------------------------------------------------------------- training


def rollout_loss(model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
    """Mean cross-entropy of the tokens that the teacher said."""
    longest = max(len(rollout.token_ids) for rollout in rollouts)
    tokens_BT = torch.full((len(rollouts), longest), PAD)
    targets_BT = torch.full((len(rollouts), longest), -100)
    for row, rollout in enumerate(rollouts):
        ids = torch.from_numpy(rollout.token_ids).long()
        tokens_BT[row, : len(ids)] = ids
        targets_BT[row, : len(ids)] = torch.where(torch.from_numpy(rollout.loss_mask), ids, -100)
    logits_BTV = model(tokens_BT).logits[:, :-1]
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten())


def warm_start(assets: Path, seed: int) -> PreTrainedModel:
    """Train for TRAIN_STEPS; returns the running average."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    chat = Chat(assets)
    sums = ReasoningGym(
        "chain_sum",
        assets=assets,
        generator={"max_terms": 2, "max_digits": 2},
        question_pattern=": (.*)",
    )
    card_blind = holdem_teacher(rng)
    pusher = sokoban_teacher(rng, moves_per_turn=4)
    holdem, sokoban = (
        Holdem(assets=assets, opponent="random"),
        Sokoban(assets=assets, width=5, height=5),
    )
    pools = {
        "holdem": [played(holdem, chat, card_blind, i) for i in range(HANDS)],
        "sokoban": [played(sokoban, chat, pusher, i) for i in range(PUZZLES)],
        "sums": [played(sums, chat, adder, i) for i in range(SUMS)],
    }
    print("teachers have played", flush=True)

    model, average = make_model(), make_model()
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, TRAIN_STEPS + 1):
        parts = {name: rng.sample(pool, BATCH[name]) for name, pool in pools.items()}
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.zero_grad(set_to_none=True)
        losses = {}
        for name, rollouts in parts.items():
            loss = rollout_loss(model, rollouts)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[name] = float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1.0 - AVERAGE_DECAY)
        if step % REPORT_EVERY_STEPS == 0:
            told = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(f"step {step}  {told}", flush=True)
    return average


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m echo2_learner.warm_start_ascii")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model = warm_start(Path(folder), options.seed)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    for path in options.out.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
