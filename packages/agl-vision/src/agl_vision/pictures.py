"""Decodes pictures within bounds: a request of a few kilobytes must not take gigabytes of memory."""

from __future__ import annotations

import struct
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

LARGEST = 2**25
"""Most pixels of a picture; decoded, they take 96 MiB."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, struct.error, Image.DecompressionBombError)


def decode(data: bytes) -> Image.Image:
    """Return a picture in RGB, turned upright; the first frame of an animation.

    Raises:
        ValueError: The data is not a whole PNG, JPEG, WebP or GIF file, or the picture has more than `LARGEST` pixels.
    """
    try:
        picture = Image.open(BytesIO(data), formats=FORMATS)
        if picture.width * picture.height <= LARGEST:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except UnidentifiedImageError:
        raise ValueError("A picture is not a PNG, JPEG, WebP or GIF file. Convert it to one of these.") from None
    except (*_BROKEN, Image.DecompressionBombWarning) as error:
        raise ValueError(f"A picture is damaged or too large: {error}. Send a whole file.") from error
    raise ValueError(
        f"A picture has {picture.width} by {picture.height} pixels, more than the {LARGEST:,} that are read. Shrink it."
    )
