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

// The buffers of Decode, one line each, in its order.
inline uint64_t Budget(const DecodeTiling& t) {
    const uint64_t tokens = t.tile_tokens, group = t.group, dim = t.shape.head_dim, lanes = t.lanes_group;
    const bool direct = t.shape.dtype == FLOAT16;
    const uint64_t block = direct ? 16 : 8;
    return 2 * tokens * dim * 2               // tiles
           + group * dim * 2                  // queries
           + group * dim * 4                  // outs
           + lanes * 4                        // lses
           + t.table_chunk * 4                // table
           + group * t.score_width * 4        // scores
           + tokens * (block + 2) * 4         // dots
           + group * t.rows * dim * 4         // sums
           + tokens * 32                      // spread
           + lanes * (6 + 8) * 4              // state
           + (direct ? group * t.score_width * 2                                        // weights
                     : RoundedUp(uint32_t(dim), 64) * tokens * 4 + group * dim * 4);    // wide tile, wide query
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

inline int PlanDecode(const Shape& s, DecodeTiling& t, const Refusal& refuse) {
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
    t.lanes_group = RoundedUp(t.group, 8);
    t.table_chunk = s.table_width == 0 ? 8 : RoundedUp(s.table_width < TABLE_CHUNK ? s.table_width : TABLE_CHUNK, 8);
    SetStrides(s.layout, s.num_kv_heads, s.page_size, s.head_dim, t.page_stride, t.head_stride, t.token_stride);
    if ((t.token_stride - s.head_dim) * 2 > ~0U)
        return refuse("%u KV heads of %u: a row's stride exceeds 4 GiB", s.num_kv_heads, s.head_dim);
    // A repeat count has 8 bits, and one instruction covers all heads of the group.
    if (t.group > 255) return refuse("%u query heads a KV head: at most 255", t.group);

    uint64_t bytes = 0;
    for (uint32_t tokens = 128; tokens >= 16 && t.ub_bytes == 0; tokens /= 2)
        for (uint32_t rows = 16; rows >= 4; rows /= 2) {
            t.tile_tokens = tokens, t.rows = rows, t.score_width = RoundedUp(tokens, 64);
            bytes = Budget(t);
            if (bytes <= USABLE_UB) {
                t.ub_bytes = uint32_t(bytes);
                break;
            }
        }
    if (t.ub_bytes == 0)
        return refuse("%u query heads a KV head of head_dim %u take %llu bytes of UB at the smallest tile; there are %u",
                      t.group, s.head_dim, (unsigned long long)bytes, USABLE_UB);

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
