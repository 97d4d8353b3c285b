// The host's side of the tilings: what fits is budgeted to the byte, what doesn't is refused with the numbers.
#pragma once

#include <cstdio>

#include "tiling.h"

namespace paged_kv {

constexpr uint32_t USABLE_UB = 188160;  // 192 KiB less 256 bytes and the 8 KiB that the compiler reserves
constexpr uint32_t TABLE_CHUNK = 256;

struct Refusal {
    char* text;
    size_t size;
    template <typename... A>
    int operator()(const char* format, A... a) const {
        std::snprintf(text, size, format, a...);
        return 1;
    }
    int operator()(const char* format) const { return (*this)("%s", format); }
};

inline uint32_t RoundedUp(uint32_t value, uint32_t step) { return (value + step - 1) / step * step; }
inline uint32_t Divided(uint32_t value, uint32_t by) { return value / by + (value % by != 0); }

// The buffers of Tiles and Attend, one line each, in their order.
inline uint64_t Budget(const AttendTiling& t) {
    const uint64_t tokens = t.tile_tokens, rows = t.rows, dim = t.shape.head_dim;
    const bool direct = t.shape.dtype == FLOAT16;
    const uint64_t block = direct ? 16 : 8;
    return 2 * tokens * dim * 2             // tiles
           + t.table_chunk * 4              // table
           + rows * dim * 2                 // queries
           + rows * t.score_width * 4       // scores
           + tokens * (block + 2) * 4       // dots
           + rows * t.accumulators * dim * 4  // sums
           + tokens * 32                    // spread
           + t.lanes * (6 + 8) * 4          // state
           + (direct ? rows * t.score_width * 2                                         // weights
                     : RoundedUp(uint32_t(dim), 64) * tokens * 4 + rows * dim * 4);     // wide tile, wide query
}

inline void SetStrides(uint32_t layout, uint32_t heads, uint32_t page_size, uint32_t dim, uint64_t& page,
                       uint64_t& head, uint64_t& token) {
    page = uint64_t(heads) * page_size * dim;
    head = layout == HND ? uint64_t(page_size) * dim : dim;
    token = layout == HND ? dim : uint64_t(heads) * dim;
}

inline int CheckPages(uint32_t heads, uint32_t dim, uint32_t page_size, uint32_t layout, const Refusal& refuse) {
    if (dim == 0 || dim % 16 || dim > 256) return refuse("head_dim %u: a multiple of 16 up to 256 is needed", dim);
    if (page_size == 0 || page_size % 16) return refuse("page_size %u: a multiple of 16 is needed", page_size);
    if (heads == 0) return refuse("num_kv_heads is 0");
    if (layout > NHD) return refuse("layout %u: 0 (HND) or 1 (NHD)", layout);
    return 0;
}

// What every attention kernel asks of its arrays; the sizes that depend on them alone.
inline int CheckShape(const Shape& s, AttendTiling& t, const Refusal& refuse) {
    if (CheckPages(s.num_kv_heads, s.head_dim, s.page_size, s.layout, refuse)) return 1;
    if (s.num_heads == 0 || s.num_heads % s.num_kv_heads)
        return refuse("%u query heads over %u KV heads", s.num_heads, s.num_kv_heads);
    if (s.dtype > BFLOAT16) return refuse("dtype %u: 0 (float16) or 1 (bfloat16)", s.dtype);
    if (s.num_cores == 0) return refuse("num_cores is 0");
    if (s.window_left < -1) return refuse("window_left %d: -1 or more", s.window_left);
    if (!(s.soft_cap >= 0)) return refuse("soft_cap %g: 0 or more", double(s.soft_cap));
    if (s.max_len > uint64_t(s.table_width) * s.page_size)
        return refuse("%u tokens in a table of %u pages of %u", s.max_len, s.table_width, s.page_size);
    t = {};
    t.shape = s;
    t.group = s.num_heads / s.num_kv_heads;
    t.table_chunk = s.table_width == 0 ? 8 : RoundedUp(s.table_width < TABLE_CHUNK ? s.table_width : TABLE_CHUNK, 8);
    SetStrides(s.layout, s.num_kv_heads, s.page_size, s.head_dim, t.page_stride, t.head_stride, t.token_stride);
    if ((t.token_stride - s.head_dim) * 2 > ~0U)
        return refuse("%u KV heads of %u: a row's stride exceeds 4 GiB", s.num_kv_heads, s.head_dim);
    // A repeat count has 8 bits, and one instruction covers all rows of a task.
    if (t.group > 255) return refuse("%u query heads a KV head: at most 255", t.group);
    return 0;
}

// The largest tile, then the most accumulators, with which `queries` queries fit beside the kernel's own buffers of so
// many bytes an element of output and a lane. True if there is one; `bytes` is what was asked for last.
inline bool Fit(AttendTiling& t, uint32_t queries, uint32_t per_element, uint32_t per_lane, uint64_t& bytes) {
    t.rows = queries * t.group, t.lanes = RoundedUp(t.rows, 8);
    const uint64_t own = uint64_t(t.rows) * t.shape.head_dim * per_element + uint64_t(t.lanes) * per_lane;
    for (t.tile_tokens = 128; t.tile_tokens >= 16; t.tile_tokens /= 2)
        for (t.accumulators = 16; t.accumulators >= 4; t.accumulators /= 2) {
            t.score_width = RoundedUp(t.tile_tokens, 64);
            bytes = Budget(t) + own;
            t.ub_bytes = uint32_t(bytes);
            if (bytes <= USABLE_UB) return true;
        }
    return false;
}

inline int DoesNotFit(const AttendTiling& t, uint64_t bytes, const Refusal& refuse) {
    return refuse("%u query heads a KV head of head_dim %u take %llu bytes of UB at the smallest tile; there are %u",
                  t.group, t.shape.head_dim, (unsigned long long)bytes, USABLE_UB);
}

inline int PlanDecode(const Shape& s, DecodeTiling& t, const Refusal& refuse) {
    t = {};
    if (CheckShape(s, t.common, refuse)) return 1;
    uint64_t bytes = 0;
    if (!Fit(t.common, 1, sizeof(float), sizeof(float), bytes)) return DoesNotFit(t.common, bytes, refuse);

    // Splits: where heads alone leave half of the cores idle, but not below 512 tokens each.
    const uint64_t seen = s.window_left < 0 ? s.max_len : uint64_t(s.window_left) + 1;
    const auto span = uint32_t(seen < s.max_len ? seen : s.max_len);
    const uint64_t tasks = uint64_t(s.batch) * s.num_kv_heads;
    uint32_t splits = s.num_splits;
    if (splits == 0) {
        splits = 1;
        if (tasks && tasks * 2 < s.num_cores) {
            const uint32_t wanted = Divided(s.num_cores, uint32_t(tasks)), useful = Divided(span, 512);
            splits = wanted < useful ? wanted : useful;
        }
    }
    t.split_tokens = RoundedUp(Divided(span ? span : 1, splits ? splits : 1), s.page_size);
    t.num_splits = span ? Divided(span, t.split_tokens) : 1;
    if (tasks * t.num_splits > ~0U) return refuse("%llu tasks", (unsigned long long)(tasks * t.num_splits));
    return 0;
}

// No sequence has more than `max_queries` queries. How many of them a task takes depends on heads and head_dim alone, so
// that a query's arithmetic doesn't depend on what else is asked.
inline int PlanPrefill(const Shape& s, uint32_t max_queries, uint32_t causal, PrefillTiling& t, const Refusal& refuse) {
    t = {};
    if (CheckShape(s, t.common, refuse)) return 1;
    if ((uint64_t(s.num_heads) - t.common.group) * s.head_dim * 2 > ~0U)
        return refuse("%u query heads of %u: a row's stride exceeds 4 GiB", s.num_heads, s.head_dim);
    constexpr uint32_t ROWS = 32;  // enough for what is read once for all of them to cost little
    uint64_t bytes = 0;
    t.queries = t.common.group < ROWS ? ROWS / t.common.group : 1;
    while (!Fit(t.common, t.queries, 2, 9 * sizeof(float), bytes)) {
        if (t.queries == 1) return DoesNotFit(t.common, bytes, refuse);
        t.queries /= 2;
    }
    t.causal = causal != 0;
    t.chunks = Divided(max_queries, t.queries);
    const uint64_t pairs = uint64_t(s.batch) * s.num_kv_heads;
    if (pairs > ~0U || pairs * t.chunks > ~0U)
        return refuse("%u sequences of %u KV heads with up to %u queries: more than 2^32 tasks", s.batch,
                      s.num_kv_heads, max_queries);
    return 0;
}

inline int PlanWrite(uint32_t layout, WriteTiling& t, const Refusal& refuse) {
    if (CheckPages(t.num_kv_heads, t.head_dim, t.page_size, layout, refuse)) return 1;
    if (t.num_kv_heads > 4095) return refuse("%u KV heads: one copy moves at most 4095 rows", t.num_kv_heads);
    SetStrides(layout, t.num_kv_heads, t.page_size, t.head_dim, t.page_stride, t.head_stride, t.token_stride);
    const uint64_t row = uint64_t(t.num_kv_heads) * t.head_dim * 2;
    t.tile_tokens = 64;
    while (t.tile_tokens > 4 && 2 * t.tile_tokens * row > USABLE_UB) t.tile_tokens /= 2;
    const uint64_t bytes = 2 * t.tile_tokens * row;
    if (bytes > USABLE_UB)
        return refuse("%u KV heads of %u take %llu bytes of UB for 4 tokens; there are %u", t.num_kv_heads, t.head_dim,
                      (unsigned long long)bytes, USABLE_UB);
    t.ub_bytes = uint32_t(bytes);
    return 0;
}

}  // namespace paged_kv
