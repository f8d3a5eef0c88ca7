"""Times and numbers as people read them. Pure."""

from __future__ import annotations

from datetime import datetime, timezone


def parse_time(text: object) -> float | None:
    """Return the Unix time of an RFC 3339 text; None if it is none."""
    if not isinstance(text, str) or not text:
        return None
    try:
        head, _, fraction = text.rstrip("Z").partition(".")
        moment = datetime.strptime(head, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
        return moment.timestamp() + (float(f"0.{fraction[:6]}") if fraction.isdigit() else 0.0)
    except ValueError:
        return None


def age_text(time: object, now: float) -> str:
    """Return how long ago an RFC 3339 time was, such as `5m`; `-` if there is none."""
    moment = parse_time(time)
    return "-" if moment is None else short_duration(now - moment)


def short_duration(seconds: float) -> str:
    """Return a duration with at most two units: `42s`, `5m10s`, `3h12m`, `2d4h`."""
    left = max(0, int(seconds))
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if left >= size:
            rest = left % size // part
            return f"{left // size}{unit}" + (f"{rest}{small}" if rest else "")
    return f"{left}s"
