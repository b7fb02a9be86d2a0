"""Times for people to read."""

from __future__ import annotations

from support.language import Message, say


def duration(seconds: float) -> Message:
    """Show a time as people read it: `42s`, `3:05 min`, `2 h 7 min`."""
    whole = round(seconds)
    if whole < 60:
        return say("{seconds}s", seconds=whole)
    if whole < 3600:
        return say("{minutes}:{seconds} min", minutes=whole // 60, seconds=f"{whole % 60:02}")
    minutes = round(seconds / 60)
    return say("{hours} h {minutes} min", hours=minutes // 60, minutes=minutes % 60)


def about(seconds: float, low: float, high: float) -> Message:
    """Show an estimate as people read it: `about 3 h 20 min, between 2 h 50 min and 4 h`."""
    middle = _roughly(seconds)
    least = _roughly(low)
    most = _roughly(high)
    if least == most:
        return say("about {time}", time=middle)
    return say("about {time}, between {least} and {most}", time=middle, least=least, most=most)


def _roughly(seconds: float) -> Message:
    """As fine as an estimate can be: seconds up to 90, minutes up to 1 h, tens of minutes up to 2 days, then hours."""
    if seconds < 90:
        return say("{seconds} s", seconds=max(1, round(seconds)))
    minutes = round(seconds / 60)
    if minutes < 60:
        return say("{minutes} min", minutes=minutes)
    if minutes < 48 * 60:
        hours, tens = divmod(round(seconds / 600), 6)
        return say("{hours} h {minutes} min", hours=hours, minutes=10 * tens) if tens else say("{hours} h", hours=hours)
    days, hours = divmod(round(seconds / 3600), 24)
    return say("{days} days {hours} h", days=days, hours=hours) if hours else say("{days} days", days=days)
