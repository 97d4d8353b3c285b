// Small kernels, each wrong in one way, and beside them the same ones done right: what the emulation must tell apart.
#include <map>

#include "run.h"

using namespace AscendC;

namespace {

constexpr uint32_t N = 256;  // elements of each array

struct Arrays {
    float* in;
    float* out;
};
Arrays arrays;

// One VECIN, one VECCALC and one VECOUT buffer of N floats, with which every kernel below begins.
struct Bench {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    TBuf<TPosition::VECCALC> spare;
    GlobalTensor<float> source, target;

    Bench() {
        pipe.InitBuffer(in, 1, N * 4);
        pipe.InitBuffer(out, 1, N * 4);
        pipe.InitBuffer(spare, N * 4);
        source.SetGlobalBuffer(arrays.in);
        target.SetGlobalBuffer(arrays.out);
    }
    LocalTensor<float> load() {
        LocalTensor<float> x = in.AllocTensor<float>();
        DataCopy(x, source, N);
        in.EnQue(x);
        return in.DeQue<float>();
    }
    void store(const LocalTensor<float>& y) {
        out.EnQue(y);
        LocalTensor<float> ready = out.DeQue<float>();
        DataCopy(target, ready, N);
        out.FreeTensor(ready);
    }
};

using Kernel = void (*)();
struct Registered {
    static std::map<std::string, Kernel>& all() {
        static std::map<std::string, Kernel> kernels;
        return kernels;
    }
    Registered(const char* name, Kernel kernel) { all()[name] = kernel; }
};
#define KERNEL(NAME)                                                                  \
    void NAME(Bench&);                                                                \
    const Registered register_##NAME(#NAME, [] { Bench bench; NAME(bench); });        \
    void NAME([[maybe_unused]] Bench& b)

// ---- operands ----

KERNEL(align) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x[1], 0.0F, 8);
}
KERNEL(bounds) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x[8], 0.0F, int32_t(N));
}
KERNEL(uninitialised) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, 64);
    PipeBarrier<PIPE_V>();
    Adds(x, x, 1.0F, 65);
}
KERNEL(padding_tail) {
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopyPad(x, b.source, {1, 20, 0, 0, 0}, {false, 0, 0, 0});
    b.in.EnQue(x);
    x = b.in.DeQue<float>();
    Adds(b.spare.Get<float>(), x, 1.0F, 8);
    b.in.FreeTensor(x);
}
KERNEL(use_after_free) {
    LocalTensor<float> x = b.load();
    b.in.FreeTensor(x);
    Adds(b.spare.Get<float>(), x, 1.0F, 8);
}
KERNEL(overlap) {  // shifted by one block inside an iteration
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    PipeBarrier<PIPE_V>();
    Adds(x[8], x, 1.0F, 64);
}
KERNEL(overlap_of_repeats) {  // each repeat reads what the one before it wrote
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    PipeBarrier<PIPE_V>();
    Add(x[64], x, x, 64, 2, {1, 1, 1, 8, 8, 8});
}
KERNEL(overlap_of_brcb) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    PipeBarrier<PIPE_V>();
    Brcb(x, x, 1, {1, 8});
}
KERNEL(overlap_of_accumulator) {  // MulAddDst's destination may not be a source
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    PipeBarrier<PIPE_V>();
    MulAddDst(x, x, x[128], 64, 1, {1, 1, 1, 8, 8, 8});
}

// ---- shape of a vector instruction ----

KERNEL(mask) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 0.0F, uint64_t(65), 1, 1, 8);
}
KERNEL(mask_of_no_lane) {
    uint64_t lanes[2] = {0, 0};
    Duplicate(b.spare.Get<float>(), 0.0F, lanes, 1, 1, 8);
}
KERNEL(repeat) {  // 256 would be 0 in eight bits: nothing done, and nothing said
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 0.0F, uint64_t(64), 256, 1, 0);
}
KERNEL(stride) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 0.0F, int32_t(N));
    PipeBarrier<PIPE_V>();
    Add(x, x, x, 64, 1, {1, 1, 1, 256, 8, 8});
}
KERNEL(brcb_stride) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 0.0F, 8);
    PipeBarrier<PIPE_V>();
    Brcb(x[64], x, 1, {0, 8});
}
KERNEL(dtype) {  // compiles for the chip, and fails on it
    LocalTensor<bfloat16_t> x = b.spare.Get<bfloat16_t>();
    Duplicate(x, bfloat16_t(1.0F), int32_t(N));
    PipeBarrier<PIPE_V>();
    Add(x, x, x, int32_t(N));
}
KERNEL(dtype_of_cast) {
    LocalTensor<bfloat16_t> x = b.spare.Get<bfloat16_t>();
    Duplicate(x, bfloat16_t(1.0F), 64);
    PipeBarrier<PIPE_V>();
    Cast(x[128].ReinterpretCast<half>(), x, RoundMode::CAST_RINT, 64);
}
KERNEL(round_mode) {  // float to bfloat16 has to round
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, 64);
    PipeBarrier<PIPE_V>();
    Cast(x[128].ReinterpretCast<bfloat16_t>(), x, RoundMode::CAST_NONE, 64);
}
KERNEL(align_of_reduction) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    PipeBarrier<PIPE_V>();
    BlockReduceSum(x[132], x, 1, 64, 1, 1, 8);
}

// ---- copies ----

KERNEL(copy_size) {
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopy(x, b.source, 9);
}
KERNEL(copy_blocks) {
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopyPad(x, b.source, {4096, 32, 0, 0, 0}, {false, 0, 0, 0});
}
KERNEL(copy_length) {
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopyPad(x, b.source, {1, 0, 0, 0, 0}, {false, 0, 0, 0});
}
KERNEL(pad_width) {
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopyPad(x, b.source, {1, 4, 0, 0, 0}, {true, 0, 9, 0});
}
KERNEL(gm_bounds) {
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopy(x, b.source[1], N);
}
KERNEL(gm_bounds_of_scalar) { b.source.GetValue(N); }
KERNEL(gm_const) {
    LocalTensor<float> x = b.out.AllocTensor<float>();
    Duplicate(x, 0.0F, int32_t(N));
    b.out.EnQue(x);
    x = b.out.DeQue<float>();
    DataCopy(b.source, x, N);
    b.out.FreeTensor(x);
}
KERNEL(gm_race) {  // every block writes the same place
    LocalTensor<float> x = b.out.AllocTensor<float>();
    Duplicate(x, float(GetBlockIdx()), int32_t(N));
    b.store(x);
}
KERNEL(gm_stale) {
    if (GetBlockIdx() != 0) return;
    LocalTensor<float> x = b.out.AllocTensor<float>();
    Duplicate(x, 0.0F, int32_t(N));
    b.store(x);
    SetFlag<HardEvent::MTE3_S>(EVENT_ID0);
    WaitFlag<HardEvent::MTE3_S>(EVENT_ID0);
    b.target.GetValue(3);
}

// ---- buffers and queues ----

KERNEL(ub_capacity) {
    TBuf<TPosition::VECCALC> all;
    b.pipe.InitBuffer(all, 188160 - 3 * N * 4 + 32);
}
KERNEL(buffer_count) {
    TQue<TPosition::VECIN, 1> queue;
    b.pipe.InitBuffer(queue, 8, 32);  // with the one there is: nine
}
KERNEL(queue_alloc) {
    b.load();
    b.load();
}
KERNEL(queue_depth) {
    TQue<TPosition::VECIN, 1> queue;
    b.pipe.InitBuffer(queue, 2, N * 4);
    for (int i = 0; i < 2; ++i) {
        LocalTensor<float> x = queue.AllocTensor<float>();
        DataCopy(x, b.source, N);
        queue.EnQue(x);
    }
}
KERNEL(queue_empty) {
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopy(x, b.source, N);
    b.in.DeQue<float>();
}
KERNEL(queue_order) {  // freed without having been through the queue
    LocalTensor<float> x = b.in.AllocTensor<float>();
    b.in.FreeTensor(x);
}
KERNEL(queue_order_of_strangers) {
    LocalTensor<float> x = b.load();
    b.out.FreeTensor(x);
}
KERNEL(queue_left) { b.load(); }

// ---- order ----

KERNEL(race_read_after_write) {  // MTE2 into a plain buffer, and no flag for V
    LocalTensor<float> x = b.spare.Get<float>();
    DataCopy(x, b.source, N);
    Adds(x, x, 1.0F, int32_t(N));
}
KERNEL(race_on_missing_dequeue) {  // what was allocated is read, not what came out of the queue
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopy(x, b.source, N);
    b.in.EnQue(x);
    Adds(b.spare.Get<float>(), x, 1.0F, int32_t(N));
    b.in.FreeTensor(b.in.DeQue<float>());
}
KERNEL(race_write_after_read) {  // MTE3 still reads what V writes next
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    if (GetBlockIdx() == 0) DataCopy(b.target, x, N);
    PipeBarrier<PIPE_V>();
    Duplicate(x, 2.0F, int32_t(N));
}
KERNEL(race_write_after_write) {  // V has filled the buffer; MTE2 does not know
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    DataCopy(x, b.source, N);
}
KERNEL(race_with_scalar) {  // the scalar unit runs ahead of V
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    x.GetValue(0);
}
KERNEL(race_in_global_memory) {  // written by MTE3, read back by MTE2 at once
    if (GetBlockIdx() != 0) return;
    LocalTensor<float> y = b.out.AllocTensor<float>();
    Duplicate(y, 1.0F, int32_t(N));
    b.store(y);
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopy(x, b.target, N);
}
KERNEL(barrier) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    Adds(x, x, 1.0F, int32_t(N));
}
KERNEL(barrier_between_writes) {
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, 64);
    Duplicate(x, 2.0F, 64);
}
KERNEL(flag_set_twice) {
    SetFlag<HardEvent::V_S>(EVENT_ID1);
    SetFlag<HardEvent::V_S>(EVENT_ID1);
}
KERNEL(flag_never_set) { WaitFlag<HardEvent::V_S>(EVENT_ID1); }
KERNEL(flag_id) { SetFlag<HardEvent::V_S>(6); }
KERNEL(flag_left) { SetFlag<HardEvent::V_S>(EVENT_ID1); }

// ---- and nothing wrong ----

KERNEL(right_vector) {
    LocalTensor<float> x = b.load();
    LocalTensor<float> y = b.out.AllocTensor<float>();
    Muls(y, x, 2.0F, int32_t(N));
    PipeBarrier<PIPE_V>();
    Add(y, y, x, int32_t(N));
    b.in.FreeTensor(x);
    if (GetBlockIdx() == 0) return b.store(y);
    b.out.EnQue(y);
    b.out.FreeTensor(b.out.DeQue<float>());
}
KERNEL(right_padding) {  // padded, the last block is defined to its end
    LocalTensor<float> x = b.in.AllocTensor<float>();
    DataCopyPad(x, b.source, {1, 20, 0, 0, 0}, {true, 0, 3, 7.0F});
    b.in.EnQue(x);
    x = b.in.DeQue<float>();
    Adds(b.spare.Get<float>(), x, 1.0F, 8);
    b.in.FreeTensor(x);
}
KERNEL(right_flags) {  // MTE2 to V to S, each told by a flag; then V again, which MTE2 waits for
    LocalTensor<float> x = b.spare.Get<float>();
    for (int i = 0; i < 2; ++i) {
        DataCopy(x, b.source, N);
        SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
        WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
        Adds(x, x, 1.0F, int32_t(N));
        SetFlag<HardEvent::V_S>(EVENT_ID0);
        WaitFlag<HardEvent::V_S>(EVENT_ID0);
        x.GetValue(5);
        SetFlag<HardEvent::S_MTE2>(EVENT_ID0);
        WaitFlag<HardEvent::S_MTE2>(EVENT_ID0);
    }
}
KERNEL(right_in_place) {  // an iteration may write exactly what it reads; broadcast blocks may repeat
    LocalTensor<float> x = b.spare.Get<float>();
    Duplicate(x, 1.0F, int32_t(N));
    PipeBarrier<PIPE_V>();
    Add(x, x, x, 64, 3, {1, 1, 1, 8, 8, 8});
    PipeBarrier<PIPE_V>();
    Mul(x, x, x[192], 64, 3, {1, 1, 0, 8, 8, 0});
}

}  // namespace

extern "C" {

int run_kernel(const char* name, Arrays given) {
    arrays = given;
    const auto found = Registered::all().find(name);
    return found == Registered::all().end() ? -1 : emu::launch(name, 2, found->second);
}

// The kernels' names, one a line.
const char* kernel_names() {
    static std::string names;
    names.clear();
    for (const auto& [name, kernel] : Registered::all()) names += name + "\n";
    return names.c_str();
}

// Bits of what a float becomes, to be compared with numpy.
void narrow(const float* values, uint16_t* halves, uint16_t* brains, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) halves[i] = half(values[i]).bits, brains[i] = bfloat16_t(values[i]).bits;
}
void widen(const uint16_t* bits, float* halves, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) halves[i] = emu::HALVES[bits[i]];
}
}
