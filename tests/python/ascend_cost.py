"""What the decode kernel costs, counted by the emulation: ``make ascend-cost``."""

from __future__ import annotations

from test_ascend_decode import Case

TOKENS = 1024
HEAD_DIM = 128
GROUPS = (1, 2, 4, 8, 16)
HEADER = (
    "| dtype | heads a KV head | vector repeats | vector instructions | barriers | DMA bytes a KV byte |\n"
    "|---|---|---|---|---|---|"
)


def row(dtype: str, group: int) -> str:
    """Run one sequence on one block and write its cost as a row of the table."""
    case = Case([TOKENS], dtype=dtype, head_dim=HEAD_DIM, group=group, page_size=128)
    counters = case.check(num_blocks=1).counters
    heads = TOKENS * group
    moved = (counters["bytes_in"] + counters["bytes_out"]) / (TOKENS * HEAD_DIM * 2 * 2)
    figures = [counters[name] / heads for name in ("vector_repeats", "vector_instructions", "barriers")]
    return f"| {dtype} | {group} | " + " | ".join(f"{figure:.2f}" for figure in figures) + f" | {moved:.3f} |"


def table() -> str:
    """Return the table that docs/ascend.md shows."""
    return "\n".join([HEADER, *(row(dtype, group) for dtype in ("float16", "bfloat16") for group in GROUPS)])


if __name__ == "__main__":
    print(
        f"Per token and query head; head_dim {HEAD_DIM}, {TOKENS} tokens, pages of 128; counted, not timed\n"
    )
    print(table())
