"""The HTTP routes of the server.

The routes are those of version 0.38 of the published client. A client's route that this server lacks is refused with a
message that names it. The key is checked before a body is read.
"""

import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from aiohttp import web
from pydantic import BaseModel
from tinker import types

from agl.errors import AglError
from agl_algo_torch.serving.hosting import read_adapter
from agl_tinker.server.checkpoints import Checkpoint
from agl_tinker.server.losses import LOSSES
from agl_tinker.server.problems import RefusedError, not_offered
from agl_tinker.server.service import TinkerService
from agl_tinker.server.wire import read_json, read_training

_LOG = logging.getLogger("agl_tinker")
_API = "/api/v1"
_PROTO = "application/x-protobuf"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
M = TypeVar("M", bound=BaseModel)


class TinkerApp:
    """The HTTP handlers of a service.

    Args:
        service: The service, which is closed with the application.
        key: The API key that clients must send.
        most_bytes: The size of the largest accepted body.
    """

    def __init__(self, service: TinkerService, *, key: str, most_bytes: int) -> None:
        self._service, self._key, self._most_bytes = service, key.encode(), most_bytes

    def app(self) -> web.Application:
        """Return the web application with all routes."""
        app = web.Application(client_max_size=self._most_bytes, middlewares=[_refusals, self._check_key])
        app.on_cleanup.append(self._close)
        for path, handler in self._posts().items():
            app.router.add_post(f"{_API}/{path}", handler)
        for path, handler in self._gets().items():
            app.router.add_get(f"{_API}/{path}", handler)
        app.router.add_delete(f"{_API}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}", self._delete)
        app.router.add_route("*", "/{path:.*}", _unknown)
        return app

    def _posts(self) -> dict[str, Handler]:
        service = self._service
        return {
            # One part of a batch after the other: the queue here is in order of arrival.
            "client/config": _always({"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False}),
            "client/dynamic_config": _always({"sample_cancel_enabled": True}),
            "create_session": self._create_session,
            "session_heartbeat": _always({"type": "session_heartbeat"}),
            "sessions/{session}/finish": _always({}),
            "telemetry": _always({"status": "accepted"}),
            "create_model": _promising(types.CreateModelRequest, service.create_model),
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": _promising(types.OptimStepRequest, service.optim_step),
            "save_weights": _promising(types.SaveWeightsRequest, service.save_weights),
            "save_weights_for_sampler": _promising(types.SaveWeightsForSamplerRequest, service.save_for_sampler),
            "load_weights": _promising(types.LoadWeightsRequest, service.load_weights),
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }

    def _gets(self) -> dict[str, Handler]:
        return {
            "healthz": _always({"status": "ok"}),
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
            "training_runs/{run}/checkpoints": self._checkpoints,
        }

    async def _close(self, _app: web.Application) -> None:
        await self._service.close()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("x-api-key", "").encode("utf-8", "replace")
        if request.path != f"{_API}/healthz" and not hmac.compare_digest(sent, self._key):
            raise RefusedError(
                "This server answers requests with its API key alone; give it as TINKER_API_KEY.", status=401
            )
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RefusedError("This server reads no compressed requests.", status=415)
        return await handler(request)

    async def _capabilities(self, _request: web.Request) -> web.Response:
        model = {
            "model_name": self._service.name,
            "max_context_length": self._service.model.context_length,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model], "losses": list(LOSSES)})

    async def _create_session(self, request: web.Request) -> web.Response:
        read_json(await request.read(), types.CreateSessionRequest)
        return web.json_response({"type": "create_session", "session_id": uuid.uuid4().hex})

    async def _get_info(self, request: web.Request) -> web.Response:
        found = self._service.run_of(read_json(await request.read(), types.GetInfoRequest).model_id)
        data = {"arch": "", "model_name": self._service.name, "tokenizer_id": self._service.model.path}
        return web.json_response(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": found.run,
                "is_lora": True,
                "lora_rank": found.trainee.adapter.rank,
                "model_name": self._service.name,
            }
        )

    async def _forward_backward(self, request: web.Request) -> web.Response:
        if request.content_type != _PROTO:
            raise RefusedError(f"forward_backward is sent as {_PROTO}; use tinker 0.38 or later.", status=415)
        return _promised(self._service.forward_backward(read_training(await request.read())))

    async def _weights_info(self, request: web.Request) -> web.Response:
        path = (await _object(request)).get("tinker_path", "")
        kind = "sampler_weights" if "/sampler_weights/" in str(path) else "weights"
        adapter = read_adapter(self._service.checkpoints.find(str(path), kind).folder)
        return web.json_response(
            {
                "base_model": self._service.name,
                "is_lora": True,
                "lora_rank": adapter.rank,
                "train_unembed": adapter.head,
                "train_mlp": adapter.mlp,
                "train_attn": adapter.attention,
            }
        )

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        body = read_json(await request.read(), types.CreateSamplingSessionRequest)
        session = self._service.sampling_session(base_model=body.base_model, model_path=body.model_path)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": session})

    async def _sampler(self, request: web.Request) -> web.Response:
        sampler = request.match_info["sampler"]
        found = self._service.weights_of(sampler)
        path = found.path if found is not None else None
        return web.json_response({"sampler_id": sampler, "base_model": self._service.name, "model_path": path})

    async def _sample(self, request: web.Request) -> web.Response:
        promise, sequences = self._service.sample(read_json(await request.read(), types.SampleRequest))
        return web.json_response({"request_id": promise, "sample_sequence_ids": sequences})

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = read_json(await request.read(), types.FutureRetrieveRequest)
        result = await self._service.promises.wait(body.request_id)
        if result is None:
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return web.json_response(waiting, status=408)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=_PROTO)
        return web.json_response(result)

    async def _cancel(self, request: web.Request) -> web.Response:
        self._service.promises.cancel(str((await _object(request)).get("request_id", "")))
        return web.json_response({})

    async def _checkpoints(self, request: web.Request) -> web.Response:
        found = [_described(one) for one in self._service.checkpoints.of(request.match_info["run"])]
        return web.json_response({"checkpoints": found})

    async def _delete(self, request: web.Request) -> web.Response:
        run, kind, name = (request.match_info[part] for part in ("run", "kind", "name"))
        wanted = "sampler_weights" if kind == "sampler_weights" else "weights"
        self._service.checkpoints.remove(self._service.checkpoints.find(f"tinker://{run}/{kind}/{name}", wanted))
        return web.json_response({})


def _described(one: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{one.kind}/{one.name}",
        "checkpoint_type": "training" if one.kind == "weights" else "sampler",
        "time": datetime.fromtimestamp(one.created, UTC).isoformat(),
        "tinker_path": one.path,
        "size_bytes": sum(file.stat().st_size for file in one.folder.rglob("*") if file.is_file()),
    }


def _promising(kind: type[M], begin: Callable[[M], str]) -> Handler:
    """Return a handler that parses a request as ``kind``, starts its work, and answers with the id of the promise."""

    async def handler(request: web.Request) -> web.Response:
        return _promised(begin(read_json(await request.read(), kind)))

    return handler


def _promised(request_id: str) -> web.Response:
    return web.json_response({"request_id": request_id})


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        found: Any = await request.json()
    except ValueError as error:
        raise RefusedError("The request's body is not JSON.") from error
    if not isinstance(found, dict):
        raise RefusedError("The request's body is not a JSON object.")
    return cast("dict[str, Any]", found)


def _always(answer: dict[str, Any]) -> Handler:
    """Return a handler that always gives the same answer."""

    async def handler(_request: web.Request) -> web.Response:
        return web.json_response(answer)

    return handler


async def _unknown(request: web.Request) -> web.StreamResponse:
    raise RefusedError(str(not_offered(f"{request.method} {request.path}")), status=404)


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every failure as JSON with its reason."""
    try:
        return await handler(request)
    except RefusedError as error:
        return web.json_response({"detail": str(error)}, status=error.status)
    except web.HTTPException as error:
        return web.json_response({"detail": f"{request.method} {request.path}: {error.reason}."}, status=error.status)
    except AglError as error:
        return web.json_response({"detail": str(error)}, status=422)
    except Exception as error:  # noqa: BLE001 - isolation point: one request's failure is that request's answer
        _LOG.exception("the request %s failed", request.path)
        return web.json_response({"detail": f"{type(error).__name__}: {error}."}, status=500)
