// Paged attention of several queries a sequence: its last ones, query i of n at position len − n + i.
//
// A task is (sequence, KV head, chunk of queries). Its keys run from where the first query's window begins to the last
// query's position, so tiles are read once for the chunk's queries and all their heads. A query before position 0 sees
// nothing: 0, and minus infinity. The matrix (cube) unit would do this work faster; correctness doesn't ask for it.
#pragma once

#include "attend.h"

namespace paged_kv {

struct PrefillArrays {
    GM_ADDR query, key_pages, value_pages, block_table, seq_lens, cu_seqlens_q;  // T, T, T, int32, int32, int32
    GM_ADDR out, lse;                                                            // T, float
};

template <typename T>
class Prefill {
public:
    __aicore__ inline Prefill(const PrefillArrays& a, const PrefillTiling& tiling)
        : t(tiling), s(tiling.common.shape), group(tiling.common.group), dim(s.head_dim), lanes(tiling.common.lanes),
          tiles(pipe, tiling.common, a.key_pages, a.value_pages, a.block_table), attend(pipe, tiling.common) {
        query.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.query));
        lens.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(a.seq_lens));
        starts.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(a.cu_seqlens_q));
        out.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.out));
        lse.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.lse));
        pipe.InitBuffer(outs, 1, tiling.common.rows * dim * uint32_t(sizeof(T)));
        pipe.InitBuffer(lses, 1, lanes * 8 * uint32_t(sizeof(float)));
        pipe.InitBuffer(logBuffer, lanes * uint32_t(sizeof(float)));
        logs = logBuffer.template Get<float>();
    }

    __aicore__ inline void Process() {
        const uint32_t tasks = s.batch * s.num_kv_heads * t.chunks;
        for (uint32_t task = GetBlockIdx(); task < tasks; task += GetBlockNum()) {
            const uint32_t pair = task / t.chunks, sequence = pair / s.num_kv_heads, head = pair % s.num_kv_heads;
            const auto start = uint32_t(starts.GetValue(sequence));
            const uint32_t all = uint32_t(starts.GetValue(sequence + 1)) - start, first = task % t.chunks * t.queries;
            if (first >= all) continue;
            const auto len = uint32_t(lens.GetValue(sequence));
            const uint32_t count = Min(t.queries, all - first);
            const int64_t position = int64_t(len) - all + first;
            const uint64_t row = (uint64_t(start) + first) * s.num_heads + head * group;
            const int64_t last = t.causal ? position + count : int64_t(len);
            const uint32_t end = last > 0 ? uint32_t(last) : 0;
            const bool windowed = s.window_left >= 0 && position > s.window_left;
            const uint32_t begin = windowed ? uint32_t(position - s.window_left) : 0;
            const uint32_t blind = t.causal && position < 0 ? Min(count, uint32_t(-position)) : 0;
            LocalTensor<T> o = outs.template AllocTensor<T>();
            LocalTensor<float> spread = lses.template AllocTensor<float>();
            if (begin < end) {
                tiles.Begin(sequence, head);
                attend.Begin(query[row * dim], count, position, t.causal != 0);
                attend.Over(tiles, begin, end);
                attend.Close(logs);
                attend.Output(o);
                if (blind) Nothing(o, blind, blind * group);
            } else {
                Nothing(o, count, lanes);
            }
            Spread(spread, logs, lanes);
            outs.EnQue(o);
            lses.EnQue(spread);
            Store(row, count);
        }
    }

private:
    // The first `count` queries see no key.
    __aicore__ inline void Nothing(const LocalTensor<T>& o, uint32_t count, uint32_t values) {
        Clear(o, count * group * dim);
        Duplicate(logs, MINUS_INFINITY, int32_t(values));
        Then();
    }

    __aicore__ inline void Store(uint64_t row, uint32_t count) {
        LocalTensor<T> o = outs.template DeQue<T>();
        const auto bytes = uint32_t(sizeof(T));
        DataCopyPad(out[row * dim], o,
                    DataCopyExtParams(count, group * dim * bytes, 0, (s.num_heads - group) * dim * bytes, 0));
        outs.FreeTensor(o);
        LocalTensor<float> spread = lses.template DeQue<float>();
        for (uint32_t q = 0; q < count; ++q)  // one value a block, so that any group's may begin anywhere
            DataCopyPad(lse[row + uint64_t(q) * s.num_heads], spread[q * group * 8],
                        DataCopyExtParams(group, uint32_t(sizeof(float)), 0, 0, 0));
        lses.FreeTensor(spread);
    }

    PrefillTiling t;
    Shape s;
    uint32_t group, dim, lanes;
    TPipe pipe;
    Tiles<T> tiles;
    Attend<T> attend;
    TQue<TPosition::VECOUT, 1> outs, lses;
    TBuf<TPosition::VECCALC> logBuffer;
    GlobalTensor<T> query, out;
    GlobalTensor<int32_t> lens, starts;
    GlobalTensor<float> lse;
    LocalTensor<float> logs;
};

}  // namespace paged_kv
