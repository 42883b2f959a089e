"""The shop's help desk: the agent behind a gateway, as an application would call it.

For every conversation the desk asks the gateway for the prompt, because the gateway decides who gets which version. It
passes the ids of conversation and customer with each call, and what the customer reported.
"""

from typing import Any

import httpx
from agent import Message, reply


class Desk:
    """Answers customers through the gateway at `url`; use it as an async context manager."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30)

    async def __aenter__(self) -> "Desk":
        """Return the desk itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def answer(self, messages: list[Message], *, conversation: str, customer: str) -> str:
        """Answer the last message of a conversation."""
        headers = headers_of(conversation, customer)
        found = (await self._http.get("/split/resources/answer_prompt", headers=headers)).raise_for_status().json()
        return await reply(messages, found["resource"]["template"], headers)

    async def rate(self, value: float, words: str, *, conversation: str, customer: str) -> None:
        """Report a customer's thumb, 1 or 0, and words."""
        body = {"value": value, "feedback": words}
        await self._post("/conversations/rate", body, headers_of(conversation, customer))

    async def end(self, *, conversation: str, customer: str) -> None:
        """End a conversation."""
        await self._post("/conversations/end", {}, headers_of(conversation, customer))

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        (await self._http.post(path, json=body, headers=headers)).raise_for_status()


def headers_of(conversation: str, customer: str) -> dict[str, str]:
    """Return the headers by which the gateway knows a conversation and a customer."""
    return {"x-agl-conversation-id": conversation, "x-agl-user-id": customer}
