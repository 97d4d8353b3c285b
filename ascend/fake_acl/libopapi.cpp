// An operator library (libopapi) of our own for tests: takes aclnnIncreFlashAttentionV4 and
// aclnnFusedInferAttentionScoreV3 in their two phases, refuses what the documentation forbids, and does the rest by the
// emulated kernels.
#include <algorithm>
#include <deque>
#include <memory>
#include <set>
#include <vector>

#include "acl.h"
#include "entry.cpp"

namespace {

constexpr int NULLPTR = 161001, INVALID = 161002;
constexpr int F16 = 1, I8 = 2, I32 = 3, BF16 = 27, ND = 2;

int live = 0;
thread_local std::string said;

template <typename... A>
int refused(int code, const char* format, A... a) {
    char text[256];
    std::snprintf(text, sizeof text, format, a...);
    said = text;
    return code;
}

struct Counted {
    Counted() { ++live; }
    ~Counted() { --live; }
};

}  // namespace

struct aclTensor : Counted {
    std::vector<int64_t> dims;
    int dtype, format;
    bool dense;
    void* data;
};

struct aclTensorList : Counted {
    std::vector<aclTensor*> tensors;
    ~aclTensorList() {
        for (aclTensor* tensor : tensors) delete tensor;
    }
};

struct aclIntArray : Counted {
    std::vector<int64_t> values;
};

struct aclOpExecutor : Counted {
    bool prefill = false;
    paged_kv::DecodeArrays arrays{};
    paged_kv::DecodeTiling decode{};
    paged_kv::PrefillTiling chunks{};
    std::vector<int32_t> numbers;  // lengths, and for prefill the rows where each sequence's queries begin
    size_t batch = 0;
    uint64_t workspace = 0;
};

namespace {

using paged_kv::Shape;

std::set<aclOpExecutor*> ready;
std::deque<std::vector<int32_t>> sent;  // read when the stream comes to it

// What both operators are given; 0, or why it is refused.
struct Asked {
    const aclTensor* query;
    const aclTensorList *key, *value;
    const aclIntArray* lens;
    const aclTensor *table, *out;
    int64_t heads, kv_heads, block_size;
    double scale;

    int check() const {
        if (!query || !key || !value || !lens || !table || !out) return refused(NULLPTR, "a needed argument is null");
        if (key->tensors.size() != 1 || value->tensors.size() != 1)
            return refused(INVALID, "paged keys are one tensor");
        const aclTensor *keys = key->tensors[0], *values = value->tensors[0];
        for (const aclTensor* tensor : {query, keys, values, table, out})
            if (!tensor->dense || tensor->format != ND) return refused(INVALID, "a tensor is not dense, or not ND");
        if (values->dims != keys->dims) return refused(INVALID, "keys and values differ");
        const auto batch = int64_t(lens->values.size());
        if (table->dims.size() != 2 || table->dims[0] != batch || table->dtype != I32)
            return refused(INVALID, "no int32 table [B, width]");
        if (out->dims != query->dims || out->dtype != query->dtype || keys->dtype != query->dtype ||
            values->dtype != query->dtype || (query->dtype != F16 && query->dtype != BF16))
            return refused(INVALID, "dtypes %d, %d, %d", query->dtype, keys->dtype, out->dtype);
        return 0;
    }

    Shape shape(uint32_t layout) const {
        const auto longest = *std::max_element(lens->values.begin(), lens->values.end());
        return {uint32_t(lens->values.size()), uint32_t(heads), uint32_t(kv_heads), uint32_t(query->dims.back()),
                uint32_t(block_size), uint32_t(table->dims[1]),
                query->dtype == F16 ? paged_kv::FLOAT16 : paged_kv::BFLOAT16, layout, uint32_t(longest), 1, 8, -1,
                float(scale), 0};
    }

    // The first phase's answer, once all is checked.
    int ready_for(std::unique_ptr<aclOpExecutor> made, int unplanned, const char* text, uint64_t* size,
                  aclOpExecutor** executor) const {
        if (!size || !executor) return refused(NULLPTR, "a needed argument is null");
        if (unplanned) return refused(INVALID, "%s", text);
        const auto at = [](void* address) { return static_cast<GM_ADDR>(address); };
        made->arrays = {at(query->data), at(key->tensors[0]->data), at(value->tensors[0]->data), at(table->data),
                        nullptr, at(out->data), nullptr, nullptr, nullptr};
        uint64_t rows = 1;
        for (size_t i = 0; i + 1 < query->dims.size(); ++i) rows *= uint64_t(query->dims[i]);
        *size = made->workspace = made->numbers.size() * 4 + rows * 4 + 64;
        ready.insert(*executor = made.release());
        return 0;
    }
};

int launch(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream, bool prefill) {
    if (!ready.erase(executor)) return refused(INVALID, "an executor that is unknown or was used");
    const std::unique_ptr<aclOpExecutor> owned(executor);
    if (executor->prefill != prefill) return refused(INVALID, "an executor of another operator");
    if (!workspace || size != executor->workspace) return refused(INVALID, "a workspace of %d bytes", int(size));
    const auto numbers = static_cast<GM_ADDR>(workspace);
    const size_t bytes = executor->numbers.size() * 4;
    const GM_ADDR lse = numbers + (bytes + 31) / 32 * 32;
    sent.push_back(std::move(executor->numbers));
    if (const int code = aclrtMemcpyAsync(workspace, size, sent.back().data(), bytes, 1, stream)) return code;
    paged_kv::DecodeArrays arrays = executor->arrays;
    if (prefill) {
        const paged_kv::PrefillArrays given{arrays.query,    arrays.key_pages, arrays.value_pages,
                                            arrays.block_table, numbers,       numbers + executor->batch * 4,
                                            arrays.out,      lse};
        return paged_kv::call_prefill(2, stream, &given, &executor->chunks);
    }
    arrays.seq_lens = numbers, arrays.lse = lse;
    return paged_kv::call_decode(2, stream, &arrays, &executor->decode);
}

// Whether a device's mask hides what lies above the diagonal, and nothing else.
bool is_causal(const aclTensor& mask) {
    constexpr size_t N = 2048;
    std::vector<int8_t> bits(N * N);
    if (aclrtMemcpy(bits.data(), bits.size(), mask.data, bits.size(), 2)) return false;
    for (size_t i = 0; i < N * N; ++i)
        if (bits[i] != (i % N > i / N)) return false;
    return true;
}

}  // namespace

extern "C" {

int fake_opapi_live() { return live; }
const char* fake_opapi_said() { return said.c_str(); }

aclTensor* aclCreateTensor(const int64_t* view, uint64_t count, int dtype, const int64_t* stride, int64_t offset,
                           int format, const int64_t* storage, uint64_t storage_count, void* data) {
    auto* tensor = new aclTensor;
    tensor->dims.assign(view, view + count);
    tensor->dtype = dtype, tensor->format = format, tensor->data = data;
    tensor->dense = offset == 0 && storage_count == count && std::equal(view, view + count, storage);
    int64_t step = 1;
    for (uint64_t i = count; i-- > 0; step *= view[i]) tensor->dense &= stride[i] == step;
    return tensor;
}

aclTensorList* aclCreateTensorList(aclTensor* const* tensors, uint64_t count) {
    auto* list = new aclTensorList;
    list->tensors.assign(tensors, tensors + count);
    return list;
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
    auto* array = new aclIntArray;
    array->values.assign(values, values + count);
    return array;
}

int aclDestroyTensor(const aclTensor* tensor) { return delete tensor, 0; }
int aclDestroyTensorList(const aclTensorList* list) { return delete list, 0; }
int aclDestroyIntArray(const aclIntArray* array) { return delete array, 0; }

int aclnnIncreFlashAttentionV4GetWorkspaceSize(
    const aclTensor* query, const aclTensorList* key, const aclTensorList* value, const aclTensor* pseShift,
    const aclTensor* attenMask, const aclIntArray* lens, const aclTensor* dequantScale1, const aclTensor* quantScale1,
    const aclTensor* dequantScale2, const aclTensor* quantScale2, const aclTensor* quantOffset2,
    const aclTensor* antiquantScale, const aclTensor* antiquantOffset, const aclTensor* table,
    const aclTensor* kvPaddingSize, int64_t heads, double scale, char* layout, int64_t kv_heads, int64_t block_size,
    int64_t precise, const aclTensor* out, uint64_t* size, aclOpExecutor** executor) {
    for (const aclTensor* unused : {pseShift, attenMask, dequantScale1, quantScale1, dequantScale2, quantScale2,
                                    quantOffset2, antiquantScale, antiquantOffset, kvPaddingSize})
        if (unused) return refused(INVALID, "an optional tensor that this fake doesn't take");
    const Asked asked{query, key, value, lens, table, out, heads, kv_heads, block_size, scale};
    if (const int code = asked.check()) return code;
    if (std::string(layout) != "BNSD") return refused(INVALID, "layout %s", layout);
    const auto &q = query->dims, &k = key->tensors[0]->dims;
    if (q.size() != 4 || q[0] != table->dims[0] || q[1] != heads || q[2] != 1)
        return refused(INVALID, "query is no [B, %d, 1, D]", int(heads));
    if (k.size() != 4 || k[1] != kv_heads || k[2] != block_size || k[3] != q[3])
        return refused(INVALID, "keys are no [blocks, %d, %d, D]", int(kv_heads), int(block_size));
    if (block_size % 16 || block_size > 512) return refused(INVALID, "block_size %d", int(block_size));
    if (precise != 0 && precise != 1) return refused(INVALID, "innerPrecise %d", int(precise));
    auto made = std::make_unique<aclOpExecutor>();
    made->numbers.assign(lens->values.begin(), lens->values.end());
    char text[256];
    const int unplanned =
        paged_kv::PlanDecode(asked.shape(paged_kv::HND), made->decode, paged_kv::Refusal{text, sizeof text});
    return asked.ready_for(std::move(made), unplanned, text, size, executor);
}

int aclnnIncreFlashAttentionV4(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {
    return launch(workspace, size, executor, stream, false);
}

int aclnnFusedInferAttentionScoreV3GetWorkspaceSize(
    const aclTensor* query, const aclTensorList* key, const aclTensorList* value, const aclTensor* pseShift,
    const aclTensor* mask, const aclIntArray* ends, const aclIntArray* lens, const aclTensor* deqScale1,
    const aclTensor* quantScale1, const aclTensor* deqScale2, const aclTensor* quantScale2,
    const aclTensor* quantOffset2, const aclTensor* antiquantScale, const aclTensor* antiquantOffset,
    const aclTensor* table, const aclTensor* queryPaddingSize, const aclTensor* kvPaddingSize,
    const aclTensor* keyAntiquantScale, const aclTensor* keyAntiquantOffset, const aclTensor* valueAntiquantScale,
    const aclTensor* valueAntiquantOffset, const aclTensor* keySharedPrefix, const aclTensor* valueSharedPrefix,
    const aclIntArray* actualSharedPrefixLen, const aclTensor* queryRope, const aclTensor* keyRope,
    const aclTensor* keyRopeAntiquantScale, int64_t heads, double scale, int64_t pre_tokens, int64_t next_tokens,
    char* layout, int64_t kv_heads, int64_t sparse, int64_t precise, int64_t block_size, int64_t antiquant_mode,
    bool wants_lse, int64_t key_mode, int64_t value_mode, const aclTensor* out, const aclTensor* lse, uint64_t* size,
    aclOpExecutor** executor) {
    for (const void* unused : std::initializer_list<const void*>{
             pseShift, deqScale1, quantScale1, deqScale2, quantScale2, quantOffset2, antiquantScale, antiquantOffset,
             queryPaddingSize, kvPaddingSize, keyAntiquantScale, keyAntiquantOffset, valueAntiquantScale,
             valueAntiquantOffset, keySharedPrefix, valueSharedPrefix, actualSharedPrefixLen, queryRope, keyRope,
             keyRopeAntiquantScale, lse})
        if (unused) return refused(INVALID, "an optional argument that this fake doesn't take");
    if (antiquant_mode || key_mode || value_mode || wants_lse) return refused(INVALID, "a mode that is not 0");
    if (pre_tokens != 2147483647 || next_tokens != 2147483647) return refused(INVALID, "a limit of tokens");
    const Asked asked{query, key, value, lens, table, out, heads, kv_heads, block_size, scale};
    if (const int code = asked.check()) return code;
    if (std::string(layout) != "TND") return refused(INVALID, "layout %s", layout);
    const auto &q = query->dims, &k = key->tensors[0]->dims;
    if (q.size() != 3 || q[1] != heads || q[2] > 256) return refused(INVALID, "query is no [T, %d, D]", int(heads));
    if (k.size() != 3 || k[1] != block_size || k[2] != kv_heads * q[2] || k[2] > 65535)
        return refused(INVALID, "keys are no [blocks, %d, H]", int(block_size));
    if (block_size != 128) return refused(INVALID, "block_size %d", int(block_size));
    if (precise != 0) return refused(INVALID, "innerPrecise %d", int(precise));
    if (!ends || ends->values.size() != lens->values.size() || ends->values.size() > 4096 || ends->values.back() != q[0])
        return refused(INVALID, "no end of the queries for each of %d lengths", int(lens->values.size()));
    if (sparse != (mask ? 3 : 0)) return refused(INVALID, "sparseMode %d", int(sparse));
    if (mask && (mask->dims != std::vector<int64_t>{2048, 2048} || mask->dtype != I8 || !mask->dense || !is_causal(*mask)))
        return refused(INVALID, "the mask is not the triangle of 2048");
    auto made = std::make_unique<aclOpExecutor>();
    made->prefill = true, made->batch = lens->values.size();
    made->numbers.assign(lens->values.begin(), lens->values.end());
    made->numbers.push_back(0);
    int64_t before = 0, most = 0;
    for (size_t i = 0; i < lens->values.size(); before = ends->values[i++]) {
        const int64_t queries = ends->values[i] - before;
        if (queries < 0 || queries > lens->values[i])
            return refused(INVALID, "%d queries of %d tokens", int(queries), int(lens->values[i]));
        most = std::max(most, queries);
        made->numbers.push_back(int32_t(ends->values[i]));
    }
    char text[256];
    const int unplanned = paged_kv::PlanPrefill(asked.shape(paged_kv::NHD), uint32_t(most), mask != nullptr,
                                                made->chunks, paged_kv::Refusal{text, sizeof text});
    return asked.ready_for(std::move(made), unplanned, text, size, executor);
}

int aclnnFusedInferAttentionScoreV3(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {
    return launch(workspace, size, executor, stream, true);
}
}
