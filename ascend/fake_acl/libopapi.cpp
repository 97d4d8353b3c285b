// An operator library (libopapi) of our own for tests: takes aclnnIncreFlashAttentionV4 in its two phases, refuses what
// the documentation forbids, and does the rest by the emulated decode kernel.
#include <deque>
#include <set>
#include <vector>

#include "acl.h"
#include "entry.cpp"

namespace {

constexpr int NULLPTR = 161001, INVALID = 161002;
constexpr int F16 = 1, I32 = 3, BF16 = 27, ND = 2;

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
    paged_kv::DecodeArrays arrays{};
    paged_kv::DecodeTiling tiling{};
    std::vector<int32_t> lens;
    uint64_t workspace = 0;
};

namespace {

std::set<aclOpExecutor*> ready;
std::deque<std::vector<int32_t>> sent;  // read when the stream comes to it

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
    using namespace paged_kv;
    if (!query || !key || !value || !lens || !table || !out || !size || !executor)
        return refused(NULLPTR, "an argument that is needed is null");
    for (const aclTensor* unused : {pseShift, attenMask, dequantScale1, quantScale1, dequantScale2, quantScale2,
                                    quantOffset2, antiquantScale, antiquantOffset, kvPaddingSize})
        if (unused) return refused(INVALID, "an optional tensor that this fake doesn't take");
    if (key->tensors.size() != 1 || value->tensors.size() != 1) return refused(INVALID, "paged keys are one tensor");
    const aclTensor *keys = key->tensors[0], *values = value->tensors[0];
    for (const aclTensor* tensor : {query, keys, values, table, out})
        if (!tensor->dense || tensor->format != ND) return refused(INVALID, "a tensor is not dense, or not ND");
    if (std::string(layout) != "BNSD") return refused(INVALID, "layout %s", layout);
    const auto &q = query->dims, &k = keys->dims, &t = table->dims;
    if (q.size() != 4 || q[1] != heads || q[2] != 1) return refused(INVALID, "query is no [B, %d, 1, D]", int(heads));
    if (k.size() != 4 || k[1] != kv_heads || k[2] != block_size || k[3] != q[3] || values->dims != k)
        return refused(INVALID, "keys are no [blocks, %d, %d, D]", int(kv_heads), int(block_size));
    if (t.size() != 2 || t[0] != q[0] || table->dtype != I32) return refused(INVALID, "no int32 table [B, width]");
    if (int64_t(lens->values.size()) != q[0]) return refused(INVALID, "%zu lengths", lens->values.size());
    if (out->dims != q || out->dtype != query->dtype || keys->dtype != query->dtype || values->dtype != query->dtype ||
        (query->dtype != F16 && query->dtype != BF16))
        return refused(INVALID, "dtypes %d, %d, %d", query->dtype, keys->dtype, out->dtype);
    if (block_size % 16 || block_size > 512) return refused(INVALID, "block_size %d", int(block_size));
    if (precise != 0 && precise != 1) return refused(INVALID, "innerPrecise %d", int(precise));
    auto* made = new aclOpExecutor;
    made->lens.assign(lens->values.begin(), lens->values.end());
    const auto longest = *std::max_element(made->lens.begin(), made->lens.end());
    const Shape shape{uint32_t(q[0]), uint32_t(heads), uint32_t(kv_heads), uint32_t(q[3]), uint32_t(block_size),
                      uint32_t(t[1]), query->dtype == F16 ? FLOAT16 : BFLOAT16, HND, uint32_t(longest), 1, 8, -1,
                      float(scale), 0};
    char text[256];
    if (PlanDecode(shape, made->tiling, Refusal{text, sizeof text})) {
        delete made;
        return refused(INVALID, "%s", text);
    }
    const auto at = [](void* address) { return static_cast<GM_ADDR>(address); };
    made->arrays = {at(query->data), at(keys->data), at(values->data), at(table->data), nullptr, at(out->data), nullptr,
                    nullptr, nullptr};
    *size = made->workspace = uint64_t(q[0]) * 4 + uint64_t(q[0] * heads) * 4 + 64;
    ready.insert(*executor = made);
    return 0;
}

int aclnnIncreFlashAttentionV4(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {
    if (!ready.erase(executor)) return refused(INVALID, "an executor that is unknown or was used");
    const std::unique_ptr<aclOpExecutor> owned(executor);
    if (!workspace || size != executor->workspace) return refused(INVALID, "a workspace of %d bytes", int(size));
    paged_kv::DecodeArrays arrays = executor->arrays;
    arrays.seq_lens = static_cast<GM_ADDR>(workspace);
    arrays.lse = arrays.seq_lens + (executor->lens.size() * 4 + 31) / 32 * 32;
    sent.push_back(executor->lens);
    const size_t bytes = sent.back().size() * 4;
    if (const int code = aclrtMemcpyAsync(workspace, size, sent.back().data(), bytes, 1, stream)) return code;
    return paged_kv::call_decode(2, stream, &arrays, &executor->tiling);
}
}
