"""What the attention kernels cost, counted by the emulation: ``make ascend-cost``."""

from __future__ import annotations

from ascend_case import Case

HEAD_DIM = 128
DECODE_TOKENS = 1024
PREFILL_TOKENS, PREFILL_QUERIES = 256, 32
HEADER = (
    "| kernel | dtype | heads a KV head | vector repeats | vector instructions | barriers "
    "| DMA bytes a KV byte |\n"
    "|---|---|---|---|---|---|---|"
)


def row(kernel: str, dtype: str, group: int) -> str:
    """Run one sequence on one block and write its cost as a row of the table."""
    tokens, queries = (DECODE_TOKENS, 1) if kernel == "decode" else (PREFILL_TOKENS, PREFILL_QUERIES)
    counts = None if kernel == "decode" else [queries]
    case = Case([tokens], counts, dtype=dtype, head_dim=HEAD_DIM, group=group, page_size=128)
    counters = case.check(num_blocks=1).counters
    seen = group * sum(range(tokens - queries + 1, tokens + 1))
    moved = (counters["bytes_in"] + counters["bytes_out"]) / (tokens * HEAD_DIM * 2 * 2)
    figures = [counters[name] / seen for name in ("vector_repeats", "vector_instructions", "barriers")]
    return (
        f"| {kernel} | {dtype} | {group} | " + " | ".join(f"{n:.2f}" for n in figures) + f" | {moved:.3f} |"
    )


def table() -> str:
    """Return the table that docs/ascend.md shows."""
    decode = [("decode", dtype, group) for dtype in ("float16", "bfloat16") for group in (1, 2, 4, 8, 16)]
    prefill = [("prefill", dtype, group) for dtype in ("float16", "bfloat16") for group in (1, 4)]
    return "\n".join([HEADER, *(row(*case) for case in decode + prefill)])


if __name__ == "__main__":
    print(
        f"For each key that a query head sees; head_dim {HEAD_DIM}, pages of 128; counted, not timed.\n"
        f"Decode: {DECODE_TOKENS} tokens. "
        f"Prefill: {PREFILL_QUERIES} queries at the end of {PREFILL_TOKENS} tokens.\n"
    )
    print(table())
