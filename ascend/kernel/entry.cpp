// The kernels and their plain C launchers. Under bisheng they go to the NPU's stream; under the emulation
// (PAGED_KV_EMULATION) the same kernels run on the host: without a stream before the launcher returns, else when a
// stream of the fake runtime comes to them.
#include "combine.h"
#include "pages.h"
#include "plan.h"
#include "prefill.h"

#ifdef PAGED_KV_EMULATION
#include "run.h"
#define PAGED_KV_LAUNCH(KERNEL, BLOCKS, STREAM, ...) emu::submit(STREAM, #KERNEL, BLOCKS, KERNEL, __VA_ARGS__)
#else
#define PAGED_KV_LAUNCH(KERNEL, BLOCKS, STREAM, ...) (KERNEL<<<BLOCKS, nullptr, STREAM>>>(__VA_ARGS__), 0)
#endif

namespace paged_kv {
extern "C" {

__global__ __vector__ __aicore__ void paged_kv_decode(GM_ADDR query, GM_ADDR key_pages, GM_ADDR value_pages,
                                                      GM_ADDR block_table, GM_ADDR seq_lens, GM_ADDR out, GM_ADDR lse,
                                                      GM_ADDR partial_out, GM_ADDR partial_lse, DecodeTiling tiling) {
    const DecodeArrays arrays{query, key_pages, value_pages, block_table, seq_lens, out, lse, partial_out, partial_lse};
    if (tiling.common.shape.dtype == FLOAT16) Decode<half>(arrays, tiling).Process();
    else Decode<bfloat16_t>(arrays, tiling).Process();
}

__global__ __vector__ __aicore__ void paged_kv_combine(GM_ADDR seq_lens, GM_ADDR out, GM_ADDR lse, GM_ADDR partial_out,
                                                       GM_ADDR partial_lse, DecodeTiling tiling) {
    const DecodeArrays arrays{nullptr, nullptr, nullptr, nullptr, seq_lens, out, lse, partial_out, partial_lse};
    if (tiling.common.shape.dtype == FLOAT16) Combine<half>(arrays, tiling).Process();
    else Combine<bfloat16_t>(arrays, tiling).Process();
}

__global__ __vector__ __aicore__ void paged_kv_prefill(GM_ADDR query, GM_ADDR key_pages, GM_ADDR value_pages,
                                                       GM_ADDR block_table, GM_ADDR seq_lens, GM_ADDR cu_seqlens_q,
                                                       GM_ADDR out, GM_ADDR lse, PrefillTiling tiling) {
    const PrefillArrays arrays{query, key_pages, value_pages, block_table, seq_lens, cu_seqlens_q, out, lse};
    if (tiling.common.shape.dtype == FLOAT16) Prefill<half>(arrays, tiling).Process();
    else Prefill<bfloat16_t>(arrays, tiling).Process();
}

__global__ __vector__ __aicore__ void paged_kv_write_pages(GM_ADDR key, GM_ADDR value, GM_ADDR key_pages,
                                                           GM_ADDR value_pages, GM_ADDR slots, WriteTiling tiling) {
    WritePages(key, value, key_pages, value_pages, slots, tiling).Process();
}

__global__ __vector__ __aicore__ void paged_kv_copy_pages(GM_ADDR key_pages, GM_ADDR value_pages, GM_ADDR copies,
                                                          CopyTiling tiling) {
    CopyPages(key_pages, value_pages, copies, tiling).Process();
}

#ifdef PAGED_KV_EMULATION
EMU_ENTRY(paged_kv_decode)
EMU_ENTRY(paged_kv_combine)
EMU_ENTRY(paged_kv_prefill)
EMU_ENTRY(paged_kv_write_pages)
EMU_ENTRY(paged_kv_copy_pages)
#endif

// ---- the host's side: 0, or 1 and the reason in `error` ----

int plan_decode(const Shape* shape, DecodeTiling* tiling, char* error, size_t size) {
    return PlanDecode(*shape, *tiling, Refusal{error, size});
}

int plan_prefill(const Shape* shape, uint32_t max_queries, uint32_t causal, PrefillTiling* tiling, char* error,
                 size_t size) {
    return PlanPrefill(*shape, max_queries, causal, *tiling, Refusal{error, size});
}

int plan_write_pages(uint32_t layout, WriteTiling* tiling, char* error, size_t size) {
    return PlanWrite(layout, *tiling, Refusal{error, size});
}

// ---- launchers: 0, or why nothing was launched ----

// Where there are splits, the combine follows on the same stream: its order is all the synchronisation needed.
int call_decode(uint32_t blocks, void* stream, const DecodeArrays* arrays, const DecodeTiling* tiling) {
    const DecodeArrays& a = *arrays;
    const int refused = PAGED_KV_LAUNCH(paged_kv_decode, blocks, stream, a.query, a.key_pages, a.value_pages,
                                        a.block_table, a.seq_lens, a.out, a.lse, a.partial_out, a.partial_lse, *tiling);
    if (refused || tiling->num_splits == 1) return refused;
    return PAGED_KV_LAUNCH(paged_kv_combine, blocks, stream, a.seq_lens, a.out, a.lse, a.partial_out, a.partial_lse,
                           *tiling);
}

int call_prefill(uint32_t blocks, void* stream, const PrefillArrays* arrays, const PrefillTiling* tiling) {
    const PrefillArrays& a = *arrays;
    return PAGED_KV_LAUNCH(paged_kv_prefill, blocks, stream, a.query, a.key_pages, a.value_pages, a.block_table,
                           a.seq_lens, a.cu_seqlens_q, a.out, a.lse, *tiling);
}

int call_write_pages(uint32_t blocks, void* stream, GM_ADDR key, GM_ADDR value, GM_ADDR key_pages,
                     GM_ADDR value_pages, GM_ADDR slots, const WriteTiling* tiling) {
    return PAGED_KV_LAUNCH(paged_kv_write_pages, blocks, stream, key, value, key_pages, value_pages, slots, *tiling);
}

// Keys and values have pages of the same size, a multiple of 32 bytes.
int call_copy_pages(uint32_t blocks, void* stream, GM_ADDR key_pages, GM_ADDR value_pages, GM_ADDR copies,
                    uint32_t num_copies, uint64_t page_bytes) {
    constexpr uint32_t CHUNK = 65536;
    const CopyTiling tiling{num_copies, page_bytes < CHUNK ? uint32_t(page_bytes) : CHUNK, page_bytes};
    return PAGED_KV_LAUNCH(paged_kv_copy_pages, blocks, stream, key_pages, value_pages, copies, tiling);
}
}  // extern "C"
}  // namespace paged_kv
