// Merges the splits of each sequence in their order: the same online softmax as between tiles, on whole outputs.
#pragma once

#include "decode.h"

namespace paged_kv {

template <typename T>
class Combine {
public:
    __aicore__ inline Combine(const DecodeArrays& a, const DecodeTiling& tiling)
        : t(tiling), s(tiling.common.shape), group(tiling.common.group), size(group * s.head_dim),
          lanes(tiling.common.lanes) {
        lens.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(a.seq_lens));
        out.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.out));
        lse.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.lse));
        partialOut.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.partial_out));
        partialLse.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.partial_lse));
        // Less than what Decode takes for the same sizes, so its budget covers this.
        pipe.InitBuffer(parts, 2, size * uint32_t(sizeof(float)));
        pipe.InitBuffer(partLogs, 2, lanes * uint32_t(sizeof(float)));
        pipe.InitBuffer(outs, 1, size * uint32_t(sizeof(T)));
        pipe.InitBuffer(lses, 1, lanes * uint32_t(sizeof(float)));
        pipe.InitBuffer(sumBuffer, size * uint32_t(sizeof(float)));
        pipe.InitBuffer(stateBuffer, lanes * (5 + 16) * uint32_t(sizeof(float)));
        sums = sumBuffer.template Get<float>();
        max = stateBuffer.template Get<float>();
        newMax = max[lanes], total = max[2 * lanes], decay = max[3 * lanes], weight = max[4 * lanes];
        factor = max[5 * lanes], weights = max[13 * lanes];
    }

    __aicore__ inline void Process() {
        const uint32_t pairs = s.batch * s.num_kv_heads;
        for (uint32_t pair = GetBlockIdx(); pair < pairs; pair += GetBlockNum()) {
            const auto len = uint32_t(lens.GetValue(pair / s.num_kv_heads));
            const bool windowed = s.window_left >= 0 && len > uint32_t(s.window_left) + 1;
            const uint32_t keys = windowed ? uint32_t(s.window_left) + 1 : len;
            Merge(pair, (keys + t.split_tokens - 1) / t.split_tokens);
        }
    }

private:
    __aicore__ inline void Load(uint64_t place) {
        LocalTensor<float> part = parts.template AllocTensor<float>();
        DataCopy(part, partialOut[place * size], size);
        parts.EnQue(part);
        LocalTensor<float> logs = partLogs.template AllocTensor<float>();
        DataCopy(logs, partialLse[place * lanes], lanes);
        partLogs.EnQue(logs);
    }

    __aicore__ inline void Merge(uint32_t pair, uint32_t splits) {
        const uint64_t first = uint64_t(pair) * t.num_splits;
        const int32_t heads = int32_t(lanes);
        Duplicate(max, LOWEST, heads);
        Duplicate(total, 0.0F, heads);
        Duplicate(sums, 0.0F, int32_t(size));
        Then();
        if (splits) Load(first);
        for (uint32_t split = 0; split < splits; ++split) {
            if (split + 1 < splits) Load(first + split + 1);
            LocalTensor<float> part = parts.template DeQue<float>();
            LocalTensor<float> logs = partLogs.template DeQue<float>();
            Max(newMax, max, logs, heads);
            Then();
            Sub(decay, max, newMax, heads);
            Sub(weight, logs, newMax, heads);
            Then();
            partLogs.FreeTensor(logs);
            Exp(decay, decay, heads);
            Exp(weight, weight, heads);
            Adds(max, newMax, 0.0F, heads);
            Then();
            Mul(total, total, decay, heads);
            Spread(factor, decay, lanes);
            Spread(weights, weight, lanes);
            Then();
            Add(total, total, weight, heads);
            for (uint32_t g = 0; g < group; ++g) {
                const uint32_t dim = s.head_dim;
                ByFactor<Multiply>(sums[g * dim], sums[g * dim], factor[g * 8], dim);
                ByFactor<Multiply>(part[g * dim], part[g * dim], weights[g * 8], dim);
            }
            Then();
            Add(sums, sums, part, int32_t(size));
            parts.FreeTensor(part);
        }
        Store(pair, splits != 0);
    }

    __aicore__ inline void Store(uint32_t pair, bool any) {
        LocalTensor<T> o = outs.template AllocTensor<T>();
        LocalTensor<float> logs = lses.template AllocTensor<float>();
        if (any) {
            Spread(factor, total, lanes);
            Ln(decay, total, int32_t(lanes));
            Then();
            Add(logs, decay, max, int32_t(lanes));
            for (uint32_t g = 0; g < group; ++g) {
                const LocalTensor<float> row = sums[g * s.head_dim];
                ByFactor<Divide>(row, row, factor[g * 8], s.head_dim);
            }
            Then();
            Cast(o, sums, RoundMode::CAST_RINT, int32_t(size));
            Then();
        } else {
            Clear(o, size);
            Duplicate(logs, MINUS_INFINITY, int32_t(lanes));
        }
        outs.EnQue(o);
        lses.EnQue(logs);
        o = outs.template DeQue<T>();
        DataCopy(out[uint64_t(pair) * size], o, size);
        outs.FreeTensor(o);
        logs = lses.template DeQue<float>();
        DataCopyPad(lse[uint64_t(pair) * group], logs, OneBlock<float>(group));
        lses.FreeTensor(logs);
    }

    DecodeTiling t;
    Shape s;
    uint32_t group, size, lanes;
    TPipe pipe;
    TQue<TPosition::VECIN, 2> parts, partLogs;
    TQue<TPosition::VECOUT, 1> outs, lses;
    TBuf<TPosition::VECCALC> sumBuffer, stateBuffer;
    GlobalTensor<T> out;
    GlobalTensor<int32_t> lens;
    GlobalTensor<float> lse, partialOut, partialLse;
    LocalTensor<float> sums, max, newMax, total, decay, weight, factor, weights;
};

}  // namespace paged_kv
