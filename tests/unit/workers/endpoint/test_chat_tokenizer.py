"""Templates and tokenizers of a model's folder, tool calls in text, and agents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import ConfigError
from echo2.types import Sampling, Task
from echo2_workers.endpoint import (
    AgentEnvironment,
    ApiError,
    ChatTokenizer,
    HermesTools,
    Parsed,
    ToolCall,
    load_chat_tokenizer,
)
from echo2_workers.endpoint.chat_template import ChatTemplate
from echo2_workers.environment import Completion, Split
from echo2_workers.models import model_folder
from echo2_workers.tokenizer import BOS, EOS, encode

NO_MORE: dict[str, Any] = {"tools": [], "generation_prompt": False, "arguments": {}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def characters() -> ChatTokenizer:
    """That of the shipped model, which has no chat template."""
    return load_chat_tokenizer(model_folder("builtin:addition-1m"))


# ------------------------------------------------------------------------------ tokenizer


def test_a_model_without_a_template_gets_the_contents_one_after_the_other(
    characters: ChatTokenizer,
) -> None:
    assert characters.template.is_plain
    assert characters.eos_ids == {EOS}
    prompt = characters.render([user("07+"), user("45=")], [], {})
    assert characters.encode(prompt) == [BOS, *encode("07+45=")]
    more = characters.render_after(
        [user("1+1=")], {"role": "assistant", "content": "3"}, [user("\n1+2=")], [], {}
    )
    assert more == "\n1+2="
    assert characters.decode([*encode("052"), EOS]) == "052"


def test_text_without_a_token_is_refused_not_replaced(characters: ChatTokenizer) -> None:
    with pytest.raises(ApiError, match=r"no token for 'x' \(it would become <pad>\)"):
        characters.encode("1+x=")
    assert characters.encode("<pad>1") == [0, *encode("1")]


def test_a_turn_that_is_rendered_in_another_way_later_cannot_be_continued() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}.{% endif %}{% endfor %}"
    )
    tokenizer = ChatTokenizer(Any, ChatTemplate({"default": source}, {}), eos_ids=[])  # type: ignore[arg-type]
    answer = {"role": "assistant", "content": "x"}
    assert tokenizer.render_after([user("a")], answer, [user("b")], [], {}) is None


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "the run has no assets"),
        ({}, "holds no tokenizer.json"),
        ({"tokenizer.json": "{}"}, "is not a tokenizer"),
    ],
)
def test_a_folder_without_a_tokenizer_says_what_to_do(
    tmp_path: Path, files: dict[str, str] | None, said: str
) -> None:
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_chat_tokenizer(None if files is None else tmp_path)


def test_template_and_ends_come_from_the_files_of_the_model(
    tmp_path: Path, chat_assets: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((chat_assets / "tokenizer.json").read_bytes())
    templates = [
        {"name": "default", "template": "plain {{ bos_token }}"},
        {"name": "tool_use", "template": "{{ tools | tojson }} {{ strftime_now('%Y')|length }}"},
    ]
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "chat_template": templates,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    tokenizer = load_chat_tokenizer(tmp_path)
    assert tokenizer.eos_ids == {7, 8, 258}
    assert tokenizer.render([user("a")], [], {}) == "plain <|im_start|>"
    assert tokenizer.render([user("a")], [{"é": 1}], {}) == '[{"é": 1}] 4'
    (tmp_path / "chat_template.jinja").write_text("{% generation %}g{% endgeneration %}")
    assert load_chat_tokenizer(tmp_path).render([user("a")], [], {}) == "g"


def test_a_template_is_kept_in_its_sandbox_and_may_refuse() -> None:
    refusing = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {})
    with pytest.raises(ApiError, match="roles must alternate"):
        refusing.render([user("a")], **NO_MORE)
    curious = ChatTemplate({"default": "{{ messages.__class__.__mro__ }}"}, {})
    with pytest.raises(ApiError, match="unsafe"):
        curious.render([user("a")], **NO_MORE)
    with pytest.raises(ConfigError, match="not valid"):
        ChatTemplate({"default": "{% if %}"}, {}).render([user("a")], **NO_MORE)


def test_the_endpoint_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, echo2_workers.endpoint as e\n"
        "from echo2_workers.models import model_folder\n"
        "e.load_chat_tokenizer(model_folder('builtin:addition-1m')).render([], [], {})\n"
        "assert not {'torch', 'transformers', 'openai'} & set(sys.modules), sys.modules.keys()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


# ---------------------------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("no call", Parsed("no call")),
        (
            'a <tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call> b',
            Parsed("a  b", (ToolCall("f", '{"x": "é"}'),)),
        ),
        (
            '<tool_call>\n{"name":"f"}\n</tool_call><tool_call>{"name":"g","arguments":"[1]"}'
            "</tool_call>",
            Parsed("", (ToolCall("f", "{}"), ToolCall("g", "[1]"))),
        ),
        ("<tool_call>{not json}</tool_call>", Parsed("<tool_call>{not json}</tool_call>")),
        ("<tool_call>[1]</tool_call> ", Parsed("<tool_call>[1]</tool_call> ")),
        ('<tool_call>{"name": "f"', Parsed('<tool_call>{"name": "f"')),
    ],
)
def test_calls_are_found_in_text_and_what_is_no_call_stays(text: str, parsed: Parsed) -> None:
    assert HermesTools().parse(text) == parsed


def test_calls_are_written_back_for_a_template_that_knows_no_tools() -> None:
    calls = (ToolCall("f", '{"x": 1}'), ToolCall("g", "{}"))
    assert HermesTools().parse(HermesTools().render(calls)).calls == calls
    assert '{"name": "add"}' in HermesTools().describe([{"name": "add"}])


# --------------------------------------------------------------------------------- agents


class Echoing(AgentEnvironment):
    """One question; the reward is the number that the policy says."""

    name, version = "echoing", "1"

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        return json.dumps({"question": "1+1="})


class Blocking(Echoing):
    def agent(self, client: Any, task: Task) -> float:
        question = json.loads(task.payload)["question"]
        answer = client.chat.completions.create(model="m", messages=[user(question)])
        return float(answer.choices[0].message.content)


class Awaiting(Echoing):
    async def agent(self, client: Any, task: Task) -> float:
        question = json.loads(task.payload)["question"]
        answer = await client.chat.completions.create(model="m", messages=[user(question)])
        return float(answer.choices[0].message.content)


@pytest.mark.parametrize("kind", [Blocking, Awaiting])
async def test_an_agent_plays_with_a_client_and_gives_the_reward(kind: Any) -> None:
    pytest.importorskip("openai")
    environment = kind(assets=model_folder("builtin:addition-1m"))

    async def generate(token_ids: Any, sampling: Sampling | None = None) -> Completion:
        assert token_ids == [BOS, *encode("1+1=")]
        return Completion((*encode("42"), EOS), [-0.1] * 3, (), "stop")  # type: ignore[arg-type]

    rollout = await environment.rollout(Task(0, environment.task("train", 0)), generate)
    assert rollout.reward == 42.0
    assert rollout.token_ids.tolist() == [BOS, *encode("1+1=42"), EOS]
    with pytest.raises(OSError, match="disk"):
        await environment.rollout(Task(0, environment.task("train", 0)), _failing)


async def _failing(token_ids: Any, sampling: Sampling | None = None) -> Completion:
    raise OSError("disk")
