"""Renders views as HTML; everything that agents and models wrote is escaped, with invisible characters shown."""

import math
import time
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agl.contracts import Moments
from agl.errors import AglError, ConfigError, NotFoundError
from agl.hints import count_of
from agl.schemas import Attempt, Record, to_json
from agl_console.figures import HEIGHT, WIDTH, Line, sparks, step_at
from agl_console.learning import LABELS
from agl_console.reading import TAG
from agl_console.views import View
from agl_inspect.advice.suggestions import VALIDATE
from agl_inspect.text import ends, parts_text, visible

_NONE = "\N{EN DASH}"
"""The text that is shown for an unknown number or time."""


class Pages:
    """Renders the templates of this package.

    Args:
        store: The store's address as shown on every page, without credentials.
    """

    def __init__(self, store: str) -> None:
        self._templates = Environment(
            loader=PackageLoader("agl_console"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_inert,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(number=number, probability=probability, clock=clock, seconds=seconds, data=data)
        self._templates.filters.update(
            dict[str, Any](ends=ends, quantity=count_of, ago=ago, spark=spark, words=words, tagged=TAG.split)
        )
        self._templates.filters.update(
            dict[str, Any](mean=mean, parts=parts_text, stepped=stepped, step_at=step_at, lasted=lasted)
        )
        self._templates.globals["link"] = link
        self._store = store

    def view(self, view: View, here: str, visitor: str = "") -> str:
        """Render a view; ``here`` is the path and query of its address.

        ``visitor`` is ``signed`` if actions are offered, ``guest`` if sign-in is offered, and empty on a console that
        only reads.
        """
        return self.render(view.template, view=view.data, here=here, visitor=visitor)

    def export(self, view: Record, written_at: float) -> str:
        """Render a run's numbers as a self-contained file; ``written_at`` is in Unix seconds."""
        style, script = _static("uPlot.min.css", "console.css"), _static("uPlot.iife.min.js", "console.js")
        template = self._templates.get_template("export.html")
        return template.render(view=view, written_at=written_at, style=style, script=script)

    def error(self, title: str, message: str, visitor: str = "") -> str:
        """Render an error page that says why there is no view, and what to do."""
        return self.render("error.html", title=title, message=message, visitor=visitor)

    def render(self, template: str, **given: Any) -> str:
        """Render a template with the given variables; for ``visitor`` see :meth:`view`."""
        return self._templates.get_template(template).render(store=self._store, **given)


def page_response(text: str, *, status: int = 200) -> web.Response:
    """Answer with an HTML page that caches do not store."""
    body = text.encode("utf-8", "replace")
    return web.Response(
        status=status, body=body, content_type="text/html", charset="utf-8", headers={"Cache-Control": "no-store"}
    )


def status_of(error: AglError) -> tuple[int, str]:
    """Return the HTTP status and the title of the answer to an error."""
    if isinstance(error, NotFoundError):
        return 404, "Not found"
    if isinstance(error, ConfigError):
        return 400, "This address has no view"
    return 503, "The store did not answer"


def _static(*names: str) -> Markup:
    """Read files of this package for embedding into a page, unescaped."""
    folder = files("agl_console") / "static"
    return Markup("\n".join((folder / name).read_text(encoding="utf-8") for name in names))


def link(*parts: Any, **query: Any) -> str:
    """Return the address of a view: the path made of ``parts``, and the parameters that are not empty.

    The parameter ``query`` is a mapping with more parameters.
    """
    given: dict[str, Any] = {**query.pop("query", {}), **query}
    kept = [(name, value) for name, value in given.items() if value not in ("", None)]
    path = "/" + "/".join(quote(str(part), safe="") for part in parts)
    return f"{path}?{urlencode(kept, doseq=True)}" if kept else path


def number(value: float | None) -> str:
    """Format a number with four digits: a dash for ``None``, and 0 for tiny values, which rounding leaves in sums."""
    if value is None:
        return _NONE
    return "0" if abs(value) < 1e-12 else f"{value:,.4g}"


def probability(logprob: float) -> str:
    """Format the probability of a token in per cent."""
    return f"{100 * math.exp(min(0.0, logprob)):.3g} %"


def clock(unix_s: float) -> str:
    """Format a time in UTC; a dash for 0, which is an unknown time.

    A time outside the calendar, such as one recorded in milliseconds, is shown in seconds.
    """
    if not unix_s:
        return _NONE
    try:
        moment = datetime.fromtimestamp(unix_s, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g} s"
    return moment.isoformat(" ", "seconds").removesuffix("+00:00")


def seconds(value: float | None) -> str:
    """Format a duration; a dash for ``None``."""
    if value is None:
        return _NONE
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def lasted(attempt: Attempt) -> str:
    """Format the duration of an attempt; a dash before its end."""
    return seconds(max(0.0, attempt.finished_at - attempt.started_at) if attempt.finished_at else None)


def ago(unix_s: float) -> Markup:
    """Return the time since a moment in words, with the exact time in UTC on hover; a dash for an unknown time."""
    exact, passed = clock(unix_s), time.time() - unix_s
    if not unix_s or " s" in exact:
        return Markup.escape(exact)
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    words = next((f"{passed / size:.0f} {unit} ago" for unit, size in units if passed >= size), "now")
    return Markup('<time datetime="{}Z" title="{} UTC">{}</time>').format(exact.replace(" ", "T"), exact, words)


def spark(lines: list[Line]) -> Markup:
    """Draw a sparkline of lines with their intervals, for readers who see it; the numbers stand next to it."""
    path = Markup('<path class="band c{0}" d="{1}Z"/><path class="c{0}" d="{2}" vector-effect="non-scaling-stroke"/>')
    drawn = [path.format(index % 6, each.band, each.line) for index, each in enumerate(sparks(lines))]
    box = Markup('<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>')
    return box.format(WIDTH, HEIGHT, Markup("").join(drawn))


def words(name: str) -> str:
    """Return the label of a metric or an algorithm."""
    return "validation" if name == VALIDATE else LABELS.get(name, name.replace("_", " "))


def mean(values: Moments) -> float | None:
    """Return the mean of some values; ``None`` without any."""
    return values.mean if values.count else None


def stepped(algorithm: str, step: int | None) -> str:
    """Return a step as ``grpo 12``; a validation as the number of steps before it."""
    if algorithm == VALIDATE and step is not None:
        return f"validation after {count_of(step, 'step')}" if step else "validation before the first step"
    return " ".join([algorithm or "no algorithm", *([] if step is None else [str(step)])])


def data(value: Record) -> Markup:
    """Return a record as JSON for a script element, which no text in it can end."""
    return Markup(to_json(value).decode().translate(_INERT))


_INERT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def _inert(value: Any) -> Any:
    """Make control and bidirectional characters visible in every string that a template prints."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value)
    return value
