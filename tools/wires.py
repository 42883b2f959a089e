"""Wires between networks that delay and lose packets, for a kernel whose ``tc`` has no netem.

Both ends of a wire are TAP devices that exist already; this program carries what one sends to the other. It is run as
``python -m tools.wires DELAY_S LOSS NAMESPACE:DEVICE NAMESPACE:DEVICE ...``, two ends for each wire, and ends with its
standard input. Only what the first end of a wire sends is delayed and lost, as with netem on one end of a link.
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

from tools.networks import enter

ATTACH = 0x400454CA
"""The request ``TUNSETIFF``."""

TAP_WITHOUT_HEADER = 0x0002 | 0x1000

FRAME = 1 << 16


def plug_in(end: str) -> int:
    """Attach to a TAP device, named ``NAMESPACE:DEVICE``; returns the file of its frames."""
    namespace, _, device = end.partition(":")
    enter(namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, ATTACH, struct.pack("16sH", device.encode(), TAP_WITHOUT_HEADER))
    return tap


def carry(wires: list[tuple[int, int]], *, delay_s: float, loss: float) -> None:
    """Carry frames until the standard input ends."""
    others = {one: other for pair in wires for one, other in (pair, pair[::-1])}
    late = {slow for slow, _ in wires}
    waiting: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    for end in (*others, sys.stdin.fileno()):
        poll.register(end, select.POLLIN)
    while True:
        pause_ms = max(0.0, waiting[0][0] - time.monotonic()) * 1000 if waiting else None
        ready = [end for end, _ in poll.poll(pause_ms)]
        if sys.stdin.fileno() in ready:
            return
        for end in ready:
            for frame in _frames(end):
                if end not in late:
                    _send(others[end], frame)
                elif random.random() >= loss:
                    waiting.append((time.monotonic() + delay_s, others[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            _send(end, frame)


def _frames(end: int) -> list[bytes]:
    """Return the frames that have arrived, at most as many as do not keep others waiting."""
    found: list[bytes] = []
    with suppress(OSError):  # no more at present, or the device is down
        while len(found) < 64:
            found.append(os.read(end, FRAME))
    return found


def _send(end: int, frame: bytes) -> None:
    with suppress(OSError):  # a device that is down loses it
        os.write(end, frame)


def main() -> None:
    """Run the program."""
    delay_s, loss, *ends = sys.argv[1:]
    taps = [plug_in(end) for end in ends]
    print("plugged in", flush=True)
    carry(list(zip(taps[::2], taps[1::2], strict=True)), delay_s=float(delay_s), loss=float(loss))


if __name__ == "__main__":
    main()
