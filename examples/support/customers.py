"""Scripted customers of the help desk: `python customers.py --wish link --count 200`.

Each customer has two conversations. One in twelve reacts at random. Of the others, those who got what they wish for
often give a thumb up, and those who did not give a thumb down with words, correct the agent, ask again or just leave.
"""

import argparse
import asyncio
import os
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from desk import Desk
from shop import PAGES, WISHES, wishes_harm

GATEWAY = "http://127.0.0.1:8791"
TOKEN = "the-client-token-of-the-example"
AT_ONCE = 4
PAUSE_S = 0.3
EVERY = 25
NEWEST = 50


class Visit(NamedTuple):
    """One conversation that a customer begins."""

    customer: str
    number: int
    wish: Callable[[str], str]
    draw: random.Random

    async def at(self, desk: Desk) -> bool:
        """Ask the desk, react to the answer, and return whether the customer got what they wished for."""
        ids = {"conversation": f"{self.customer}-{self.number}", "customer": self.customer}
        question = self.draw.choice(self.draw.choice(PAGES).questions)
        answer = await desk.answer([("user", question)], **ids)
        complaint = self.wish(answer)
        if self.draw.random() < 1 / 12:
            await desk.rate(float(self.draw.random() < 0.5), "", **ids)
        elif self.wish is wishes_harm or self.draw.random() < 0.6:
            await desk.rate(float(not complaint), complaint, **ids)
        elif complaint and self.draw.random() < 0.8:
            again = f"No, I meant: {complaint}" if self.draw.random() < 0.6 else question
            messages: list[tuple[str, str]] = [("user", question), ("assistant", answer), ("user", again)]
            await desk.answer(messages, **ids)
        await desk.end(**ids)
        return not complaint


async def play(desk: Desk, *, wish: str, count: int, saboteurs: float, seed: int) -> None:
    """Play `count` conversations, or play for ever with a count of 0, and print the share of content customers."""
    content: deque[bool] = deque(maxlen=NEWEST)
    started = done = 0

    async def visits() -> None:
        nonlocal started, done
        while not count or started < count:
            number, started = started, started + 1
            draw = random.Random(f"{seed}-{number}")
            is_bad = draw.random() < saboteurs
            customer = f"guest-{seed}-{number}" if is_bad else f"customer-{seed}-{number // 2}"
            visit = Visit(customer, number, wishes_harm if is_bad else WISHES[wish], draw)
            is_content = await visit.at(desk)
            await asyncio.sleep(PAUSE_S)  # ten customers a second are enough
            done += 1
            if not is_bad:
                content.append(is_content)
            if done % EVERY == 0:
                print(f"{done} conversations, {sum(content) / len(content):.0%} of the newest content", flush=True)

    await asyncio.gather(*(visits() for _ in range(AT_ONCE)))


async def main() -> None:
    """Play the customers that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wish", choices=WISHES, required=True)
    parser.add_argument("--count", type=int, default=0, help="the number of conversations; 0 for no end")
    parser.add_argument("--saboteurs", type=float, default=0.0, help="share of conversations that wish harm")
    parser.add_argument("--seed", type=int, default=0, help="each seed has customers of its own")
    given = parser.parse_args()
    os.environ |= {"OPENAI_BASE_URL": f"{GATEWAY}/v1", "OPENAI_API_KEY": TOKEN}
    async with Desk(GATEWAY, TOKEN) as desk:
        await play(desk, wish=given.wish, count=given.count, saboteurs=given.saboteurs, seed=given.seed)


if __name__ == "__main__":
    asyncio.run(main())
