"""Names that Kubernetes and Docker accept, made from names of experiments."""

import hashlib
import re

LONGEST = 30
"""Characters of a name, so that Kubernetes' limit of 63 has room for what a chart appends."""

_VALID = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def deployed_name(text: str) -> str:
    """Return a DNS label of at most 30 characters: ``text`` itself where it is one.

    Any other text is simplified and gets eight hexadecimal digits of its hash, so that the same text always gives the
    same name, and two texts that look alike after that give two.
    """
    if _VALID.fullmatch(text) and len(text) <= LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"agl-{plain}"
    return f"{plain[: LONGEST - 9].strip('-')}-{digest}"
