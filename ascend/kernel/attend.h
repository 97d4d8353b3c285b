// Online softmax in float32 over the tiles of one KV head, for `rows` pairs of a query and a head at once: each key and
// value comes into UB once for all of them.
//
//   scores   a repeat multiplies one block of q with the same block of 4 keys (8 in float32) and adds to one
//            accumulator block a key; BlockReduceSum, and PairReduceSum for half, leave one float a key
//   softmax  all rows at once, one repeat a row and 64 keys
//   output   a repeat adds p·v of one value to the accumulator of its key modulo `accumulators`; these are added up at
//            the end, so that instructions in flight never wait for each other's sums
//
// Row r belongs to query r / group and head r % group. Of a tile, each query's rows see the tokens from its window's
// start to its own position: what else is in the tile is neither multiplied for them nor counted.
//
// bfloat16 has no arithmetic on the vector unit: tiles are cast to float32 first, in panels of 64 elements a token.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace paged_kv {

// Positions within a tile, [from, to).
struct Range {
    uint32_t from, to;
};

template <typename T>
class Attend {
    static constexpr bool DIRECT = std::is_same<T, half>::value;
    using C = typename std::conditional<DIRECT, half, float>::type;  // what is multiplied
    static constexpr uint32_t LANES = 32 / sizeof(C);                // elements of a block
    static constexpr uint32_t TOKENS = REPEAT / LANES;               // keys of a repeat

public:
    __aicore__ inline Attend(TPipe& pipe, const AttendTiling& tiling)
        : t(tiling), group(tiling.group), dim(tiling.shape.head_dim), lanes(tiling.lanes), width(tiling.score_width),
          own(tiling.accumulators * tiling.shape.head_dim) {
        pipe.InitBuffer(queries, 1, t.rows * dim * uint32_t(sizeof(T)));
        pipe.InitBuffer(scoreBuffer, t.rows * width * uint32_t(sizeof(float)));
        pipe.InitBuffer(dotBuffer, t.tile_tokens * (LANES + 2) * uint32_t(sizeof(float)));
        pipe.InitBuffer(sumBuffer, t.rows * own * uint32_t(sizeof(float)));
        pipe.InitBuffer(spreadBuffer, t.tile_tokens * 32);
        pipe.InitBuffer(stateBuffer, lanes * (6 + 8) * uint32_t(sizeof(float)));
        if (DIRECT) {
            pipe.InitBuffer(weightBuffer, t.rows * width * uint32_t(sizeof(half)));
        } else {
            pipe.InitBuffer(wideBuffer, RoundUp(dim, REPEAT) * t.tile_tokens * uint32_t(sizeof(float)));
            pipe.InitBuffer(wideQueryBuffer, t.rows * dim * uint32_t(sizeof(float)));
        }
        score = scoreBuffer.template Get<float>();
        dots = dotBuffer.template Get<float>();
        pairs = dots[t.tile_tokens * LANES];
        sums = sumBuffer.template Get<float>();
        spread = spreadBuffer.template Get<C>();
        max = stateBuffer.template Get<float>();
        newMax = max[lanes], total = max[2 * lanes], decay = max[3 * lanes], part = max[4 * lanes];
        factor = max[6 * lanes];
        panelStep = DIRECT ? REPEAT : REPEAT * t.tile_tokens;
        rowElements = DIRECT ? dim : REPEAT;
    }

    // The task's queries lie `num_heads` rows apart in `from`. The first stands at `position`, the others follow.
    __aicore__ inline void Begin(const GlobalTensor<T>& from, uint32_t num_queries, int64_t at_position,
                                 bool is_causal) {
        count_ = num_queries, position = at_position, causal = is_causal, rows = num_queries * group;
        const uint32_t row = dim * uint32_t(sizeof(T));
        LocalTensor<T> q = queries.template AllocTensor<T>();
        DataCopyPad(q, from, DataCopyExtParams(num_queries, group * row, (t.shape.num_heads - group) * row, 0, 0),
                    DataCopyPadExtParams<T>());
        queries.EnQue(q);
        heldQuery = queries.template DeQue<T>();
        if constexpr (DIRECT) {
            q_ = heldQuery;
        } else {
            q_ = wideQueryBuffer.template Get<float>();
            Cast(q_, heldQuery, RoundMode::CAST_NONE, int32_t(rows * dim));
            queries.FreeTensor(heldQuery);
        }
        Duplicate(max, LOWEST, int32_t(lanes));
        Duplicate(total, 0.0F, int32_t(lanes));
        Duplicate(part, 0.0F, int32_t(2 * lanes));
        Duplicate(sums, 0.0F, int32_t(rows * own));
    }

    // Keys and values of the tokens in [begin, end), of which there is one at least.
    __aicore__ inline void Over(Tiles<T>& tiles, uint32_t begin, uint32_t end) {
        tiles.Keys(begin, Min(t.tile_tokens, end - begin));
        for (uint32_t token = begin; token < end; token += t.tile_tokens) {
            const uint32_t count = Min(t.tile_tokens, end - token), next = token + t.tile_tokens;
            tiles.Values(token, count);
            const LocalTensor<T> keys = tiles.Next();
            Scores(keys, token, count);
            tiles.Done(keys);
            if (next < end) tiles.Keys(next, Min(t.tile_tokens, end - next));
            Softmax();
            const LocalTensor<T> values = tiles.Next();
            Accumulate(values, token, count);
            tiles.Done(values);
        }
        if (DIRECT) queries.FreeTensor(heldQuery);
    }

    // Adds up each row's accumulators; `logs` receives the rows' log-sum-exp.
    __aicore__ inline void Close(const LocalTensor<float>& logs) {
        for (uint32_t half = t.accumulators / 2; half > 0; half /= 2) {
            for (uint32_t r = 0; r < rows; ++r)
                Add(sums[r * own], sums[r * own], sums[r * own + half * dim], int32_t(half * dim));
            Then();
        }
        Spread(factor, total, lanes);
        Ln(decay, total, int32_t(lanes));
        Then();
        Add(logs, decay, max, int32_t(lanes));
    }

    // After Close: the rows' outputs, one after the other, in float32 or rounded.
    __aicore__ inline void Output(const LocalTensor<float>& out) {
        for (uint32_t r = 0; r < rows; ++r) ByFactor<Divide>(out[r * dim], sums[r * own], factor[r * 8], dim);
        Then();
    }

    __aicore__ inline void Output(const LocalTensor<T>& out) {
        for (uint32_t r = 0; r < rows; ++r) ByFactor<Divide>(sums[r * own], sums[r * own], factor[r * 8], dim);
        Then();
        for (uint32_t r = 0; r < rows; ++r) Cast(out[r * dim], sums[r * own], RoundMode::CAST_RINT, int32_t(dim));
        Then();
    }

private:
    // What a query sees of the tile of `count` tokens from `token` on.
    __aicore__ inline Range Seen(uint32_t query, uint32_t token, uint32_t count) const {
        const int64_t at = position + query - int64_t(token);
        const int64_t first = t.shape.window_left < 0 ? 0 : at - t.shape.window_left;
        const int64_t end = causal ? at + 1 : int64_t(count);
        return {Within(first, count), Within(end, count)};
    }

    __aicore__ static inline uint32_t Within(int64_t place, uint32_t count) {
        return place < 0 ? 0 : place < int64_t(count) ? uint32_t(place) : count;
    }

    // The tile as it is multiplied: itself, or cast into panels [dim / 64][tile_tokens][64], without a barrier after it.
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

    __aicore__ inline void Scores(const LocalTensor<T>& keys, uint32_t token, uint32_t count) {
        const uint32_t padded = RoundUp(count, 8);  // whole repeats; what lies beyond `count` is overwritten below
        if (padded > count) {
            Clear(keys[count * dim], (padded - count) * dim);
            Then();
        }
        const LocalTensor<C> k = Multipliable(keys, padded);
        if constexpr (!DIRECT) Then();
        for (uint32_t query = 0; query < count_; ++query) {
            const Range seen = Seen(query, token, count);
            if (seen.from >= seen.to) continue;
            for (uint32_t r = query * group; r < (query + 1) * group; ++r) Score(r, k, padded);
        }
        for (uint32_t query = 0; query < count_; ++query) Hide(query, Seen(query, token, count));
        Then();
    }

    // The scaled and capped products of one row with the tile's keys.
    __aicore__ inline void Score(uint32_t row, const LocalTensor<C>& k, uint32_t count) {
        const uint32_t rowBlocks = rowElements / LANES;
        const LocalTensor<float> s = score[row * width];
        const BinaryRepeatParams strides(1, 0, rowBlocks, 8, 0, TOKENS * rowBlocks);
        if constexpr (DIRECT) {  // there is no product of halves that is a float, only a sum
            Duplicate(dots, 0.0F, int32_t(count * LANES));
        } else {
            Mul(dots, q_[row * dim], k, uint64_t(REPEAT), count / TOKENS, strides);
        }
        Then();
        for (uint32_t d = DIRECT ? 0 : LANES; d < dim; d += LANES) {
            MulAddDst(dots, q_[row * dim + d], k[d / REPEAT * panelStep + d % REPEAT], uint64_t(REPEAT), count / TOKENS,
                      strides);
            Then();
        }
        const LocalTensor<float> blocks = DIRECT ? pairs : s;
        BlockReduceSum(blocks, dots, int32_t(count / TOKENS), int32_t(REPEAT), 1, 1, 8);
        Then();
        if (DIRECT) {
            const uint32_t full = 2 * count / REPEAT, rest = 2 * count % REPEAT;
            if (full) PairReduceSum(s, pairs, int32_t(full), int32_t(REPEAT), 1, 1, 8);
            if (rest) PairReduceSum(s[full * 32], pairs[full * REPEAT], 1, int32_t(rest), 1, 1, 8);
            Then();
        }
        Muls(s, s, t.shape.scale, int32_t(count));
        Then();
        if (t.shape.soft_cap > 0) SoftCap(s, count);
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

    // Scores of one query's rows outside of what it sees weigh nothing.
    __aicore__ inline void Hide(uint32_t query, Range seen) {
        for (uint32_t start = 0; start < width; start += REPEAT) {
            const uint64_t hidden = ~(Below(seen.to, start) & ~Below(seen.from, start));
            uint64_t mask[2] = {hidden, 0};
            if (hidden) Duplicate(score[query * group * width + start], LOWEST, mask, group, 1, width / 8);
        }
    }

    // One bit for each of the 64 positions from `start` on that are below `end`.
    __aicore__ static inline uint64_t Below(uint32_t end, uint32_t start) {
        if (end <= start) return 0;
        return end - start >= REPEAT ? ~uint64_t(0) : (uint64_t(1) << (end - start)) - 1;
    }

    // Scores become weights; `max`, `total` and the accumulators follow the new maximum. A row that has seen nothing
    // yet weighs hidden keys 1 against each other: its maximum is still LOWEST, and the first key seen decays that to 0.
    __aicore__ inline void Softmax() {
        const int32_t states = int32_t(lanes), all = int32_t(rows * width), each = int32_t(rows);
        const uint32_t row = width / 8;
        const uint32_t parts = width / REPEAT;
        for (uint32_t p = 0; p < parts; ++p)
            WholeReduceMax(part[p * lanes], score[p * REPEAT], int32_t(REPEAT), each, 1, 1, row,
                           ReduceOrder::ORDER_ONLY_VALUE);
        Then();
        Max(newMax, max, part, states);
        Then();
        if (parts > 1) {
            Max(newMax, newMax, part[lanes], states);
            Then();
        }
        Sub(decay, max, newMax, states);
        Spread(factor, newMax, lanes);
        Then();
        Exp(decay, decay, states);
        Adds(max, newMax, 0.0F, states);
        for (uint32_t p = 0; p < parts; ++p)
            Sub(score[p * REPEAT], score[p * REPEAT], factor, uint64_t(REPEAT), rows,
                BinaryRepeatParams(1, 1, 0, row, row, 1));
        Then();
        Exp(score, score, all);
        Mul(total, total, decay, states);
        Spread(factor, decay, lanes);
        Then();
        for (uint32_t p = 0; p < parts; ++p)
            WholeReduceSum(part[p * lanes], score[p * REPEAT], int32_t(REPEAT), each, 1, 1, row);
        if constexpr (DIRECT) Cast(weightBuffer.template Get<half>(), score, RoundMode::CAST_RINT, all);
        for (uint32_t r = 0; r < rows; ++r) ByFactor<Multiply>(sums[r * own], sums[r * own], factor[r * 8], own);
        Then();
        for (uint32_t p = 0; p < parts; ++p) {
            Add(total, total, part[p * lanes], states);
            Then();
        }
    }

    __aicore__ inline void Accumulate(const LocalTensor<T>& values, uint32_t token, uint32_t count) {
        const LocalTensor<C> v = Multipliable(values, count);
        LocalTensor<C> weights;
        if constexpr (DIRECT) weights = weightBuffer.template Get<half>();
        else weights = score;
        for (uint32_t query = 0; query < count_; ++query) {
            const Range seen = Seen(query, token, count);
            if (seen.from >= seen.to) continue;
            for (uint32_t r = query * group; r < (query + 1) * group; ++r) {
                Spread(spread, weights[r * width], RoundUp(seen.to, 8));
                Then();
                for (uint32_t i = seen.from; i < seen.to; i += t.accumulators) {
                    const uint32_t some = Min(t.accumulators, seen.to - i);
                    for (uint32_t d = 0; d < dim; d += REPEAT)
                        MulAddDst(sums[r * own + d], v[d / REPEAT * panelStep + i * rowElements], spread[i * LANES],
                                  uint64_t(Min(REPEAT, dim - d)), some,
                                  BinaryRepeatParams(1, 1, 0, dim / 8, rowElements / LANES, 1));
                    Then();
                }
            }
        }
    }

    AttendTiling t;
    uint32_t group, dim, lanes, width, own, panelStep, rowElements;
    uint32_t rows = 0, count_ = 0;
    int64_t position = 0;
    bool causal = true;
    TQue<TPosition::VECIN, 1> queries;
    TBuf<TPosition::VECCALC> scoreBuffer, dotBuffer, sumBuffer, spreadBuffer, stateBuffer, weightBuffer, wideBuffer,
        wideQueryBuffer;
    LocalTensor<T> heldQuery;
    LocalTensor<C> q_, spread;
    LocalTensor<float> score, dots, pairs, sums, max, newMax, total, decay, part, factor;
};

}  // namespace paged_kv
