"""Pictures of theory_lab.figures as bytes that fit into a page."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path

from theory_lab.errors import InputError

#: Pixels of a picture that is taken up into a report: far more than any that is drawn here.
MOST_PIXELS = 1 << 26


def require_matplotlib() -> None:
    """Raise InputError if pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError:
        raise InputError("html", "matplotlib is not installed", "pip install 'theory-lab[report]'") from None


def draw(plot: Callable[[str], None]) -> tuple[bytes, str]:
    """Draw to a file and take it up.

    Parameters
    ----------
    plot : callable
        Given a path ending in .png, draws there.

    Returns
    -------
    content : bytes
        The picture; empty if there is none.
    why : str
        Why there is none.
    """
    with tempfile.TemporaryDirectory(prefix="theory-lab-report-") as folder:
        path = Path(folder) / "picture.png"
        try:
            plot(str(path))
        except InputError as error:  # rows that have no picture do not cost the reader the rest
            return b"", f"No picture: {error}."
        return shrink(path.read_bytes()), ""


def shrink(content: bytes) -> bytes:
    """The same PNG with at most 256 colors, a third of the size; what would not gain stays as it is.

    Raises
    ------
    ValueError
        If it is no PNG, or larger than any picture of ours.
    """
    from PIL import Image

    # Of all that Pillow reads, PNG alone: what says it is PostScript would be handed to Ghostscript.
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"at most {MOST_PIXELS:,} pixels are allowed")
        if image.mode == "RGBA":
            # A page's background may be dark; a figure's is white.
            flat = Image.new("RGB", image.size, "white")
            flat.paste(image, mask=image.getchannel("A"))
        else:
            flat = image.convert("RGB")
        small = io.BytesIO()
        flat.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            small, "PNG", optimize=True
        )
    return min(small.getvalue(), content, key=len)
