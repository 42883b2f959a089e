"""The OpenAPI 3.1 document of the gateway, generated from the store contract."""

from typing import Any

import msgspec

import agl
from agl_gateway.access.tokens import WORKER_TOKENS, IssuedToken, TokenRequest
from agl_gateway.store_api.contract import METHODS, Fault, Method
from agl_gateway.store_api.worker_reach import WORKER_METHODS
from agl_gateway.traffic.conversation_ids import HEADER

_ATTEMPT: list[dict[str, list[str]]] = [{"attempt": []}]
_ADMIN: list[dict[str, list[str]]] = [{"admin": []}]
_CLIENT: list[dict[str, list[str]]] = [{"client": []}]
_WORKER: list[dict[str, list[str]]] = [{"worker": []}]
_CALLERS = _ATTEMPT + _CLIENT + _ADMIN
"""The tokens that call models: the last two where the gateway records conversations."""

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

_TOKEN_SCHEMAS = msgspec.json.schema_components([TokenRequest, IssuedToken])[1]
_SETTLE_SCHEMA = {"type": "object", "properties": {"attempt_id": {"type": "string"}}, "required": ["attempt_id"]}


def openapi_document(*, server: str = "") -> dict[str, Any]:
    """Return the document as JSON; ``server`` is the base URL."""
    types = [part for method in METHODS.values() for part in (method.params, method.result)]
    schemas, components = msgspec.json.schema_components([*types, Fault], ref_template="#/components/schemas/{name}")
    pairs = zip(METHODS.values(), schemas[0:-1:2], schemas[1:-1:2], strict=True)
    paths: dict[str, Any] = {
        f"/store/{method.name}": {"post": _operation(method, params, result, schemas[-1])}
        for method, params, result in pairs
    }
    paths |= {path: {"post": _model_call(path, text)} for path, text in _MODEL_PATHS.items()}
    paths |= _other_paths()
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "agl gateway", "version": agl.__version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _security()},
    }
    return {**document, "servers": [{"url": server}]} if server else document


def _operation(method: Method, params: Any, result: Any, fault: Any) -> dict[str, Any]:
    return {
        "operationId": method.name,
        "summary": method.summary,
        "security": [
            *_ADMIN,
            *(_WORKER if method.name in WORKER_METHODS else []),
            *(_ATTEMPT if method.name == "append_spans" else []),
        ],
        "requestBody": {"required": True, "content": _content(params)},
        "responses": {
            "200": {"description": "The method's result.", "content": _content(result)},
            "default": {"description": "The reason for the refusal.", "content": _content(fault)},
        },
    }


def _content(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}, "application/msgpack": {"schema": schema}}


def _model_call(path: str, text: str) -> dict[str, Any]:
    named = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}] if "{" in path else []
    return {
        "summary": text,
        "parameters": named,
        "security": _CALLERS,
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}},
        "responses": {"default": {"description": "The backend's answer, byte for byte; streamed if asked."}},
    }


def _other_paths() -> dict[str, Any]:
    answer = {"responses": {"200": {"description": "OK"}}}
    return {
        "/": {"get": {"summary": "Says that a gateway is here; clients look before their first call.", **answer}},
        "/v1/models": {"get": {"summary": "The model names that requests may use.", "security": _CALLERS, **answer}},
        "/v1beta/models": {"get": {"summary": "The same for Google's clients.", "security": _CALLERS, **answer}},
        "/v1/traces": {
            "post": {
                "summary": "Attach OTLP/HTTP traces (protobuf, gzip allowed) to the attempt of the token.",
                "security": _ATTEMPT + _ADMIN,
                "requestBody": {"required": True, "content": {"application/x-protobuf": {}}},
                **answer,
            }
        },
        "/split": {"get": {"summary": "The rewards of the served split's arms.", "security": _ADMIN, **answer}},
        "/split/resources/{name}": {
            "get": {
                "summary": "The version of a resource in the caller's arm; needs a split.",
                "parameters": [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
                    {"name": HEADER, "in": "header", "schema": {"type": "string"}},
                ],
                "security": _CALLERS,
                **answer,
            }
        },
        "/identity": {
            "get": {
                "summary": "The ids of this gateway and its start.",
                "security": _CALLERS + _WORKER,
                **answer,
            }
        },
        "/settle": {
            "post": {
                "summary": "Answers once every answered call of the attempt is in the store; 202 asks to ask again.",
                "security": _ATTEMPT + _ADMIN + _WORKER,
                "requestBody": {"required": True, "content": {"application/json": {"schema": _SETTLE_SCHEMA}}},
                **answer,
            }
        },
        WORKER_TOKENS: {
            "post": {
                "summary": "Make a token for the workers of one experiment.",
                "security": _ADMIN,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _TOKEN_SCHEMAS["TokenRequest"]}},
                },
                "responses": {
                    "200": {
                        "description": "OK",
                        "content": {"application/json": {"schema": _TOKEN_SCHEMAS["IssuedToken"]}},
                    }
                },
            }
        },
        "/conversations/end": {
            "post": {
                "summary": "End a conversation; its rollout then has succeeded. Idempotent.",
                "parameters": [{"name": HEADER, "in": "header", "required": True, "schema": {"type": "string"}}],
                "security": _CLIENT + _ADMIN,
                **answer,
            }
        },
        "/metrics": {"get": {"summary": "Prometheus metrics.", "security": [], **answer}},
        "/healthz": {"get": {"summary": "Succeeds if the gateway's store answers.", "security": [], **answer}},
    }


def _security() -> dict[str, Any]:
    return {
        "admin": {"type": "http", "scheme": "bearer", "description": "The token that `agl serve` wrote to a file."},
        "client": {
            "type": "http",
            "scheme": "bearer",
            "description": "AGL_CLIENT_TOKEN, for conversations.",
        },
        "worker": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token of `agl worker-token`, for the rollouts of one experiment.",
        },
        "attempt": {"type": "http", "scheme": "bearer", "description": "One attempt's token, also as x-api-key."},
    }
