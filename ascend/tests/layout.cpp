// Where the structures that host and device share have their fields: Python declares the same, and a test compares.
#include <cstddef>

#include "../fake_acl/acl.h"
#include "tiling.h"

namespace {

struct Field {
    const char* structure;
    const char* name;
    size_t offset, size;
};

using namespace paged_kv;

#define FIELD(STRUCTURE, NAME) {#STRUCTURE, #NAME, offsetof(STRUCTURE, NAME), sizeof(STRUCTURE::NAME)}
#define WHOLE(STRUCTURE) {#STRUCTURE, "", 0, sizeof(STRUCTURE)}

constexpr Field FIELDS[] = {
    WHOLE(Shape),
    FIELD(Shape, batch), FIELD(Shape, num_heads), FIELD(Shape, num_kv_heads), FIELD(Shape, head_dim),
    FIELD(Shape, page_size), FIELD(Shape, table_width), FIELD(Shape, dtype), FIELD(Shape, layout),
    FIELD(Shape, max_len), FIELD(Shape, num_splits), FIELD(Shape, num_cores), FIELD(Shape, window_left),
    FIELD(Shape, scale), FIELD(Shape, soft_cap),
    WHOLE(AttendTiling),
    FIELD(AttendTiling, shape), FIELD(AttendTiling, group), FIELD(AttendTiling, rows), FIELD(AttendTiling, lanes),
    FIELD(AttendTiling, tile_tokens), FIELD(AttendTiling, score_width), FIELD(AttendTiling, accumulators),
    FIELD(AttendTiling, table_chunk), FIELD(AttendTiling, ub_bytes), FIELD(AttendTiling, page_stride),
    FIELD(AttendTiling, head_stride), FIELD(AttendTiling, token_stride),
    WHOLE(DecodeTiling),
    FIELD(DecodeTiling, common), FIELD(DecodeTiling, num_splits), FIELD(DecodeTiling, split_tokens),
    WHOLE(PrefillTiling),
    FIELD(PrefillTiling, common), FIELD(PrefillTiling, queries), FIELD(PrefillTiling, chunks),
    FIELD(PrefillTiling, causal), FIELD(PrefillTiling, padding),
    WHOLE(WriteTiling),
    FIELD(WriteTiling, num_tokens), FIELD(WriteTiling, num_kv_heads), FIELD(WriteTiling, head_dim),
    FIELD(WriteTiling, page_size), FIELD(WriteTiling, tile_tokens), FIELD(WriteTiling, ub_bytes),
    FIELD(WriteTiling, page_stride), FIELD(WriteTiling, head_stride), FIELD(WriteTiling, token_stride),
    WHOLE(CopyTiling),
    FIELD(CopyTiling, num_copies), FIELD(CopyTiling, chunk_bytes), FIELD(CopyTiling, page_bytes),
    WHOLE(LaunchKernelAttrValue),
    FIELD(LaunchKernelAttrValue, schemMode), FIELD(LaunchKernelAttrValue, engineType),
    FIELD(LaunchKernelAttrValue, blockDimOffset), FIELD(LaunchKernelAttrValue, timeout),
    FIELD(LaunchKernelAttrValue, rsv),
    WHOLE(LaunchKernelAttr),
    FIELD(LaunchKernelAttr, id), FIELD(LaunchKernelAttr, value),
    WHOLE(LaunchKernelCfg),
    FIELD(LaunchKernelCfg, attrs), FIELD(LaunchKernelCfg, numAttrs),
    WHOLE(BinaryLoadOptionValue),
    FIELD(BinaryLoadOptionValue, isLazyLoad), FIELD(BinaryLoadOptionValue, magic),
    FIELD(BinaryLoadOptionValue, cpuKernelMode), FIELD(BinaryLoadOptionValue, rsv),
    WHOLE(BinaryLoadOption),
    FIELD(BinaryLoadOption, type), FIELD(BinaryLoadOption, value),
    WHOLE(BinaryLoadOptions),
    FIELD(BinaryLoadOptions, options), FIELD(BinaryLoadOptions, numOpt),
    WHOLE(PlaceHolderInfo),
    FIELD(PlaceHolderInfo, addrOffset), FIELD(PlaceHolderInfo, dataOffset),
};

}  // namespace

// The i-th entry; a structure of null after the last.
extern "C" Field layout_entry(size_t i) {
    return i < sizeof FIELDS / sizeof *FIELDS ? FIELDS[i] : Field{nullptr, nullptr, 0, 0};
}
