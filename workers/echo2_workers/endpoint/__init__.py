"""A rollout as an OpenAI endpoint, for agents and environments written for a `base_url`.

`serve_openai` serves one rollout, `AgentEnvironment` is an environment made of an agent.
docs/openai_endpoint.md tells what is served, and how calls become trajectories.
"""

from echo2_workers.endpoint.agent import AgentEnvironment
from echo2_workers.endpoint.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from echo2_workers.endpoint.conversation import Branch
from echo2_workers.endpoint.errors import ApiError
from echo2_workers.endpoint.server import serve_openai
from echo2_workers.endpoint.session import OpenAISession
from echo2_workers.endpoint.tools import HermesTools, Parsed, ToolCall, ToolFormat

__all__ = [
    "AgentEnvironment",
    "ApiError",
    "Branch",
    "ChatTokenizer",
    "HermesTools",
    "OpenAISession",
    "Parsed",
    "ToolCall",
    "ToolFormat",
    "load_chat_tokenizer",
    "serve_openai",
]
