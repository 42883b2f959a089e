"""The OpenAPI 3.1 document of the gateway, generated from the store contract."""

import re
from typing import Any

import msgspec

import agl
from agl_gateway.access.worker_tokens import WORKER_TOKENS, IssuedToken, TokenRequest
from agl_gateway.store_api.contract import METHODS, Fault, Method
from agl_gateway.store_api.worker_reach import WORKER_METHODS
from agl_gateway.traffic.api import END, RATE, Rating
from agl_gateway.traffic.conversations import AGENT_HEADER, HEADER, USER_HEADER

_TOKENS = {
    "admin": "The token that `agl serve` wrote to a file.",
    "client": "AGL_CLIENT_TOKEN, for conversations.",
    "worker": "A token of `agl worker-token`, for the rollouts of one experiment.",
    "attempt": "One attempt's token, also as x-api-key.",
}
_CALLERS = "attempt client admin"
"""Scopes of the tokens that may call models; client and admin tokens may only if conversations are recorded."""

_MODEL_PATHS = {
    "/v1/chat/completions": "OpenAI chat completions, relayed and recorded.",
    "/v1/completions": "OpenAI completions, relayed and recorded.",
    "/v1/responses": "OpenAI responses, relayed and recorded.",
    "/v1/messages": "Anthropic messages, relayed and recorded.",
    "/v1/embeddings": "OpenAI embeddings, relayed and recorded.",
    "/v1beta/models/{model}:generateContent": "Google's API, translated to chat completions, relayed and recorded.",
    "/v1beta/models/{model}:streamGenerateContent": "The same, streamed: as events with `alt=sse`, else as an array.",
    "/v1beta/models/{model}:countTokens": "The tokens of a request to Google's API, estimated; not recorded.",
    "/v1/messages/count_tokens": "The tokens of an Anthropic request, by its server or estimated; not recorded.",
    "/v1/responses/input_tokens": "The tokens of a request for a response, likewise.",
    "/v1/responses/compact": "OpenAI's compaction of a conversation: the server's own, or a summary by the policy.",
}
_GETS = {
    "/": ("", "Says that a gateway is here; clients look before their first call."),
    "/v1/models": (_CALLERS, "The model names that requests may use."),
    "/v1beta/models": (_CALLERS, "The same for Google's clients."),
    "/split": ("admin", "The rewards of the served split's arms."),
    "/split/resources/{name}": (_CALLERS, "The version of a resource in the caller's arm; needs a split."),
    "/identity": (f"{_CALLERS} worker", "The ids of this gateway and its start."),
    "/metrics": ("", "Prometheus metrics."),
    "/healthz": ("", "Succeeds while calls can be recorded, in the store or in the spool."),
}
_CONVERSATION = {"name": HEADER, "in": "header", "schema": {"type": "string"}}
_USER = {"name": USER_HEADER, "in": "header", "schema": {"type": "string"}}
_AGENT = {"name": AGENT_HEADER, "in": "header", "schema": {"type": "string"}}
_SETTLE_SCHEMA = {"type": "object", "properties": {"attempt_id": {"type": "string"}}, "required": ["attempt_id"]}


def openapi_document(*, server: str = "") -> dict[str, Any]:
    """Return the gateway's OpenAPI document; a non-empty ``server`` becomes the base URL in it."""
    types = [part for method in METHODS.values() for part in (method.params, method.result)]
    schemas, components = msgspec.json.schema_components([*types, Fault], ref_template="#/components/schemas/{name}")
    pairs = zip(METHODS.values(), schemas[0:-1:2], schemas[1:-1:2], strict=True)
    paths: dict[str, Any] = {
        f"/store/{method.name}": {"post": _operation(method, params, result, schemas[-1])}
        for method, params, result in pairs
    }
    paths |= {path: {"post": _model_call(path, text)} for path, text in _MODEL_PATHS.items()}
    paths |= {path: {"get": _described(path, text, tokens)} for path, (tokens, text) in _GETS.items()}
    paths["/split/resources/{name}"]["get"]["parameters"] += [_CONVERSATION, _USER, _AGENT]
    paths |= {path: {"post": operation} for path, operation in _posts().items()}
    schemes = {name: {"type": "http", "scheme": "bearer", "description": text} for name, text in _TOKENS.items()}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "agl gateway", "version": agl.__version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
    }
    return {**document, "servers": [{"url": server}]} if server else document


def _operation(method: Method, params: Any, result: Any, fault: Any) -> dict[str, Any]:
    is_of_worker, is_of_attempt = method.name in WORKER_METHODS, method.name == "append_spans"
    return {
        "operationId": method.name,
        "summary": method.summary,
        "security": _security("admin" + " worker" * is_of_worker + " attempt" * is_of_attempt),
        "requestBody": {"required": True, "content": _content(params)},
        "responses": {
            "200": {"description": "The method's result.", "content": _content(result)},
            "default": {"description": "The reason for the refusal.", "content": _content(fault)},
        },
    }


def _content(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}, "application/msgpack": {"schema": schema}}


def _security(tokens: str) -> list[dict[str, list[str]]]:
    return [{name: []} for name in tokens.split()]


def _described(path: str, text: str, tokens: str, *, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return an OpenAPI operation with the parameters in ``path`` and, if ``content`` is given, a request body."""
    names = re.findall(r"{(\w+)}", path)
    body = {"requestBody": {"required": True, "content": content}} if content else {}
    return {
        "summary": text,
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names],
        "security": _security(tokens),
        **body,
        "responses": {"200": {"description": "OK"}},
    }


def _model_call(path: str, text: str) -> dict[str, Any]:
    answer = {"default": {"description": "The backend's answer, byte for byte; streamed if asked."}}
    return {**_described(path, text, _CALLERS, content=_json({"type": "object"})), "responses": answer}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _posts() -> dict[str, dict[str, Any]]:
    token = msgspec.json.schema_components([TokenRequest, IssuedToken])[1]
    traces = "Attach OTLP/HTTP traces (protobuf, gzip allowed) to the attempt of the token."
    settle = "Answers once every answered call of the attempt is in the store; 202 asks to ask again."
    make = "Make a token for the workers of one experiment."
    end = "End a conversation; its rollout then has succeeded. Idempotent."
    rate = "Add a person's reward to a conversation; of several, the newest counts."
    rating = msgspec.json.schema_components([Rating])[1]["Rating"]
    made = {"200": {"description": "OK", "content": _json(token["IssuedToken"])}}
    named = {**_CONVERSATION, "required": True}
    protobuf: dict[str, Any] = {"application/x-protobuf": {}}
    return {
        "/v1/traces": _described("/v1/traces", traces, "attempt admin", content=protobuf),
        "/settle": _described("/settle", settle, "attempt admin worker", content=_json(_SETTLE_SCHEMA)),
        WORKER_TOKENS: {
            **_described(WORKER_TOKENS, make, "admin", content=_json(token["TokenRequest"])),
            "responses": made,
        },
        END: {**_described(END, end, "client admin"), "parameters": [named]},
        RATE: {**_described(RATE, rate, "client admin", content=_json(rating)), "parameters": [named]},
    }
