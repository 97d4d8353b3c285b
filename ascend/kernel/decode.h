// Paged attention of one query a sequence.
//
// A task is (sequence, KV head, split): splits share a sequence's keys out to cores that would be idle, and `Combine`
// merges them on the same stream.
#pragma once

#include "attend.h"

namespace paged_kv {

struct DecodeArrays {
    GM_ADDR query, key_pages, value_pages, block_table, seq_lens;  // T, T, T, int32, int32
    GM_ADDR out, lse;                                              // T, float; unused where there are splits
    GM_ADDR partial_out, partial_lse;                              // float [tasks, splits, group, dim] and [… lanes]
};

template <typename T>
class Decode {
public:
    __aicore__ inline Decode(const DecodeArrays& a, const DecodeTiling& tiling)
        : t(tiling), s(tiling.common.shape), group(tiling.common.group), dim(s.head_dim), lanes(tiling.common.lanes),
          tiles(pipe, tiling.common, a.key_pages, a.value_pages, a.block_table), attend(pipe, tiling.common) {
        query.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.query));
        lens.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(a.seq_lens));
        out.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.out));
        lse.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.lse));
        partialOut.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.partial_out));
        partialLse.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.partial_lse));
        pipe.InitBuffer(outs, 1, group * dim * uint32_t(sizeof(float)));
        pipe.InitBuffer(lses, 1, lanes * uint32_t(sizeof(float)));
    }

    __aicore__ inline void Process() {
        const uint32_t tasks = s.batch * s.num_kv_heads * t.num_splits;
        for (uint32_t task = GetBlockIdx(); task < tasks; task += GetBlockNum()) {
            const uint32_t split = task % t.num_splits, pair = task / t.num_splits;
            const uint32_t sequence = pair / s.num_kv_heads, head = pair % s.num_kv_heads;
            const auto len = uint32_t(lens.GetValue(sequence));
            const bool windowed = s.window_left >= 0 && len > uint32_t(s.window_left) + 1;
            const uint32_t unseen = windowed ? len - 1 - uint32_t(s.window_left) : 0;
            const uint32_t begin = unseen + split * t.split_tokens;
            if (begin < len) {
                tiles.Begin(sequence, head);
                attend.Begin(query[uint64_t(pair) * group * dim], 1, int64_t(len) - 1, true);
                attend.Over(tiles, begin, Min(len, begin + t.split_tokens));
                Finish(pair, split);
            } else if (t.num_splits == 1) {
                Nothing(pair);
            }  // else the combine knows that this split is empty
        }
    }

private:
    __aicore__ inline void Finish(uint32_t pair, uint32_t split) {
        LocalTensor<float> logs = lses.template AllocTensor<float>();
        attend.Close(logs);
        lses.EnQue(logs);
        LocalTensor<float> o = outs.template AllocTensor<float>();
        const bool whole = t.num_splits == 1;
        if (whole) attend.Output(o.template ReinterpretCast<T>());
        else attend.Output(o);
        outs.EnQue(o);
        if (whole) return Store(pair);
        o = outs.template DeQue<float>();
        const uint64_t place = uint64_t(pair) * t.num_splits + split;
        DataCopy(partialOut[place * group * dim], o, group * dim);
        outs.FreeTensor(o);
        logs = lses.template DeQue<float>();
        DataCopy(partialLse[place * lanes], logs, lanes);
        lses.FreeTensor(logs);
    }

    // A sequence without tokens.
    __aicore__ inline void Nothing(uint32_t pair) {
        LocalTensor<T> o = outs.template AllocTensor<T>();
        Clear(o, group * dim);
        outs.EnQue(o);
        LocalTensor<float> logs = lses.template AllocTensor<float>();
        Duplicate(logs, MINUS_INFINITY, int32_t(lanes));
        lses.EnQue(logs);
        Store(pair);
    }

    __aicore__ inline void Store(uint32_t pair) {
        LocalTensor<T> o = outs.template DeQue<T>();
        DataCopy(out[uint64_t(pair) * group * dim], o, group * dim);
        outs.FreeTensor(o);
        LocalTensor<float> logs = lses.template DeQue<float>();
        DataCopyPad(lse[uint64_t(pair) * group], logs, OneBlock<float>(group));
        lses.FreeTensor(logs);
    }

    DecodeTiling t;
    Shape s;
    uint32_t group, dim, lanes;
    TPipe pipe;
    Tiles<T> tiles;
    Attend<T> attend;
    TQue<TPosition::VECOUT, 1> outs, lses;
    GlobalTensor<T> query, out;
    GlobalTensor<int32_t> lens;
    GlobalTensor<float> lse, partialOut, partialLse;
};

}  // namespace paged_kv
