"""Registers the gateway, the HTTP store and the commands by import path, without importing them."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry, GatewayEntry, RedactorEntry, StoreEntry


@hookimpl
def agl_gateways() -> Iterable[GatewayEntry]:
    """Registers the capture proxy that runs with an experiment."""
    yield GatewayEntry(
        name="gateway",
        factory="agl_gateway.embedded:EmbeddedGateway",
        summary="capture proxy with real streaming, in its own thread",
    )


@hookimpl
def agl_redactors() -> Iterable[RedactorEntry]:
    """Registers the built-in redactor."""
    yield RedactorEntry(
        name="patterns",
        factory="agl_gateway.record.redaction:Patterns",
        summary="replaces e-mail addresses, telephone numbers, card numbers and keys",
    )


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """Registers the store of a running ``agl serve``."""
    for scheme in ("http", "https"):
        yield StoreEntry(name=scheme, factory="agl_gateway.client:HttpStore", summary="the store behind `agl serve`")


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Registers ``agl serve``, ``agl worker-token``, ``agl doctor``, ``agl resources split`` and ``variant``."""
    yield CommandEntry(
        name="serve", factory="agl_gateway.cli.serve:serve", summary="serve a store and a gateway to other processes"
    )
    yield CommandEntry(
        name="worker-token",
        factory="agl_gateway.cli.worker_token:worker_token",
        summary="make a token for the workers of one experiment",
    )
    yield CommandEntry(
        name="doctor", factory="agl_gateway.cli.doctor:doctor", summary="check a deployment and report faults"
    )
    yield CommandEntry(
        name="split",
        parent="resources",
        factory="agl_gateway.cli.split:split_",
        summary="Report the rewards of a serving split's arms.",
    )
    yield CommandEntry(
        name="variant",
        parent="resources",
        factory="agl_gateway.cli.split:variant",
        summary="Give a user or an agent its own version, or list these.",
    )
