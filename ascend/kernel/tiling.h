// What host and kernel tell each other: plain data, passed by value at launch. Strides count elements.
#pragma once

#include <cstdint>

namespace paged_kv {

enum Dtype : uint32_t { FLOAT16 = 0, BFLOAT16 = 1 };
enum Layout : uint32_t { HND = 0, NHD = 1 };

// The arrays of one step. Keys and values [num_pages, num_kv_heads, page_size, head_dim] (HND) or
// [num_pages, page_size, num_kv_heads, head_dim] (NHD), each contiguous.
struct Shape {
    uint32_t batch, num_heads, num_kv_heads, head_dim, page_size, table_width;
    uint32_t dtype, layout;
    uint32_t max_len;     // no sequence is longer
    uint32_t num_splits;  // 0: as the cores ask for
    uint32_t num_cores;
    int32_t window_left;  // keys seen besides the query's own; -1: all
    float scale, soft_cap;
};

// What decode and prefill share: a task works on `rows` pairs of a query and a head, all of one KV head.
struct AttendTiling {
    Shape shape;
    uint32_t group;         // query heads that share a KV head
    uint32_t rows;          // of a task: its queries times its heads
    uint32_t lanes;         // the same, rounded up to 8
    uint32_t tile_tokens;   // keys, or values, in UB at once
    uint32_t score_width;   // floats from one row's scores to the next one's, a multiple of 64
    uint32_t accumulators;  // of a row: so many values are added without waiting for each other
    uint32_t table_chunk;   // block table entries in UB at once
    uint32_t ub_bytes;
    uint64_t page_stride, head_stride, token_stride;
};

struct DecodeTiling {
    AttendTiling common;
    uint32_t num_splits, split_tokens;
};

struct PrefillTiling {
    AttendTiling common;
    uint32_t queries;  // of a task
    uint32_t chunks;   // tasks of a sequence and KV head; what lies beyond its queries does nothing
    uint32_t causal;   // 0: each query sees all keys of its sequence
    uint32_t padding;
};

struct WriteTiling {
    uint32_t num_tokens, num_kv_heads, head_dim, page_size;
    uint32_t tile_tokens, ub_bytes;
    uint64_t page_stride, head_stride, token_stride;
};

struct CopyTiling {
    uint32_t num_copies, chunk_bytes;
    uint64_t page_bytes;
};

static_assert(sizeof(Shape) == 56 && sizeof(DecodeTiling) == 120 && sizeof(PrefillTiling) == 128 &&
                  sizeof(WriteTiling) == 48 && sizeof(CopyTiling) == 16,
              "Python declares the same structures");

}  // namespace paged_kv
