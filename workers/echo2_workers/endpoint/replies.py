"""Answers in OpenAI's form: whole, or as the events of a stream.

A stream carries the same in pieces: the policy's turn is sampled in one go, so its text comes
in one piece, and each tool call in one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from echo2_workers.endpoint.chat_tokenizer import ChatTokenizer
from echo2_workers.endpoint.requests import ChatRequest, TextRequest
from echo2_workers.endpoint.session import Answer

Reply = dict[str, Any]
DONE = "data: [DONE]\n\n"


def chat_reply(answer: Answer, request: ChatRequest, tokenizer: ChatTokenizer) -> Reply:
    message: Reply = {
        "role": "assistant",
        "content": answer.text or (None if answer.parsed.calls else ""),
        "refusal": None,
    }
    if answer.parsed.calls:
        message["tool_calls"] = _tool_calls(answer)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _chat_logprobs(answer, tokenizer) if request.logprobs else None,
        "finish_reason": answer.finish,
    }
    return {
        **_head("chat.completion", answer, request),
        "choices": [choice],
        "usage": _usage(answer),
    }


def chat_chunks(answer: Answer, request: ChatRequest, tokenizer: ChatTokenizer) -> Iterator[Reply]:
    head = _head("chat.completion.chunk", answer, request)
    logprobs = _chat_logprobs(answer, tokenizer) if request.logprobs else None

    def chunk(delta: Reply, finish: str | None = None, logprobs: Reply | None = None) -> Reply:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**head, "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if answer.text:
        yield chunk({"content": answer.text}, logprobs=logprobs)
        logprobs = None
    for index, call in enumerate(_tool_calls(answer)):
        yield chunk({"tool_calls": [{"index": index, **call}]}, logprobs=logprobs)
        logprobs = None
    yield chunk({}, answer.finish, logprobs)
    if request.wants_usage:
        yield {**head, "choices": [], "usage": _usage(answer)}


def text_reply(answer: Answer, request: TextRequest, tokenizer: ChatTokenizer) -> Reply:
    choice = {
        "index": 0,
        "text": answer.text,
        "logprobs": None if request.logprobs is None else _text_logprobs(answer, tokenizer),
        "finish_reason": answer.finish,
    }
    return {
        **_head("text_completion", answer, request),
        "choices": [choice],
        "usage": _usage(answer),
    }


def text_chunks(answer: Answer, request: TextRequest, tokenizer: ChatTokenizer) -> Iterator[Reply]:
    whole = text_reply(answer, request, tokenizer)
    usage = whole.pop("usage")
    yield whole
    if request.wants_usage:
        yield {**whole, "choices": [], "usage": usage}


def models_reply() -> Reply:
    """One model, whatever name the agent calls it by."""
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "echo2"}
    return {"object": "list", "data": [model]}


def event(reply: Reply) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(reply, ensure_ascii=False)}\n\n"


def _head(kind: str, answer: Answer, request: ChatRequest | TextRequest) -> Reply:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {
        "id": f"{prefix}-{answer.call.index}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _usage(answer: Answer) -> Reply:
    sampled = len(answer.completion.token_ids)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.num_prompt_tokens + sampled,
    }


def _tool_calls(answer: Answer) -> list[Reply]:
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call_id, call in zip(answer.call_ids, answer.parsed.calls, strict=True)
    ]


def _sampled(answer: Answer, tokenizer: ChatTokenizer) -> Iterator[tuple[str, float]]:
    completion = answer.completion
    for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        yield tokenizer.token_text(token_id), float(logprob)


def _chat_logprobs(answer: Answer, tokenizer: ChatTokenizer) -> Reply:
    """Of every sampled token, the one that ended the turn too."""
    return {
        "content": [
            {
                "token": text,
                "logprob": logprob,
                # half a character has no text of its own, so its bytes are not known here
                "bytes": None if "\ufffd" in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, logprob in _sampled(answer, tokenizer)
        ],
        "refusal": None,
    }


def _text_logprobs(answer: Answer, tokenizer: ChatTokenizer) -> Reply:
    texts = [text for text, _ in _sampled(answer, tokenizer)]
    offsets, end = [], 0
    for text in texts:
        offsets.append(end)
        end += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob in _sampled(answer, tokenizer)],
        "top_logprobs": None,
        "text_offset": offsets,
    }
