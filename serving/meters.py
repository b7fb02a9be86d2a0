"""What is counted while the API runs, as Prometheus reads it.

Source: Prometheus, text-based exposition format 0.0.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # bounds of the buckets
PREFIX = "frugalt5_"


@dataclass
class Histogram:
    """How often something took how long."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[sum(seconds > bound for bound in SECONDS)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterator[str]:
        """The histogram as Prometheus reads it."""
        so_far = 0
        for bound, count in zip((*SECONDS, "+Inf"), self.counts, strict=True):
            so_far += count
            yield f'{name}_bucket{{le="{bound}"}} {so_far}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {so_far}"


@dataclass
class Meters:
    """All counts since the start; each is changed by one thread alone."""

    steps: int = 0
    step_rows: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    failed: int = 0
    abandoned: int = 0
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # address and code of the answer
    request_seconds: Histogram = field(default_factory=Histogram)
    first_seconds: Histogram = field(default_factory=Histogram)

    def step(self, rows: int, seconds: float) -> None:
        """Count a step, which adds one token to each row."""
        self.steps += 1
        self.step_rows += rows
        self.step_seconds += seconds

    def page(self, gauges: Iterable[tuple[str, str, int]]) -> str:
        """All of it as text.

        Args:
            gauges: name, what it says, and its value now.
        """
        lines: list[str] = []
        counters = (
            ("steps_total", "steps of the running batch", self.steps),
            ("generated_tokens_total", "tokens written", self.step_rows),
            ("prompt_tokens_total", "tokens of prompts read", self.prompt_tokens),
            ("step_seconds_total", "time in steps", round(self.step_seconds, 6)),
            ("answers_failed_total", "answers that ended with an error of this server", self.failed),
            ("answers_left_total", "answers that nobody waited for any more", self.abandoned),
        )
        for kind, values in (("counter", counters), ("gauge", gauges)):
            for name, text, value in values:
                lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}", f"{PREFIX}{name} {value}"]
        lines += [f"# HELP {PREFIX}requests_total requests", f"# TYPE {PREFIX}requests_total counter"]
        for (path, code), count in sorted(self.requests.items()):
            lines.append(f'{PREFIX}requests_total{{path="{path}",code="{code}"}} {count}')
        for name, text, histogram in (
            ("request_seconds", "from a request to the end of its answer", self.request_seconds),
            ("first_token_seconds", "from a streamed request to its first text", self.first_seconds),
        ):
            lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} histogram"]
            lines += histogram.lines(PREFIX + name)
        return "\n".join(lines) + "\n"
