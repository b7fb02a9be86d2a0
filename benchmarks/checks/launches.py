"""GPU kernels and memory traffic of the engine's step, traced without a GPU: `python -m benchmarks.checks.launches
[WORK ...]`.

    WORK           standard, ultra, dropout, fp16, ragged, all-three, clipping, adamw, adamw-8bit, muon, processes
    (t5-base,
                   bf16, CUDA), mps (t5-small); by default all
    --layers=0     of each stack; 0: as many as the model has     --write=True   into docs/benchmarks.md

Counted are the kernels that torch starts, the places where the host waits for the device, copies from the host, and
what the tensors alive take at most, beside what the plan says of it. Nothing is timed, and nothing has run on a GPU:
see `benchmarks.traced.tracing` for how it is counted.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.page import markdown, show_section
from benchmarks.parts import children
from benchmarks.traced.traced_step import TracedWork, lengths_between, planned_bytes, trace
from settings.declared import T5ModelConfig
from settings.precedence import model_presets
from support.units import format_size

OPTIONS = {"layers": "0", "write": "True"}
MOST = 1 << 28  # scores at a time: what the plan takes on a card of 80 GB
WHOLE = ((512, 114),) * 128


def works() -> dict[str, tuple[TracedWork, int, int]]:
    """Name -> the work, and the most launches and waits that it may take."""
    base, small = (T5ModelConfig(**model_presets()[name]) for name in ("t5-base", "t5-small"))
    ragged = lengths_between(64, 20, 300)
    return {
        "standard": (TracedWork(base, "cuda", WHOLE, scores=MOST), 6_000, 1),
        "ultra": (TracedWork(base, "cuda", WHOLE, saved=0, scores=MOST), 6_000, 1),
        "dropout": (TracedWork(base, "cuda", WHOLE, dropout=0.1, scores=MOST), 6_000, 1),
        "fp16": (TracedWork(base, "cuda", WHOLE, scores=MOST, dtype="float16"), 8_000, 1),
        "ragged": (TracedWork(base, "cuda", ragged, scores=MOST), 6_000, 1),
        "all-three": (TracedWork(base, "cuda", ragged, dropout=0.1, saved=0, scores=MOST), 7_000, 1),
        "clipping": (TracedWork(base, "cuda", WHOLE, scores=MOST, max_grad_norm=0.5), 4_000, 1),
        "adamw": (TracedWork(base, "cuda", WHOLE, scores=MOST, optimizer="adamw_rms"), 6_000, 1),
        "adamw-8bit": (TracedWork(base, "cuda", WHOLE, scores=MOST, optimizer="adamw_8bit"), 8_000, 1),
        "muon": (TracedWork(base, "cuda", WHOLE, scores=MOST, optimizer="muon"), 7_000, 1),
        "processes": (TracedWork(base, "cuda", WHOLE, scores=MOST, processes=2), 6_000, 1),
        "mps": (TracedWork(small, "mps", WHOLE[:8], dtype="float32"), 3_500, 2),
    }


def main(arguments: list[str]) -> None:
    """Trace the named works; all flags are --name=value."""
    names, options = children.options_of(arguments, OPTIONS, str(__doc__))
    known = works()
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"unknown: {', '.join(unknown)}; works are {', '.join(known)}")
    rows, figures = [], {}
    for name in names or known:
        work, most, waits = known[name]
        if layers := int(options["layers"]):
            work = replace(work, model=replace(work.model, num_layers=layers, num_decoder_layers=layers))
        tracer, planned = trace(work), planned_bytes(work)
        found = {
            "launches": tracer.launches,
            "waits": tracer.waits.total(),
            "uploads": tracer.uploads.total(),
            "uploaded_bytes": tracer.uploaded_bytes,
            "moved_bytes": tracer.moved_bytes,
            "peak_bytes": tracer.peak_bytes,
            "planned_bytes": planned,
        }
        figures[name] = found
        rows.append(
            [
                name,
                f"{tracer.launches:,} of {most:,}",
                f"{tracer.waits.total()} of {waits}",
                str(tracer.uploads.total()),
                f"{tracer.moved_bytes / 1e9:,.0f} GB",
                format_size(tracer.peak_bytes),
                f"{planned / tracer.peak_bytes - 1:+.0%}",
            ]
        )
        print(markdown(HEAD, rows[-1:]), flush=True)
    body = f"{markdown(HEAD, rows)}\n\n{NOTE}"
    if options["write"] == "True":
        show_section("launches", "A step on a GPU, traced without one", body, figures)


HEAD = ["work", "kernels", "host waits", "copies from the host", "read and written", "peak", "plan"]
NOTE = (
    "Traced on tensors without data, on the processor named above; no figure of this table was measured on a GPU. "
    "t5-base in bf16, 128 rows of 512 + 114 tokens in one micro-batch: all blocks saved, none (`ultra`), with dropout "
    "0.1, in fp16 with a scaled loss, and 64 rows of 20 to 300 tokens (`ragged`); then as the first, with the global "
    "norm clipped, with other optimizers, and as one of two processes, whose collectives count as kernels; `mps`: "
    "t5-small in fp32, 8 rows. The limit comes after `of`."
)

if __name__ == "__main__":
    main(sys.argv[1:])
