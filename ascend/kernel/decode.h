// Paged attention of one query a sequence, with online softmax in float32.
//
// A task is (sequence, KV head, split). Its keys and values come through UB tile by tile, once for all query heads of
// the group: while a tile is worked on, the next one is on its way (one queue, two buffers: K0 V0 K1 V1 …). Tiles begin
// where the split begins, not at a page, so a window or a partial last page needs no mask: only computed tokens are read.
//
//   scores   a repeat multiplies one block of q with the same block of 4 keys (8 in float32) and adds to one
//            accumulator block a key; BlockReduceSum, and PairReduceSum for half, leave one float a key
//   softmax  all heads of the group at once, one repeat a head and 64 keys
//   output   a repeat adds p·v of one value to the accumulator row of its key modulo `rows`; the rows are added up at
//            the end, so that instructions in flight never wait for each other's sums
//
// bfloat16 has no arithmetic on the vector unit: tiles are cast to float32 first, in panels of 64 elements a token.
#pragma once

#include <type_traits>

#include "common.h"

namespace paged_kv {

struct DecodeArrays {
    GM_ADDR query, key_pages, value_pages, block_table, seq_lens;  // T, T, T, int32, int32
    GM_ADDR out, lse;                                              // T, float; unused where there are splits
    GM_ADDR partial_out, partial_lse;                              // float [tasks, splits, group, dim] and [… lanes_group]
};

template <typename T>
class Decode {
    static constexpr bool DIRECT = std::is_same<T, half>::value;
    using C = typename std::conditional<DIRECT, half, float>::type;  // what is multiplied
    static constexpr uint32_t LANES = 32 / sizeof(C);                // elements of a block
    static constexpr uint32_t TOKENS = REPEAT / LANES;               // keys of a repeat

public:
    __aicore__ inline Decode(const DecodeArrays& a, const DecodeTiling& tiling)
        : t(tiling), group(tiling.group), dim(tiling.shape.head_dim), lanes(tiling.lanes_group), width(tiling.score_width) {
        query.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.query));
        key.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.key_pages));
        value.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.value_pages));
        table.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(a.block_table));
        lens.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(a.seq_lens));
        out.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.out));
        lse.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.lse));
        partialOut.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.partial_out));
        partialLse.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.partial_lse));

        // The sum of these is what the host's Budget() adds up.
        pipe.InitBuffer(tiles, 2, t.tile_tokens * dim * uint32_t(sizeof(T)));
        pipe.InitBuffer(queries, 1, group * dim * uint32_t(sizeof(T)));
        pipe.InitBuffer(outs, 1, group * dim * uint32_t(sizeof(float)));
        pipe.InitBuffer(lses, 1, lanes * uint32_t(sizeof(float)));
        pipe.InitBuffer(tableBuffer, t.table_chunk * uint32_t(sizeof(int32_t)));
        pipe.InitBuffer(scoreBuffer, group * width * uint32_t(sizeof(float)));
        pipe.InitBuffer(dotBuffer, t.tile_tokens * (LANES + 2) * uint32_t(sizeof(float)));
        pipe.InitBuffer(sumBuffer, group * t.rows * dim * uint32_t(sizeof(float)));
        pipe.InitBuffer(spreadBuffer, t.tile_tokens * 32);
        pipe.InitBuffer(stateBuffer, lanes * (6 + 8) * uint32_t(sizeof(float)));
        if (DIRECT) {
            pipe.InitBuffer(weightBuffer, group * width * uint32_t(sizeof(half)));
        } else {
            pipe.InitBuffer(wideBuffer, RoundUp(dim, REPEAT) * t.tile_tokens * uint32_t(sizeof(float)));
            pipe.InitBuffer(wideQueryBuffer, group * dim * uint32_t(sizeof(float)));
        }
        score = scoreBuffer.template Get<float>();
        dots = dotBuffer.template Get<float>();
        pairs = dots[t.tile_tokens * LANES];
        sums = sumBuffer.template Get<float>();
        spread = spreadBuffer.template Get<C>();
        max = stateBuffer.template Get<float>();
        newMax = max[lanes], total = max[2 * lanes], decay = max[3 * lanes], part = max[4 * lanes], factor = max[6 * lanes];
        tableChunk = tableBuffer.template Get<int32_t>();
        panelStep = DIRECT ? REPEAT : REPEAT * t.tile_tokens;
        rowElements = DIRECT ? dim : REPEAT;
    }

    __aicore__ inline void Process() {
        const uint32_t tasks = t.shape.batch * t.shape.num_kv_heads * t.num_splits;
        for (uint32_t task = GetBlockIdx(); task < tasks; task += GetBlockNum()) {
            const uint32_t split = task % t.num_splits, pair = task / t.num_splits;
            sequence = pair / t.shape.num_kv_heads, head = pair % t.shape.num_kv_heads;
            const auto len = uint32_t(lens.GetValue(sequence));
            const bool windowed = t.shape.window_left >= 0 && len > uint32_t(t.shape.window_left) + 1;
            const uint32_t seen = windowed ? len - 1 - uint32_t(t.shape.window_left) : 0;
            const uint32_t begin = seen + split * t.split_tokens;
            chunkStart = t.shape.table_width;  // nothing of this sequence's table is here
            if (begin < len) {
                Attend(begin, Min(len, begin + t.split_tokens));
                Finish(pair, split);
            } else if (t.num_splits == 1) {
                Nothing(pair);
            }  // else the combine knows that this split is empty
        }
    }

private:
    __aicore__ inline void Attend(uint32_t begin, uint32_t end) {
        LoadQuery();
        Duplicate(max, LOWEST, int32_t(lanes));
        Duplicate(total, 0.0F, int32_t(lanes));
        Duplicate(part, 0.0F, int32_t(2 * lanes));
        Duplicate(sums, 0.0F, int32_t(group * t.rows * dim));
        Load(key, begin, Min(t.tile_tokens, end - begin));
        for (uint32_t token = begin; token < end; token += t.tile_tokens) {
            const uint32_t count = Min(t.tile_tokens, end - token), next = token + t.tile_tokens;
            Load(value, token, count);
            LocalTensor<T> keys = tiles.template DeQue<T>();
            Scores(keys, count);
            tiles.FreeTensor(keys);
            if (next < end) Load(key, next, Min(t.tile_tokens, end - next));
            Softmax();
            LocalTensor<T> values = tiles.template DeQue<T>();
            Accumulate(values, count);
            tiles.FreeTensor(values);
        }
        if (DIRECT) queries.FreeTensor(heldQuery);
    }

    // ---- copies in ----

    __aicore__ inline void LoadQuery() {
        LocalTensor<T> q = queries.template AllocTensor<T>();
        DataCopy(q, query[(uint64_t(sequence) * t.shape.num_heads + head * group) * dim], group * dim);
        queries.EnQue(q);
        heldQuery = queries.template DeQue<T>();
        if constexpr (DIRECT) {
            q_ = heldQuery;
        } else {
            q_ = wideQueryBuffer.template Get<float>();
            Cast(q_, heldQuery, RoundMode::CAST_NONE, int32_t(group * dim));
            queries.FreeTensor(heldQuery);
        }
    }

    // Keys or values of `count` tokens from `token` on, page by page.
    __aicore__ inline void Load(const GlobalTensor<T>& pages, uint32_t token, uint32_t count) {
        LocalTensor<T> tile = tiles.template AllocTensor<T>();
        const DataCopyPadExtParams<T> unpadded;
        for (uint32_t done = 0; done < count;) {
            const uint32_t position = token + done, offset = position % t.shape.page_size;
            const uint32_t rows = Min(count - done, t.shape.page_size - offset);
            const uint64_t start = uint64_t(Page(position / t.shape.page_size)) * t.page_stride +
                                   head * t.head_stride + offset * t.token_stride;
            const bool dense = t.token_stride == dim;
            const DataCopyExtParams shape(dense ? 1 : rows, (dense ? rows : 1) * dim * uint32_t(sizeof(T)),
                                          dense ? 0 : uint32_t(t.token_stride - dim) * uint32_t(sizeof(T)), 0, 0);
            DataCopyPad(tile[done * dim], pages[start], shape, unpadded);
            done += rows;
        }
        tiles.EnQue(tile);
    }

    // The page at `index` of the sequence's table, whose rows come to UB in chunks.
    __aicore__ inline uint32_t Page(uint32_t index) {
        if (index < chunkStart || index >= chunkStart + t.table_chunk) {
            chunkStart = index;
            const uint32_t count = Min(t.table_chunk, t.shape.table_width - index);
            SetFlag<HardEvent::S_MTE2>(EVENT_ID0);  // the scalar unit has read the last chunk: MTE2 may replace it
            WaitFlag<HardEvent::S_MTE2>(EVENT_ID0);
            DataCopyPad(tableChunk, table[uint64_t(sequence) * t.shape.table_width + index], OneBlock<int32_t>(count),
                        DataCopyPadExtParams<int32_t>());
            SetFlag<HardEvent::MTE2_S>(EVENT_ID0);  // MTE2 has brought the chunk: the scalar unit may read it
            WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
        }
        return uint32_t(tableChunk.GetValue(index - chunkStart));
    }

    // ---- arithmetic ----

    // The tile as it is multiplied: itself, or cast into panels [dim / 64][tile_tokens][64]. Whoever multiplies has
    // a barrier to wait at anyway, so there is none here.
    __aicore__ inline LocalTensor<C> Multipliable(const LocalTensor<T>& tile, uint32_t tokens) {
        if constexpr (DIRECT) {
            return tile;
        } else {
            LocalTensor<float> wide = wideBuffer.template Get<float>();
            for (uint32_t d = 0; d < dim; d += REPEAT)
                Cast(wide[d * t.tile_tokens], tile[d], RoundMode::CAST_NONE, uint64_t(Min(REPEAT, dim - d)),
                     tokens, UnaryRepeatParams(1, 1, 8, dim / 16));
            return wide;
        }
    }

    __aicore__ inline void Scores(const LocalTensor<T>& keys, uint32_t count) {
        const uint32_t padded = RoundUp(count, 8);  // whole repeats; what lies beyond `count` is overwritten below
        if (padded > count) {
            Clear(keys[count * dim], (padded - count) * dim);
            Then();
        }
        const LocalTensor<C> k = Multipliable(keys, padded);
        const uint32_t rowBlocks = rowElements / LANES;
        for (uint32_t g = 0; g < group; ++g) {
            const LocalTensor<float> s = score[g * width];
            Duplicate(dots, 0.0F, int32_t(padded * LANES));
            Then();
            for (uint32_t d = 0; d < dim; d += LANES) {
                MulAddDst(dots, q_[g * dim + d], k[d / REPEAT * panelStep + d % REPEAT], uint64_t(REPEAT),
                          padded / TOKENS,
                          BinaryRepeatParams(1, 0, rowBlocks, 8, 0, TOKENS * rowBlocks));
                Then();
            }
            const LocalTensor<float> blocks = DIRECT ? pairs : s;
            BlockReduceSum(blocks, dots, int32_t(padded / TOKENS), int32_t(REPEAT), 1, 1, 8);
            Then();
            if (DIRECT) {
                const uint32_t full = 2 * padded / REPEAT, rest = 2 * padded % REPEAT;
                if (full) PairReduceSum(s, pairs, int32_t(full), int32_t(REPEAT), 1, 1, 8);
                if (rest) PairReduceSum(s[full * 32], pairs[full * REPEAT], 1, int32_t(rest), 1, 1, 8);
                Then();
            }
            Muls(s, s, t.shape.scale, int32_t(padded));
            Then();
            if (t.shape.soft_cap > 0) SoftCap(s, padded);
        }
        for (uint32_t start = 0; start < width; start += REPEAT) {
            if (count >= start + REPEAT) continue;
            const uint32_t used = count > start ? count - start : 0;
            uint64_t mask[2] = {~uint64_t(0) << used, 0};
            Duplicate(score[start], LOWEST, mask, group, 1, width / 8);
        }
        Then();
    }

    // cap · tanh(x / cap) = cap − 2 cap / (exp(2 x / cap) + 1): an exponential that overflows still gives cap.
    __aicore__ inline void SoftCap(const LocalTensor<float>& s, uint32_t count) {
        const float cap = t.shape.soft_cap;
        Muls(s, s, 2 / cap, int32_t(count));
        Duplicate(dots, -2 * cap, int32_t(count));
        Then();
        Exp(s, s, int32_t(count));
        Then();
        Adds(s, s, 1.0F, int32_t(count));
        Then();
        Div(s, dots, s, int32_t(count));
        Then();
        Adds(s, s, cap, int32_t(count));
        Then();
    }

    // Scores become weights; `max`, `total` and the accumulators follow the new maximum.
    __aicore__ inline void Softmax() {
        const int32_t heads = int32_t(lanes), all = int32_t(group * width);
        const uint32_t row = width / 8;
        const uint32_t parts = width / REPEAT;
        for (uint32_t p = 0; p < parts; ++p)
            WholeReduceMax(part[p * lanes], score[p * REPEAT], int32_t(REPEAT), int32_t(group), 1, 1, row,
                           ReduceOrder::ORDER_ONLY_VALUE);
        Then();
        Max(newMax, max, part, heads);
        Then();
        if (parts > 1) {
            Max(newMax, newMax, part[lanes], heads);
            Then();
        }
        Sub(decay, max, newMax, heads);
        Spread(factor, newMax, lanes);
        Then();
        Exp(decay, decay, heads);
        Adds(max, newMax, 0.0F, heads);
        for (uint32_t p = 0; p < parts; ++p)
            Sub(score[p * REPEAT], score[p * REPEAT], factor, uint64_t(REPEAT), group,
                BinaryRepeatParams(1, 1, 0, row, row, 1));
        Then();
        Exp(score, score, all);
        Mul(total, total, decay, heads);
        Spread(factor, decay, lanes);
        Then();
        for (uint32_t p = 0; p < parts; ++p)
            WholeReduceSum(part[p * lanes], score[p * REPEAT], int32_t(REPEAT), int32_t(group), 1, 1, row);
        if constexpr (DIRECT) Cast(weightBuffer.template Get<half>(), score, RoundMode::CAST_RINT, all);
        for (uint32_t g = 0; g < group; ++g) {
            const uint32_t own = t.rows * dim;
            ByFactor<Multiply>(sums[g * own], sums[g * own], factor[g * 8], own);
        }
        Then();
        for (uint32_t p = 0; p < parts; ++p) {
            Add(total, total, part[p * lanes], heads);
            Then();
        }
    }

    __aicore__ inline void Accumulate(const LocalTensor<T>& values, uint32_t count) {
        const LocalTensor<C> v = Multipliable(values, count);
        LocalTensor<C> weights;
        if constexpr (DIRECT) weights = weightBuffer.template Get<half>();
        else weights = score;
        for (uint32_t g = 0; g < group; ++g) {
            Spread(spread, weights[g * width], RoundUp(count, 8));
            Then();
            for (uint32_t token = 0; token < count; token += t.rows) {
                const uint32_t rows = Min(t.rows, count - token);
                for (uint32_t d = 0; d < dim; d += REPEAT)
                    MulAddDst(sums[g * t.rows * dim + d], v[d / REPEAT * panelStep + token * rowElements],
                              spread[token * LANES], uint64_t(Min(REPEAT, dim - d)), rows,
                              BinaryRepeatParams(1, 1, 0, dim / 8, rowElements / LANES, 1));
                Then();
            }
        }
    }

    // ---- copies out ----

    __aicore__ inline void Finish(uint32_t pair, uint32_t split) {
        const uint32_t own = t.rows * dim;
        for (uint32_t rows = t.rows / 2; rows > 0; rows /= 2) {
            for (uint32_t g = 0; g < group; ++g)
                Add(sums[g * own], sums[g * own], sums[g * own + rows * dim], int32_t(rows * dim));
            Then();
        }
        Spread(factor, total, lanes);
        Ln(decay, total, int32_t(lanes));
        Then();
        LocalTensor<float> logs = lses.template AllocTensor<float>();
        Add(logs, decay, max, int32_t(lanes));
        lses.EnQue(logs);
        LocalTensor<float> o = outs.template AllocTensor<float>();
        const bool whole = t.num_splits == 1;
        for (uint32_t g = 0; g < group; ++g)
            ByFactor<Divide>(whole ? sums[g * own] : o[g * dim], sums[g * own], factor[g * 8], dim);
        if (whole) {
            Then();
            const LocalTensor<T> rounded = o.template ReinterpretCast<T>();
            for (uint32_t g = 0; g < group; ++g)
                Cast(rounded[g * dim], sums[g * own], RoundMode::CAST_RINT, int32_t(dim));
        }
        Then();
        outs.EnQue(o);
        if (whole) return Store(pair);
        LocalTensor<float> ready = outs.template DeQue<float>();
        const uint64_t place = uint64_t(pair) * t.num_splits + split;
        DataCopy(partialOut[place * group * dim], ready, group * dim);
        outs.FreeTensor(ready);
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
    uint32_t group, dim, lanes, width, panelStep, rowElements;
    uint32_t sequence = 0, head = 0, chunkStart = 0;
    TPipe pipe;
    TQue<TPosition::VECIN, 2> tiles;
    TQue<TPosition::VECIN, 1> queries;
    TQue<TPosition::VECOUT, 1> outs, lses;
    TBuf<TPosition::VECIN> tableBuffer;
    TBuf<TPosition::VECCALC> scoreBuffer, dotBuffer, sumBuffer, spreadBuffer, stateBuffer, weightBuffer, wideBuffer,
        wideQueryBuffer;
    GlobalTensor<T> query, key, value, out;
    GlobalTensor<int32_t> table, lens;
    GlobalTensor<float> lse, partialOut, partialLse;
    LocalTensor<T> heldQuery;
    LocalTensor<C> q_, spread;
    LocalTensor<float> score, dots, pairs, sums, max, newMax, total, decay, part, factor;
    LocalTensor<int32_t> tableChunk;
};

}  // namespace paged_kv
